"""summary.md of `python -m benchmarks.gpu`: what was found, for people."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import jax

import jflash
from benchmarks import goals
from jflash.launch.table import Entry

PACKAGES = "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "triton", "jax-triton", "tokamax", "torch"


@dataclasses.dataclass
class Found:
    """What there is so far."""

    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # lines of checks.csv
    tuned: list[Entry] = dataclasses.field(default_factory=list)
    measured: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # lines of benchmarks.attention.measure()
    pictures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)  # what was left out, and why
    failures: list[str] = dataclasses.field(default_factory=list)  # what is wrong with jflash

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """The lines of checks that do not agree with float64, or failed."""
        return [line for line in self.checks if not line["agrees"]]


def text(found: Found) -> str:
    """The summary, in Markdown."""
    device = jax.devices()[0]
    rates = goals.side_by_side(found.measured)
    parts = [
        f"# jflash on {device.device_kind}",
        f"{datetime.date.today().isoformat()}; {', '.join(_versions(device))}",
        "## Checked against float64",
        _checked(found),
        "## Tuned",
        _list(map(str, found.tuned)),
        "## TFLOPS side by side",
        "The backward is what forward and backward take beyond the forward.",
        _rates(rates),
        "## Goals",
        _goals(rates, device.device_kind),
        "## Pictures",
        "\n".join(f"![{name}]({name})" for name in found.pictures) or "None.",
        "## Failed, and left out",
        _list([*(f"FAILED: {failure}" for failure in found.failures), *found.notes]),
    ]
    return "\n\n".join(parts) + "\n"


def _versions(device: Any) -> list[str]:
    """What was at work: Python, packages, and the driver's CUDA."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    versions = {"jflash": jflash.__version__, "Python": platform.python_version(), **installed}
    said = [f"{name} {version}" for name, version in versions.items()]
    return [*said, *map(str.strip, device.client.platform_version.splitlines())]


def _checked(found: Found) -> str:
    cases = {(line["case"], line["precision"]) for line in found.checks}
    wrong = {(line["case"], line["precision"]) for line in found.wrong}
    said = f"{len(cases)} cases, {len(found.checks)} outputs and gradients; {len(wrong) or 'no'} cases disagree or fail."
    if not wrong:
        return said
    columns = "case", "precision", "output", "error", "tolerance", "failure"
    return said + "\n\n" + _table(columns, ([line[column] for column in columns] for line in found.wrong))


def _rates(rates: Sequence[goals.Rates]) -> str:
    if not rates:
        return "Nothing was measured."
    names = list(dict.fromkeys(name for one in rates for name in one.tflops))
    of_cudnn = lambda one: one.tflops["jflash"] / one.tflops["cuDNN"] if {"jflash", "cuDNN"} <= one.tflops.keys() else None
    rows = ([one, *map(one.tflops.get, names), of_cudnn(one)] for one in rates)
    return _table(("shape", *names, "jflash / cuDNN"), rows)


def _goals(rates: Sequence[goals.Rates], device_kind: str) -> str:
    if not goals.judged_on(device_kind):
        return f"Not judged: they are for {' and '.join(sorted(goals.JUDGED_ON))}, this is {device_kind}."
    judged = [goal for one in rates for goal in goals.goals(one)]
    if not judged:
        return "Nothing was measured that they are for."
    columns = "shape", "goal", "TFLOPS to reach", "TFLOPS measured", "met"
    rows = ([goal.rates, goal.name, goal.least, goal.got, "yes" if goal.met else "no"] for goal in judged)
    return f"{sum(goal.met for goal in judged)} of {len(judged)} are met.\n\n" + _table(columns, rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) or "Nothing."
