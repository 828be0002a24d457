"""Between arrays and tiles: block specs, head_dim chunks, masked loads and stores.

The Triton backend wants sizes that are powers of two, and before JAX 0.12 it does not mask a block that hangs over the
end of its array. So a ref holds all rows of one head, tiles are slices of it, and every load and store that may leave
the array carries a mask of its own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jflash.ranges import Index, Span
from jflash.score import Score

SMALLEST_CHUNK = 16  # the least depth of a tensor-core product in 16-bit floats


def chunks(width: int, dtype) -> tuple[int, ...]:
    """head_dim as falling powers of two, the last one padded to 16: 96 is 64 + 32, 80 is 64 + 16, 72 is 64 + 16.

    float32 is padded to one power of two instead: in chunks, ptxas gives up at 32 registers and spills up to 100 KB.
    """
    padded = -(-width // SMALLEST_CHUNK) * SMALLEST_CHUNK
    if jnp.dtype(dtype).itemsize > 2:
        return (1 << (padded - 1).bit_length(),)
    return tuple(1 << bit for bit in reversed(range(padded.bit_length())) if padded >> bit & 1)


def matrix_spec(x: Array | jax.ShapeDtypeStruct, group: int | None, index_map) -> pl.BlockSpec:
    """All rows of one head of x `[batch, length, heads, width]`; of `group` heads that lie side by side if given.

    index_map(*grid) gives (batch, head), head counting groups if `group` is given.
    """

    def blocks(*grid):
        batch, head = index_map(*grid)
        return batch, 0, head, 0

    return pl.BlockSpec((None, x.shape[1], group, sum(chunks(x.shape[3], x.dtype))), blocks)


def vector_spec(length: int, group: int | None, index_map) -> pl.BlockSpec:
    """One head (or `group` heads) of a [batch, heads, length] array."""
    return pl.BlockSpec((None, group, length), lambda *grid: (*index_map(*grid), 0))


def score_spec(score: Score, index_map) -> Score:
    """The block specs of a Score's leaves."""
    if score.q_offset is None:
        return score
    return dataclasses.replace(score, q_offset=pl.BlockSpec((1,), lambda *grid: (index_map(*grid)[0],)))


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One head of a [batch, length, heads, width] array, as a kernel sees it: rows of `width` columns."""

    ref: jax.Ref
    width: int
    head: Index | None = None  # which of the ref's heads, where it holds a group of them

    def _pieces(self, rows: Span, keep: Array | None):
        """(view of the ref, mask or None, chunk size) of each chunk."""
        start = 0
        for size in chunks(self.width, self.ref.dtype):
            columns = pl.ds(start, size)
            row = pl.ds(rows.start, rows.size)
            view = self.ref.at[row, columns] if self.head is None else self.ref.at[row, self.head, columns]
            mask = None if keep is None else jnp.broadcast_to(keep[:, None], (rows.size, size))
            if start + size > self.width:
                inside = jnp.broadcast_to(lax.broadcasted_iota(jnp.int32, (1, size), 1) + start < self.width, (rows.size, size))
                mask = inside if mask is None else mask & inside
            yield view, mask
            start += size

    def load(self, rows: Span, keep: Array | None) -> tuple[Array, ...]:
        """The chunks of some rows; zero where not `keep` (one bool a row, None: all) and beyond the last column."""
        return tuple(_load(view, mask, 0) for view, mask in self._pieces(rows, keep))

    def store(self, rows: Span, keep: Array | None, values: tuple[Array, ...]) -> None:
        for (view, mask), value in zip(self._pieces(rows, keep), values, strict=True):
            plgpu.store(view, value.astype(self.ref.dtype), mask=mask)


@dataclasses.dataclass(frozen=True)
class Vector:
    """One head of a [batch, heads, length] array."""

    ref: jax.Ref
    head: Index | None = None

    def _view(self, rows: Span):
        row = pl.ds(rows.start, rows.size)
        return self.ref.at[row] if self.head is None else self.ref.at[self.head, row]

    def load(self, rows: Span, keep: Array | None, other: float) -> Array:
        return _load(self._view(rows), keep, other)

    def store(self, rows: Span, keep: Array | None, values: Array) -> None:
        plgpu.store(self._view(rows), values, mask=keep)


def _load(view, mask, other):
    return plgpu.load(view, mask=mask, other=None if mask is None else other)


def inside(rows: Span, length: int) -> Array | None:
    """The mask of the rows that are there; None where all tiles of this size are whole."""
    return None if length % rows.size == 0 else rows.indices() < length
