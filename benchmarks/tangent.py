"""`python -m benchmarks.tangent`: jax.jvp of attention, and Hessian-vector products, beside jax.nn's and beside the forward.

Of jflash and jax.nn, in turns: the forward, jax.jvp, the gradient, and jax.jvp of the gradient, all inputs moving. A CSV, and
a picture of jax.jvp by length. Nothing is reported of a tangent that is not jax.nn's.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import platform
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import Progress

import jflash
from benchmarks import plot
from benchmarks.measure import RESULTS, assert_agree, csv_lines, device_name, print_table, seconds_in_turns

# What is computed, and how many products of the forward's size that takes a tiled attention whose forward takes two.
PRODUCTS = {"forward": 2, "jvp": 7, "gradient": 7, "jvp of gradient": 24}


def programs(causal: bool) -> dict[tuple[str, str], Callable]:
    """(path, what) -> fn(x, do, xt, dot), x and xt being (q, k, v) and their tangents."""
    paths = {
        "jflash": functools.partial(jflash.attention, causal=causal),
        "jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=causal),
    }
    return {(path, what): functools.partial(_of(what), fn) for path, fn in paths.items() for what in PRODUCTS}


def _of(what: str) -> Callable:
    gradient = lambda fn: lambda x, do: jax.vjp(fn, *x)[1](do)
    return {
        "forward": lambda fn, x, do, xt, dot: fn(*x),
        "jvp": lambda fn, x, do, xt, dot: jax.jvp(fn, x, xt),
        "gradient": lambda fn, x, do, xt, dot: gradient(fn)(x, do),
        "jvp of gradient": lambda fn, x, do, xt, dot: jax.jvp(gradient(fn), (x, do), (xt, dot)),
    }[what]


def arrays(length: int, heads: int, head_dim: int, dtype: str, seed: int) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    of = lambda: jax.random.normal(next(keys), (1, length, heads, head_dim), jnp.dtype(dtype))
    return (of(), of(), of()), of(), (of(), of(), of()), of()


def measure(length: int, heads: int, head_dim: int, dtype: str, causal: bool, repeats: int) -> list[dict[str, Any]]:
    inputs = [arrays(length, heads, head_dim, dtype, seed) for seed in range(2)]
    compiled: dict[Any, Any] = {name: jax.jit(fn).lower(*inputs[0]).compile() for name, fn in programs(causal).items()}
    for what in PRODUCTS:
        for x, y in zip(*(jax.tree.leaves(compiled[path, what](*inputs[0])) for path in ("jflash", "jax.nn")), strict=True):
            assert_agree(what, x, y, 1e-3, 1e-5)
    seconds = seconds_in_turns(compiled, repeats, *inputs)
    median = lambda name: statistics.median(seconds[name])
    # Of the two in the same turn, for a machine may be slow for half of the turns: the median of what they say.
    times = lambda one, other: round(statistics.median(x / y for x, y in zip(seconds[one], seconds[other], strict=True)), 2)
    forward = 2.0 * heads * length**2 * head_dim * (0.5 if causal else 1)
    return [
        {
            "attention": path,
            "what": what,
            "length": length,
            "heads": heads,
            "head_dim": head_dim,
            "dtype": dtype,
            "causal": causal,
            "milliseconds": round(1e3 * median((path, what)), 3),
            "TFLOPS": round(1e-12 * forward * PRODUCTS[what] / median((path, what)), 4),
            "times_the_forward": times((path, what), (path, "forward")),
            "times_as_fast_as_jax_nn": times(("jax.nn", what), (path, what)),
            "temporary_MiB": round(compiled[path, what].memory_analysis().temp_size_in_bytes / 2**20, 3),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "repeats": repeats,
        }
        for path, what in compiled
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tangent", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(8, 13)])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float32")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/tangent_<device>.csv")
    options = parser.parse_args()
    output = options.output or RESULTS / f"tangent_{device_name()}.csv"

    lines = []
    with Progress() as progress, csv_lines(output) as add:
        for length in progress.track(options.lengths, description="measuring"):
            these = measure(length, options.heads, options.head_dim, options.dtype, options.causal, options.repeats)
            for line in these:
                add(line)
            lines += these
    shown = ("attention", "what", "length", "milliseconds", "times_the_forward", "times_as_fast_as_jax_nn", "temporary_MiB")
    first, mask = lines[0], "causal" if options.causal else "full"
    title = f"{mask}: {first['dtype']}, {first['device']}, JAX {first['jax']}, {options.heads} heads of {options.head_dim}"
    print_table(title, [{name: line[name] for name in shown} for line in lines if line["length"] == max(options.lengths)])
    drawn = [{name: str(x) for name, x in line.items()} for line in lines if line["what"] == "jvp"]
    plot.draw(drawn, f"jax.jvp, {title}", output.with_suffix(".png"))
    print(f"written to {output} and {output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
