"""`python -m benchmarks.sparse`: attention under masks that hide most pairs, beside full attention and beside jax.nn.

Of each pattern, in turns: jflash, which finds the tiles to visit by itself; jax.nn with the mask written out; jflash without a
mask; and what the summary of the tiles takes alone. Where PyTorch and a C++ compiler are, also FlexAttention, whose block mask
is built beforehand and not counted, and which has no backward on a CPU. A CSV; nothing is reported of what is not jax.nn's.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jflash
from benchmarks.attention import wait
from benchmarks.measure import RESULTS, assert_agree, csv_lines, device_name, print_table, seconds_in_turns, setting
from jflash.attention import engine_of
from jflash.launch.blocks import DEFAULTS
from jflash.score.score import Score


class Pattern(NamedTuple):
    """Which pairs are visible: the options of attention() that say so, and the same of one pair, for others."""

    options: Callable[[Array], dict[str, Any]]  # of the document of each token
    visible: Callable[[Any, Any], Any]  # of (i, j)


def patterns(length: int) -> dict[str, Pattern]:
    side = round(length**0.5)  # of a square of positions
    of_functions = {
        "dilated window": lambda i, j: (abs(i - j) <= length // 8) & ((i - j) % 4 == 0),
        "neighbourhood of 7 x 7": lambda i, j: (abs(i // side - j // side) <= 3) & (abs(i % side - j % side) <= 3),
        "prefix-LM": lambda i, j: (j <= i) | (j < length // 4),
    }
    by_function = lambda fn: Pattern(lambda ids: {"mask_fn": lambda b, h, i, j: fn(i, j)}, fn)
    together = lambda i, j: document_of(i, length) == document_of(j, length)
    return {name: by_function(fn) for name, fn in of_functions.items()} | {
        "16 interleaved documents": Pattern(lambda ids: {"segment_ids": ids}, together)
    }


def document_of(i: Any, length: int) -> Any:
    """Of token i: documents take turns, a 64th of the length each."""
    return i // (length // 64) % 16


def arrays(length: int, heads: int, head_dim: int, dtype: str, seed: int) -> tuple[Array, ...]:
    """q, k, v, do, and the document of each token."""
    keys = jax.random.split(jax.random.key(seed), 4)
    matrices = (jax.random.normal(key, (1, length, heads, head_dim), jnp.dtype(dtype)) for key in keys)
    return *matrices, document_of(jnp.arange(length, dtype=jnp.int32), length)[None]


def forward(fn: Callable) -> Callable:
    return lambda q, k, v, do, ids: (fn(q, k, v, ids),)


def with_gradients(fn: Callable) -> Callable:
    def forward_backward(q, k, v, do, ids):
        o, pull = jax.vjp(lambda *x: fn(*x, ids), q, k, v)
        return o, *pull(do)

    return forward_backward


def summary(pattern: Pattern) -> Callable:
    """What finds the tiles that are visited, alone."""

    def run(q, k, v, do, ids):
        engine: Any = engine_of(None, DEFAULTS, None, q, v)
        score = Score.of(q, k, **pattern.options(ids))
        return engine.elsewhere.visits(score, engine.elsewhere.cut(q, v, score))

    return run


def flex(pattern: Pattern, length: int) -> Callable:
    """FlexAttention, compiled; the inputs are converted once for each set of arrays."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # pyright: ignore[reportMissingImports]

    mask = create_block_mask(lambda b, h, i, j: pattern.visible(i, j), None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)
    inputs: dict[int, Any] = {}

    def run(*given):
        if id(given[0]) not in inputs:
            inputs[id(given[0])] = [torch.tensor(np.asarray(x, np.float32)).transpose(1, 2).contiguous() for x in given[:3]]
        with torch.no_grad():
            return (compiled(*inputs[id(given[0])], block_mask=mask).transpose(1, 2),)

    return run


def measure(name: str, pattern: Pattern, shape: tuple[int, int, int, str], repeats: int) -> list[dict[str, Any]]:
    inputs = [arrays(*shape, seed) for seed in range(2)]
    q, k, v, _, ids = inputs[0]
    i, j = np.indices((shape[0], shape[0]), sparse=True)
    written = jnp.asarray(pattern.visible(i, j))[None, None]
    paths = {
        "jflash": lambda q, k, v, ids: jflash.attention(q, k, v, **pattern.options(ids)),
        "jflash, full": lambda q, k, v, ids: jflash.attention(q, k, v),
        "jax.nn": lambda q, k, v, ids: jax.nn.dot_product_attention(q, k, v, mask=written),
    }
    ways = {"forward": forward, "forward and backward": with_gradients}
    programs: dict[Any, Any] = {
        (path, what): jax.jit(way(fn)).lower(*inputs[0]).compile() for path, fn in paths.items() for what, way in ways.items()
    }
    programs["summary", ""] = jax.jit(summary(pattern)).lower(*inputs[0]).compile()
    with contextlib.suppress(ImportError):
        programs["FlexAttention", "forward"] = flex(pattern, shape[0])
    for path, what in programs:
        if path in ("jflash", "FlexAttention"):
            for x, y in zip(programs[path, what](*inputs[0]), programs["jax.nn", what](*inputs[0]), strict=True):
                assert_agree(f"{path}, {name}, {what}", x, y, 1e-4)
    seconds = seconds_in_turns(programs, repeats, *inputs, wait=wait)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    share = jflash.visits(q, k, v, **pattern.options(ids)).share
    lines = []
    for path, what in programs:
        line = {
            "pattern": name, "attention": path, "what": what, "milliseconds": round(1e3 * median[path, what], 3),
            "visible_percent": round(100 * float(written.mean()), 2), "visited_percent": round(share, 2),
        }  # fmt: skip
        if path == "jflash":
            others = ("jflash, full", what), ("summary", ""), ("jax.nn", what)
            full, own_summary, theirs = (np.asarray(seconds[other]) for other in others)
            own = np.asarray(seconds[path, what])
            # Of the same turn, for a machine may be slow for half of the turns: the median of what they say.
            line["times_its_share_of_full"] = round(float(np.median((own - own_summary) / (share / 100 * full))), 2)
            line["times_as_fast_as_jax_nn"] = round(float(np.median(theirs / own)), 2)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/sparse_<device>.csv")
    options = parser.parse_args()
    output = options.output or RESULTS / f"sparse_{device_name()}.csv"
    shape = options.length, options.heads, options.head_dim, options.dtype

    lines = []
    with csv_lines(output) as add:
        for name, pattern in patterns(options.length).items():
            these = measure(name, pattern, shape, options.repeats)
            for line in these:
                whole = {"times_its_share_of_full": None, "times_as_fast_as_jax_nn": None} | line
                add(whole | {"length": options.length, "heads": options.heads, "head_dim": options.head_dim,
                             "dtype": options.dtype, "repeats": options.repeats, **setting()})  # fmt: skip
            lines += these
    print_table(f"length {options.length}, {options.heads} heads of {options.head_dim}, {options.dtype}", lines)
    print(f"written to {output}")


if __name__ == "__main__":
    main()
