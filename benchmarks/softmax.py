"""`python -m benchmarks.softmax`: the naive, the safe and the online softmax: overflow, passes over memory, time.

Errors are the largest differences from NumPy in float64. Passes are counted, see passes(); what a compiler fuses or keeps
in a cache is not known to them, so bytes a second are those of the algorithm and not of the memory.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal

from benchmarks.measure import RESULTS, median_seconds, report
from jflash.reference import naive_softmax, online_softmax, safe_softmax

SOFTMAXES = {"naive": naive_softmax, "safe": safe_softmax, "online": online_softmax}
# What gives nothing before it has seen a whole row. A scan visits a row element by element, whatever it computes of it.
REDUCTIONS = {"reduce_max", "reduce_sum", "scan"}


# ------------------------------------------------------------------------------------------------ what is measured


def passes(fn: Callable[[Array], Array], x: Array) -> tuple[int, int]:
    """(times that fn(x) reads x, times that it writes an array of the size of x), with as few passes as there can be.

    A pass visits every element once. It ends at a reduction, as what needs the result has to visit the row again; all
    else joins a pass, recomputed from x where need be. So x is read once for each reduction on the longest chain of
    reductions that need one another, and once more for the outputs, which are written in this last pass.
    """
    closed, returned = jax.make_jaxpr(fn, return_shape=True)(x)
    shapes = [output.shape for output in jax.tree.leaves(returned)]
    if any(shape != x.shape for shape in shapes):
        raise ValueError(f"fn must return arrays of the shape of x, {x.shape}, got {shapes}")
    return 1 + max(_reductions_before(closed.jaxpr, [0])), len(shapes)


def _reductions_before(jaxpr, inputs: Sequence[int]) -> list[int]:
    """For each output of a jaxpr: how many reductions, one after another, it waits for; `inputs` likewise."""
    count = dict(zip(jaxpr.invars, inputs, strict=True))
    of = lambda atoms: [0 if isinstance(atom, Literal) else count.get(atom, 0) for atom in atoms]
    for eqn in jaxpr.eqns:
        before = of(eqn.invars)
        if eqn.primitive.name in ("jit", "pjit"):
            after = _reductions_before(eqn.params["jaxpr"].jaxpr, before)
        else:
            after = [max(before, default=0) + (eqn.primitive.name in REDUCTIONS)] * len(eqn.outvars)
        count.update(zip(eqn.outvars, after, strict=True))
    return of(jaxpr.outvars)


def largest_error(softmax: Callable[[Array], Array], x: Array) -> float:
    """The largest difference from float64; NaN where there is one NaN."""
    x64 = np.asarray(x, np.float64)
    e = np.exp(x64 - x64.max(-1, keepdims=True))
    return float(np.abs(np.asarray(softmax(x), np.float64) - e / e.sum(-1, keepdims=True)).max())


def compare(rows: int, columns: int, largest_logits: Sequence[float], repeats: int) -> list[dict[str, Any]]:
    """One line of the table for each softmax, of `rows` x `columns` logits."""
    x = jax.random.uniform(jax.random.key(0), (rows, columns), jnp.float32, minval=-1)
    x = x.at[:, -1].set(1)  # every row's largest logit, the last, so that an online sum is carried over to it
    seconds = median_seconds(SOFTMAXES, repeats, (x,))
    lines = []
    for name, softmax in SOFTMAXES.items():
        reads, writes = passes(softmax, x)
        lines.append(
            {
                "softmax": name,
                "reads": reads,
                "writes": writes,
                "milliseconds": 1e3 * seconds[name],
                "GB_per_second": 1e-9 * (reads + writes) * x.nbytes / seconds[name],
                **{f"error_at_{largest:g}": largest_error(softmax, largest * x) for largest in largest_logits},
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.softmax", description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--largest-logits", type=float, nargs="+", default=[10.0, 80.0, 100.0, 1000.0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "softmax.csv")
    options = parser.parse_args()
    for name in ("rows", "columns", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"{name} must be at least 1, got {getattr(options, name)}")

    lines = compare(options.rows, options.columns, options.largest_logits, options.repeats)
    title = f"softmax of {options.rows} x {options.columns} logits in float32, errors by the largest logit"
    report(title, lines, options.output, rows=options.rows, columns=options.columns, repeats=options.repeats)


if __name__ == "__main__":
    main()
