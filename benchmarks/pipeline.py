"""`python -m benchmarks.pipeline`: the ESTIMATE of jflash.machine_code.pipeline, and how far off it is on an H100.

The hot loops of the forward kernels are compiled for an H100 that is not there, and simulated. Tokamax's are beside them where
it is installed, launched as it ships them: what those took on one is published.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jflash
from benchmarks.measure import print_table
from jflash import machine_code

CLOCK = 1.755  # GHz, of an H100 SXM that multiplies matrices
LENGTH, WIDTH = 16384, 2048  # tokens, and head_dim x heads


class Tuned(NamedTuple):
    """A launch of tokamax's Pallas-Triton forward, full, bfloat16."""

    head_dim: int
    block_q: int
    block_kv: int
    num_stages: int
    num_warps: int
    tflops: int  # on an H100


# From the tuning cache that tokamax 0.0.17 ships, at 8k to 16k tokens: median times of its autotuner.
TOKAMAX = (
    Tuned(64, 128, 64, 3, 4, 320),
    Tuned(64, 64, 128, 3, 4, 313),
    Tuned(64, 128, 128, 3, 4, 302),
    Tuned(128, 128, 128, 3, 8, 415),
    Tuned(256, 128, 32, 3, 8, 363),
)
# (block_q, block_kv, warps, stages) of jflash, by head_dim: what its table has, and what it might have.
OURS = {
    64: ((128, 64, 4, 2), (128, 64, 4, 3), (64, 128, 4, 3), (128, 128, 8, 3), (128, 128, 4, 2)),
    128: ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 2)),
    256: ((128, 64, 8, 1), (128, 64, 8, 2), (128, 32, 8, 3)),
}


def row(name: str, launch: str, head_dim: int, fn: Callable, measured: int | None = None) -> dict[str, Any]:
    x = jax.ShapeDtypeStruct((1, LENGTH, WIDTH // head_dim, head_dim), jnp.bfloat16)
    (kernel,) = (k for k in machine_code.compile_for(fn, x, x, x, gpu="h100").kernels if k.tensor_cores)
    estimate = kernel.estimate(kernel.hot) if kernel.hot else None
    found = {"attention": name, "head_dim": head_dim, "launch": launch, "spill_bytes": kernel.spill_bytes}
    if estimate is None:
        return found
    peak = 2 * 4 * kernel.target.tensor_rate * kernel.target.multiprocessors * CLOCK / 1000
    tflops = peak * estimate.tensor_share
    return {
        **found,
        "serialized": bool(kernel.serialized),
        "estimated_cycles": round(estimate.cycles),
        "estimated_tflops": round(tflops),
        "measured_tflops": measured,
        "estimated_by_measured": round(tflops / measured, 2) if measured else None,
    }


def rows_of_tokamax(head_dims: list[int]) -> Iterator[dict[str, Any]]:
    try:
        from tokamax._src import config  # pyright: ignore[reportMissingImports]
        from tokamax._src.ops.attention import pallas_triton  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"tokamax is left out: {error}")
        return
    for tuned in TOKAMAX:
        if tuned.head_dim in head_dims:
            head_dim, q, kv, stages, warps, tflops = tuned
            of = pallas_triton.Config(block_q=q, block_k=kv, num_stages=stages, num_warps=warps)
            attend = pallas_triton.PallasTritonFlashAttention(config=of)
            with config.cross_compile(True):
                yield row("tokamax", f"{q}x{kv}, {warps} warps, {stages} stages", head_dim, attend, tflops)


def rows_of_jflash(head_dims: list[int]) -> Iterator[dict[str, Any]]:
    for head_dim in head_dims:
        for q, kv, warps, stages in OURS[head_dim]:
            launch = jflash.BlockSizes(block_q=q, block_kv=kv, num_warps=warps, num_stages=stages)
            attend = functools.partial(jflash.attention, block_sizes=launch)
            yield row("jflash", f"{q}x{kv}, {warps} warps, {stages} stages", head_dim, attend)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=list(OURS), default=list(OURS))
    options = parser.parse_args()
    machine_code.prepare()
    found = [*rows_of_tokamax(options.head_dim), *rows_of_jflash(options.head_dim)]
    print_table(f"h100, bfloat16, full, JAX {jax.__version__}: an ESTIMATE, nothing was run", found)


if __name__ == "__main__":
    main()
