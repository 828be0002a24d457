"""`python -m benchmarks.gpu`: one command for whoever has a GPU: it checks, tunes, measures and writes down what it found.

In this order, each with a share of the time, the most important first:

1. checks: the kernels against float64, every case of proof/cases.py by the rule of proof/accuracy.py           checks.csv
2. tuning: jflash.tune() at the main shapes; kept in the user's cache too, and checked             tuned.json, tuned.csv
3. benchmarks: attention beside its peers, see benchmarks.attention                      headline.csv, tokens_16k.csv
4. pictures of those, and the summary with what jflash reached of its goals                    *.png, summary.md

Time is looked at between cases and shapes: what is not begun when it is up is left out, and the summary says so. Every line
is in its file as soon as it is there, and SIGTERM or Ctrl-C still leave a summary. The exit status is 1 where jflash
disagrees with float64 or fails, 130 where it was stopped, else 0; a goal that is missed changes nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jflash
from benchmarks import attention, native_triton, plot, summary
from benchmarks.attention import Shape
from benchmarks.goals import HIDDEN, TOKENS
from benchmarks.measure import RESULTS, csv_lines, device_name
from benchmarks.summary import Found
from jflash.launch import gpu
from jflash.launch import table as launch_table
from jflash.proof import accuracy
from jflash.proof.cases import CASES, SELF_TEST, Case

PEERS = "jflash", "cuDNN", "native triton", "tokamax", "tokamax triton", "torch"
LENGTHS, HEAD_DIMS = (4096, 8192, 16384), (64, 128, 256)
REPEATS = 7
LEAST_TUNING = 5.0  # seconds that a shape is worth beginning for
THREADS = min(8, os.cpu_count() or 1)  # compile at once

# ------------------------------------------------------------------------------------------------------- what is run


@dataclasses.dataclass(frozen=True)
class Check:
    """A case and how it is computed."""

    case: Case
    precision: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is checked, tuned and measured, the most important first."""

    implementation: str  # that is checked
    checks: Sequence[Check]
    tuned: Sequence[Shape]
    measured: dict[str, Sequence[Shape]]  # by the name of their CSV
    paths: Sequence[str] | None  # of benchmarks.attention; None: all


