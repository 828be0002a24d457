"""What benchmark programs share: times taken in turns, and their report as a table and a CSV."""

from __future__ import annotations

import contextlib
import csv
import math
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"
LEAST = 0.01  # seconds that a timing lasts at least


def median_seconds(*args: Any, **how: Any) -> dict[str, float]:
    """The median time of a call of each program; arguments as in seconds_in_turns()."""
    return {name: statistics.median(times) for name, times in seconds_in_turns(*args, **how).items()}


def seconds_in_turns(
    programs: Mapping[Any, Callable], repeats: int, *inputs: tuple[Any, ...], wait: Callable[[Any], Any] = jax.block_until_ready
) -> dict[Any, list[float]]:
    """The times of a call of each program, compiled and warmed up, turn by turn.

    A timing is of as many calls as last LEAST seconds. They are queued, a device runs them in order, and wait(result) is
    for the last one: how long Python takes to start a call does not count where the device takes longer. The calls meet
    the tuples of arguments in turn, so that no cache holds the last ones.
    """

    def run(program: Callable, calls: int, first: int) -> float:
        start, result = time.perf_counter(), None
        for n in range(first, first + calls):
            result = program(*inputs[n % len(inputs)])
        wait(result)
        return time.perf_counter() - start

    calls = {}
    for name, program in programs.items():
        run(program, 1, 0)
        calls[name] = max(1, math.ceil(LEAST / run(program, 1, 1)))
    seconds = {name: [] for name in programs}
    for n in range(repeats):  # programs in turn, so that the machine's moods meet all alike
        for name, program in programs.items():
            run(program, 1, n)  # not counted: what the program before left to be freed, and cold caches
            seconds[name].append(run(program, calls[name], n + 1) / calls[name])
    return seconds


def assert_agree(what: str, own: Any, other: Any, relative: float, absolute: float = 0.0) -> None:
    """What is measured must be jax.nn's, to so much of the largest of its numbers."""
    x, y = np.asarray(own, np.float64), np.asarray(other, np.float64)
    apart, largest = np.abs(x - y).max(), np.abs(y).max()
    if not apart <= relative * largest + absolute:
        raise AssertionError(f"{what}: {apart:.1e} from jax.nn's, the largest of which is {largest:.1e}")


@contextlib.contextmanager
def csv_lines(output: pathlib.Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What adds a line to a new CSV, with the columns of the first one, at once: whoever is stopped keeps what there is."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [])

        def add(line: dict[str, Any]) -> None:
            if not writer.fieldnames:
                writer.fieldnames = list(line)
                writer.writeheader()
            writer.writerow(line)
            file.flush()

        yield add


def device_name() -> str:
    """This process's device, as it stands in the names of files."""
    return jax.devices()[0].device_kind.lower().replace(" ", "_")


def shown(value: Any) -> str:
    """A cell of the table."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def print_table(title: str, lines: list[dict[str, Any]]) -> None:
    """One row a line, with the columns of the longest: a line may lack the last ones."""
    columns = max(lines, key=len)
    table = Table(title=title)
    for column, value in columns.items():
        table.add_column(column.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for line in lines:
        table.add_row(*(shown(line.get(column)) for column in columns))
    Console(width=200).print(table)


def write_csv(lines: list[dict[str, Any]], output: pathlib.Path, **constant: Any) -> None:
    """The same columns, and then what is the same in all lines."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*max(lines, key=len), *constant])
        writer.writeheader()
        writer.writerows({**{column: shown(value) for column, value in line.items()}, **constant} for line in lines)
    print(f"written to {output}")


def setting() -> dict[str, str]:
    """What is measured on."""
    versions = {"jax": jax.__version__, "numpy": np.__version__, "python": platform.python_version()}
    return {"device": jax.devices()[0].device_kind, **versions}


def report(title: str, lines: list[dict[str, Any]], output: pathlib.Path, **more: Any) -> None:
    """Prints a table and writes it to a CSV with what it was measured on, and `more` that is the same in all lines."""
    where = setting()
    print_table(f"{title}; {where['device']}, JAX {where['jax']}", lines)
    write_csv(lines, output, **more, **where)
