"""How far the tuner has come: bars where rich is installed, else lines on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Say = Callable[[str, int, int, str], None]  # (what is worked on, steps done, steps in all, a note on the last one)


@contextlib.contextmanager
def shown() -> Iterator[Say]:
    try:
        import rich.console
        import rich.progress
    except ImportError:
        yield lambda what, done, total, note: print(f"{what} {done}/{total}: {note}", file=sys.stderr, flush=True)
        return
    columns = ("{task.description:8}", rich.progress.BarColumn(), "{task.completed}/{task.total}", "{task.fields[note]}")
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bars:
        tasks: dict[str, rich.progress.TaskID] = {}

        def say(what: str, done: int, total: int, note: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, note="")
            bars.update(tasks[what], completed=done, total=total, note=note)

        yield say