def full() -> Plan:
    """For a GPU."""
    headline = [Shape(2, 4096, 8, 64, "float16", *kind) for kind in itertools.product((False, True), repeat=2)]
    kinds = itertools.product(LENGTHS, HEAD_DIMS, (True, False), (False, True))
    tokens = [Shape(TOKENS // length, length, HIDDEN // dim, dim, "bfloat16", *kind) for length, dim, *kind in kinds]
    tuned = [Shape(TOKENS // LENGTHS[0], LENGTHS[0], HIDDEN // dim, dim, "bfloat16", True, True) for dim in HEAD_DIMS]
    return Plan("triton", every_check(), tuned, {"headline": headline, "tokens_16k": tokens}, PEERS)


def every_check() -> list[Check]:
    """Each case in its own dtype, a selection of all kinds first; then in the other dtypes; then float32 as TF32."""
    cases = list(dict.fromkeys((*SELF_TEST, *CASES)))
    others = [
        dataclasses.replace(case, dtype=dtype)
        for case, dtype in itertools.product(cases, ("bfloat16", "float16", "float32"))
        if case.dtype != dtype
    ]
    # By default a GPU multiplies float32 as TF32, but XLA not where there are few rows or columns: dense attention is
    # then exact, and tells nothing of what TF32 excuses.
    rounded = [case for case in cases if case.dtype == "float32" and min(case.q_len, case.kv_len, case.head_dim) >= 16]
    precision = lambda case: "highest" if case.dtype == "float32" else None
    of_dtype = [Check(case, precision(case)) for case in dict.fromkeys((*cases, *others))]
    return [*of_dtype, *map(Check, rounded)]


def tiny() -> Plan:
    """The same stages where there is no GPU, in seconds: kernels interpreted, what is timed in plain JAX."""
    small = Case(20, 20, head_dim=8, heads=1, kv_heads=1, batch=1, causal=True)
    checks = [Check(small, "highest"), Check(dataclasses.replace(small, dtype="float16", sinks=True))]
    of = lambda length, backward: Shape(64 // length, length, 2, 8, "float32", True, backward)
    tokens = [of(length, backward) for length, backward in itertools.product((32, 64), (False, True))]
    return Plan("interpret", checks, [of(32, True)], {"headline": [of(16, False)], "tokens_16k": tokens}, None)


# --------------------------------------------------------------------------------------------------------- the stages
# Each is stage(plan, found, folder, until) and begins nothing when time.monotonic() has reached `until`.


def check(plan: Plan, found: Found, folder: pathlib.Path, until: float) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(THREADS)
    in_time = lambda one: judge(one, plan.implementation) if time.monotonic() < until else None
    try:
        with csv_lines(folder / "checks.csv") as add:
            running = [pool.submit(in_time, one) for one in plan.checks]
            for done in concurrent.futures.as_completed(running):
                keep(done.result() or (), found, add)
        left = sum(done.result() is None for done in running)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if left:
        found.notes.append(f"{left} of {len(plan.checks)} checks are left out: the time was up")
    tell(f"checked {len(plan.checks) - left} of {len(plan.checks)} cases")


def judge(one: Check, implementation: str) -> list[dict[str, Any]]:
    """A line for the output and for each gradient of a case, or one for what failed."""
    case, run = one.case, functools.partial(accuracy.run, one.case, precision=one.precision)
    head = {"case": case.name, "dtype": case.dtype, "precision": one.precision, "implementation": implementation}
    try:
        arrays = case.arrays()
        got, naive = run(arrays, implementation=implementation), run(arrays, implementation="naive")
        verdicts = accuracy.verdicts(case, arrays, got, naive, accuracy.exact(case, arrays))
    except Exception as error:
        nothing = {"output": None, "error": None, "tolerance": None}
        return [{**head, **nothing, "agrees": False, "failure": what(error)}]
    line = lambda v: {"output": v.name, "error": v.error, "tolerance": v.tolerance, "agrees": v.agrees, "failure": None}
    return [{**head, **line(verdict)} for verdict in verdicts]


def keep(lines: Iterable[dict[str, Any]], found: Found, add: Callable) -> None:
    for line in lines:
        found.checks.append(line)
        add(line)
        if not line["agrees"]:
            tell(f"WRONG: {line}")


def tune(plan: Plan, found: Found, folder: pathlib.Path, until: float) -> None:
    with csv_lines(folder / "tuned.csv") as add:
        for n, shape in enumerate(plan.tuned):
            seconds = (until - time.monotonic()) / (len(plan.tuned) - n)
            if seconds < LEAST_TUNING:
                found.notes.append(f"{len(plan.tuned) - n} of {len(plan.tuned)} shapes are not tuned: the time was up")
                break
            q, k, v, _ = shape.arrays(0)
            try:
                measured = jflash.tune(q, k, v, causal=shape.causal, minutes=seconds / 60)
            except Exception as error:
                is_fault = gpu.is_default() and not isinstance(error, ModuleNotFoundError)
                (found.failures if is_fault else found.notes).append(f"nothing is tuned at {shape}: {what(error)}")
                continue
            found.tuned += measured.values()
            launch_table.write(found.tuned, folder / "tuned.json")
            tell(f"tuned {shape}")
            # What is launched from now on, for these widths at any length, is new: is it right?
            case = Case(300, 300, head_dim=shape.head_dim, dtype=shape.dtype, causal=shape.causal)
            keep(judge(Check(case), plan.implementation), found, add)


def benchmark(plan: Plan, found: Found, folder: pathlib.Path, until: float) -> None:
    def note(text: str) -> None:
        found.notes.append(text)
        tell(text)

    if gpu.is_default() and (reason := native_triton.unavailable()):
        note(f"native triton is left out: {reason}")
    for name, shapes in plan.measured.items():
        with csv_lines(folder / f"{name}.csv") as add:
            for n, shape in enumerate(shapes):
                if time.monotonic() >= until:
                    note(f"{len(shapes) - n} of {len(shapes)} shapes of {name} are left out: the time was up")
                    break
                try:
                    lines = attention.measure(shape, REPEATS, plan.paths, note)
                except Exception as error:  # in the middle of timing
                    found.failures.append(f"no times at {shape}: {what(error)}")
                    continue
                for line in lines:
                    add(line)
                found.measured += lines
                tell(", ".join([str(shape), *(f"{line['attention']} {line['TFLOPS']:.4g}" for line in lines)]))
                if not any(line["attention"] == "jflash" for line in lines):
                    found.failures.append(f"jflash has no result at {shape}")


def draw(plan: Plan, found: Found, folder: pathlib.Path, until: float) -> None:
    for name, shapes in plan.measured.items():
        if len({shape.length for shape in shapes}) > 1:  # a curve
            found.pictures += [path.name for path in plot.draw_all(folder / f"{name}.csv")]


STAGES = ((check, 0.3), (tune, 0.6), (benchmark, 0.95), (draw, 1.0))  # and the share of the time after which it ends


def run(plan: Plan, folder: pathlib.Path, seconds: float) -> int:
    """All stages, within about so many seconds; returns the exit status."""
    found, start, stopped = Found(), time.monotonic(), False
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for stage, share in STAGES:
            stage(plan, found, folder, start + share * seconds)
            (folder / "summary.md").write_text(summary.text(found))
    except KeyboardInterrupt:
        stopped = True
        found.notes.append("stopped before the end")
    finally:
        (folder / "summary.md").write_text(summary.text(found))
    tell(f"written to {folder / 'summary.md'}")
    return 1 if found.wrong or found.failures else 130 if stopped else 0


def what(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def tell(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Checks, tunes and measures jflash on a GPU.")
    parser.add_argument("--out", type=pathlib.Path, help="a folder; default: benchmarks/results/<device>")
    parser.add_argument("--minutes", type=float, default=4.0, help="about how long it may take")
    parser.add_argument("--tiny", action="store_true", help="the same at tiny sizes, with no GPU, to try the program itself")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be positive, got {options.minutes}")
    if not options.tiny and (why_not := gpu.too_old() if gpu.is_default() else "JAX finds none"):
        parser.error(f"a GPU that runs the Triton kernels is needed: {why_not}. --tiny tries the program without one")
    if options.tiny and options.out is None:
        parser.error("--tiny needs --out: its times are none to be kept among the results")
    plan = tiny() if options.tiny else full()
    return run(plan, options.out or RESULTS / device_name(), 60 * options.minutes)


def stop(number: int, frame: Any) -> None:
    """SIGTERM as Ctrl-C, but once: the summary is written in peace."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
