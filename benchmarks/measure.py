"""What benchmark programs share: times taken in turns, and their report as a table and a CSV."""

from __future__ import annotations

import csv
import math
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"


def median_seconds(programs: dict[str, Callable], repeats: int, *arguments: Array) -> dict[str, float]:
    """The median time of each program, compiled and warmed up."""
    for program in programs.values():
        jax.block_until_ready(program(*arguments))
    seconds = {name: [] for name in programs}
    for _ in range(repeats):  # in turns, so that the machine's moods meet all alike
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


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
