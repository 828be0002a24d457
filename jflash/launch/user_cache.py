"""Where jflash.tune() keeps what it measured: a table for each kind of GPU, in the user's cache directory."""

from __future__ import annotations

import functools
import os
import pathlib
import re
from collections.abc import Iterable

from jflash.launch import table as launch_table
from jflash.launch.table import Entry

VARIABLE = "JFLASH_CACHE_DIR"


def directory() -> pathlib.Path | None:
    """$JFLASH_CACHE_DIR, else where platformdirs says that the user's caches are; None where neither is there."""
    if chosen := os.environ.get(VARIABLE):
        return pathlib.Path(chosen)
    try:
        import platformdirs
    except ImportError:
        return None
    return pathlib.Path(platformdirs.user_cache_dir("jflash"))


def path_for(kind: str) -> pathlib.Path | None:
    """The table of a kind of GPU, whether it is there or not."""
    folder = directory()
    return None if folder is None else folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', kind)}.json"


def entries(kind: str | None) -> tuple[Entry, ...]:
    """What was measured on GPUs of a kind; raises ValueError where the file is damaged."""
    path = None if kind is None else path_for(kind)
    if path is None:
        return ()
    try:
        changed = path.stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return _read(path, changed)


def required_path(kind: str) -> pathlib.Path:
    """The table of a kind of GPU; raises where it can be in no place."""
    path = path_for(kind)
    if path is None:
        raise ModuleNotFoundError(
            f"jflash.tune() has no place to keep its result: set {VARIABLE}, or install platformdirs, "
            "which knows the user's cache directory (pip install platformdirs)"
        )
    return path


def keep(kind: str, measured: Iterable[Entry]) -> pathlib.Path:
    """Adds entries to the table of a kind of GPU, in place of those for the same keys. Returns its path."""
    path = required_path(kind)
    table = {entry.key: entry for entry in (*entries(kind), *measured)}
    launch_table.write(table.values(), path)
    _read.cache_clear()  # a clock may be too coarse to tell the new file from the old one
    return path


@functools.cache
def _read(path: pathlib.Path, changed: int) -> tuple[Entry, ...]:
    try:
        return launch_table.read(path.read_text(), str(path))
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(
            f"{error}. Delete the file, and run jflash.tune() again, or set {VARIABLE} to another place"
        ) from error
