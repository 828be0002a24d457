"""`python -m benchmarks.matmul_tiling`: what tiling does for a matrix product: small tiles, large tiles and jnp.dot.

One kernel at two sizes of its tile: each element that a program loads serves as many products as the tile is long, so
that a product of N x N matrices with tiles of B x B loads 2 N³ / B elements, from a cache or not. The naive tile is the
smallest that the tensor cores take. Without a GPU for Triton, the kernels are interpreted, and not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from benchmarks.measure import RESULTS, median_seconds, report
from jflash.launch import gpu

SMALLEST = 16  # side of a tensor-core product
CHAINED = 10  # products in a timed program, so that its start does not count

Multiply = Callable[[Array, Array], Array]


# ------------------------------------------------------------------------------------------------------ the kernel


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A program computes an m x n tile of the product, k products of each element at a time."""

    m: int
    n: int
    k: int

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if size < SMALLEST or size & (size - 1):
                raise ValueError(f"block_{name} must be a power of two of at least {SMALLEST}, got {size}")

    def check(self, m: int, n: int, k: int) -> None:
        """Raises ValueError unless the blocks divide a product of [m, k] by [k, n]."""
        for name, size in {"m": m, "n": n, "k": k}.items():
            block = getattr(self, name)
            if size < 1 or size % block:
                raise ValueError(f"{name} must be a positive multiple of block_{name} = {block}, got {size}")

    def loaded(self, m: int, n: int, k: int) -> int:
        """Elements that all programs load: each its rows of a and its columns of b."""
        return (m // self.m) * (n // self.n) * (self.m * k + k * self.n)

    @property
    def num_warps(self) -> int:
        """A warp for 1024 elements of the tile, which are 32 registers a thread; up to eight."""
        return min(8, max(1, self.m * self.n // 1024))

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


NAIVE = Blocks(SMALLEST, SMALLEST, SMALLEST)


def matmul(a: Array, b: Array, blocks: Blocks, interpret: bool = False) -> Array:
    """a [m, k] times b [k, n], in their dtype, summed in float32."""
    (m, k), (rows, n) = a.shape, b.shape
    if rows != k:
        raise ValueError(f"b must have as many rows as a has columns, {k}, got {rows}")
    blocks.check(m, n, k)
    return pl.pallas_call(
        functools.partial(_kernel, block_k=blocks.k),
        grid=(m // blocks.m, n // blocks.n),
        # Nothing is loaded for a block spec: it says which rows and columns a program may load from.
        in_specs=[pl.BlockSpec((blocks.m, k), lambda i, j: (i, 0)), pl.BlockSpec((k, blocks.n), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((blocks.m, blocks.n), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps),
        interpret=interpret,
        name=f"matmul_{blocks}",
    )(a, b)


def _kernel(a_ref, b_ref, c_ref, *, block_k: int):
    def visit(step, acc):
        ks = pl.ds(step * block_k, block_k)
        return acc + jnp.dot(a_ref[:, ks], b_ref[ks, :], preferred_element_type=jnp.float32)

    acc = lax.fori_loop(0, a_ref.shape[1] // block_k, visit, jnp.zeros(c_ref.shape, jnp.float32))
    c_ref[...] = acc.astype(c_ref.dtype)


# ------------------------------------------------------------------------------------------------ what is measured


def largest_error(multiply: Multiply, a: Array, b: Array) -> float:
    """The largest difference from float64, relative to the largest element of the product."""
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    return float(np.abs(np.asarray(multiply(a, b), np.float64) - expected).max() / np.abs(expected).max())


def chained(multiply: Multiply) -> Multiply:
    """A program of several products, each of which waits for the one before."""
    return jax.jit(lambda a, b: functools.reduce(lambda x, _: multiply(x, b), range(CHAINED), a))


def compare(size: int, dtype, tiled: Blocks, repeats: int, interpret: bool) -> list[dict[str, Any]]:
    """One line of the table for each way to multiply two size x size matrices; no times where interpreted."""
    blocks = {"naive": NAIVE, "tiled": tiled}
    products: dict[str, Multiply] = {
        **{name: jax.jit(functools.partial(matmul, blocks=x, interpret=interpret)) for name, x in blocks.items()},
        "jnp.dot": jax.jit(jnp.dot),
    }
    a, b = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0)))
    b = b / size**0.5  # a chain of products neither grows nor vanishes
    lines = []
    for name, multiply in products.items():
        loaded = blocks[name].loaded(size, size, size) if name in blocks else None
        lines.append(
            {
                "product": name,
                "size": size,
                "blocks": str(blocks.get(name, "")),
                "MiB_loaded": loaded and loaded * a.dtype.itemsize / 2**20,
                "times_less_than_naive": loaded and NAIVE.loaded(size, size, size) / loaded,
                "error": largest_error(multiply, a, b),
            }
        )
    if not interpret:
        seconds = median_seconds({name: chained(multiply) for name, multiply in products.items()}, repeats, (a, b))
        for line in lines:
            one = seconds[line["product"]] / CHAINED
            line |= {
                "milliseconds": 1e3 * one,
                "TFLOPS": 1e-12 * 2 * size**3 / one,
                "times_as_fast_as_naive": seconds["naive"] / CHAINED / one,
            }
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matmul_tiling", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", help="default: 128 to 2048, to 256 where interpreted")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--block-m", type=int, default=128)
    parser.add_argument("--block-n", type=int, default=128)
    parser.add_argument("--block-k", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "matmul_tiling.csv")
    options = parser.parse_args()
    interpret = not gpu.is_default() or gpu.too_old() is not None
    sizes = options.sizes or ([128, 256] if interpret else [128, 256, 512, 1024, 2048])
    try:
        tiled = Blocks(options.block_m, options.block_n, options.block_k)
        for size in sizes:
            tiled.check(size, size, size)
    except ValueError as error:
        parser.error(str(error))

    dtype = jnp.dtype(options.dtype)
    lines = [line for size in sizes for line in compare(size, dtype, tiled, options.repeats, interpret)]
    report(f"products in {dtype.name}", lines, options.output, dtype=dtype.name, interpreted=interpret)
    if interpret:
        print("No GPU for Triton here: the kernels were interpreted. How long that takes says nothing of a GPU: no times.")


if __name__ == "__main__":
    main()
