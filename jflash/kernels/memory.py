"""Between arrays and tiles: block specs, head_dim chunks, masked loads and stores.

The Triton backend wants sizes that are powers of two, and before JAX 0.12 it does not mask a block that hangs over the
end of its array. So a ref holds all rows of one head, tiles are slices of it, and every load and store that may leave
the array carries a mask of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jflash.score import ranges
from jflash.score.ranges import Index, Span
from jflash.score.score import ONE_FOR_EACH, PAIRWISE, Pairs, Score

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


def score_spec(score: Score, group: int | None, q_head, kv_head) -> Score:
    """The block specs of a Score's leaves: what one batch element, and one query head or `group` of them, need of them.

    q_head(*grid) and kv_head(*grid) give (batch, head), q_head counting groups if `group` is given.
    """

    def spec(shape, index, head=q_head):
        """`index` takes (batch, head) to the block's index."""
        return pl.BlockSpec(shape, lambda *grid: index(*head(*grid)))

    def spec_of(name, x):
        if name in ("args", "mask_args"):
            return jax.tree.map(lambda arg: spec(arg.shape, lambda b, h: (0,)), x)
        if name == "first":
            return spec((2,), lambda b, h: (0,))
        if name == "sinks":
            return spec((1,), lambda b, h: (h,))
        if name == "dropout_keys":
            return spec((None, group, 2), lambda b, h: (b, h, 0))
        if name in PAIRWISE:
            one_batch, one_head = x.shape[0] == 1, x.shape[1] == 1
            heads = None if group is None else 1 if one_head else group
            return spec((None, heads, *x.shape[2:]), lambda b, h: (0 if one_batch else b, 0 if one_head else h, 0, 0))
        if name in ONE_FOR_EACH:
            return spec((1,), lambda b, h: (b,))
        if name == "visits":
            one_batch, one_head = x.shape[0] == 1, x.shape[1] == 1
            return spec((None, None, *x.shape[2:]), lambda b, h: (0 if one_batch else b, 0 if one_head else h, 0, 0))
        if name == "key_seen":
            return spec((None, None, x.shape[2]), lambda b, h: (b, h, 0), kv_head)
        if name == "query_sees":
            return spec((None, group, x.shape[2]), lambda b, h: (b, h, 0))
        return spec((None, *x.shape[1:]), lambda b, h: (b,) + (0,) * (x.ndim - 1))  # segments

    return score.map_leaves(spec_of)


@dataclasses.dataclass(frozen=True)
class Place:
    """The batch element b and the head h that a tile belongs to, and where to find them in the refs of a kernel.

    `batch` and `head` are None where the refs hold one batch element or one head only, and have no such axis.
    """

    b: Index
    h: Index
    batch: Index | None = None
    head: Index | None = None

    def view(self, ref, axes: tuple[str, ...], *rest):
        """ref at this place: `axes` names its axes before `rest`, "batch" or "head"; an axis of size 1 serves all."""
        lead = [x for x in (getattr(self, axis) for axis in axes) if x is not None]
        zero = lax.full((), 0, jnp.int32)  # the interpreter takes no Python int here
        return ref.at[(*(zero if size == 1 else x for x, size in zip(lead, ref.shape, strict=False)), *rest)]


class _AtPlace(NamedTuple):
    """What a ref holds at a place, indexed like a ref of its own: Triton takes no index into an index."""

    ref: jax.Ref
    place: Place

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape[2:]

    def __getitem__(self, index):
        index = (jnp.asarray(x, jnp.int32) for x in index)
        return self.place.view(self.ref, ("batch", "head"), *index)[...]


def score_at(score: Score, place: Place) -> Score:
    """The Score of the batch element that `place` names, for ranges.py, from one of refs."""

    def read(name, ref):
        if name == "visits" and place.batch is not None:
            return _AtPlace(ref, place)
        if name == "first":
            return ref[0], ref[1]
        return ref[0] if name == "sinks" else ref

    return score.select(lambda ref: ref[0 if place.batch is None else place.batch]).map_leaves(read)


def tile_of(score: Score, rows: Span, cols: Span, place: Place, across: bool = False) -> tuple[Score, Pairs]:
    """The Score of one tile, its leaves read from the refs, and the pairs of the tile; `across`: queries run across."""
    down = lambda x: x[None, :] if across else x[:, None]
    right = lambda x: x[:, None] if across else x[None, :]
    pairs = Pairs(jnp.asarray(place.b, jnp.int32), jnp.asarray(place.h, jnp.int32), down(rows.indices()), right(cols.indices()))

    def read(name, ref):
        if name == "q_segments":
            return down(_load(place.view(ref, ("batch",), _slice(rows)), inside(rows, score.q_len), 0))
        if name == "kv_segments":
            return right(_load(place.view(ref, ("batch",), _slice(cols)), inside(cols, score.kv_len), 0))
        if name in PAIRWISE:
            tile = _load_pairs(ref, place, rows, cols)
            return tile.T if across else tile
        if name == "dropout_keys":
            return tuple(place.view(ref, ("batch", "head"), word)[...] for word in range(2))
        return ref

    return score.map_leaves(read), pairs


def tiles_of(scores: list[Score], rows: Span, cols: Span, place: Place, across: bool = False) -> tuple[list[Score], Pairs]:
    """tile_of() each of them."""
    tiles, pairs = zip(*(tile_of(score, rows, cols, place, across) for score in scores), strict=True)
    return list(tiles), pairs[0]


def seen_keys(score: Score, rows: Span, cols: Span, batch: Index | None = None, kv_head: Index | None = None) -> Array:
    """True for each of the keys `cols` that must be loaded, see ranges.py."""
    seen = ranges.seen_keys(score, rows, cols)
    if score.key_seen is None:
        return seen
    return seen & (Vector(score.key_seen, batch, kv_head).load(cols, inside(cols, score.kv_len), 0) != 0)


def seeing_queries(score: Score, cols: Span, rows: Span, batch: Index | None = None, head: Index | None = None) -> Array:
    """True for each of the queries `rows` that must be loaded, see ranges.py."""
    seeing = ranges.seeing_queries(score, cols, rows)
    if score.query_sees is None:
        return seeing
    return seeing & (Vector(score.query_sees, batch, head).load(rows, inside(rows, score.q_len), 0) != 0)


def _load_pairs(ref, place: Place, rows: Span, cols: Span) -> Array:
    """The tile of a mask or a bias, of which any dimension may be 1; zero beyond the ends."""
    height, width = ref.shape[-2:]
    rows, cols = (Span(0, 1) if size == 1 else span for span, size in ((rows, height), (cols, width)))
    tile = _load(place.view(ref, ("batch", "head"), _slice(rows), _slice(cols)), inside_both(rows, height, cols, width), 0)
    return tile != 0 if jnp.issubdtype(ref.dtype, jnp.integer) else tile


def store_pairs(ref, place: Place, rows: Span, cols: Span, values: Array) -> None:
    """Stores a tile of the gradient of a bias; see _load_pairs."""
    view = place.view(ref, ("batch", "head"), _slice(rows), _slice(cols))
    plgpu.store(view, values.astype(ref.dtype), mask=inside_both(rows, ref.shape[-2], cols, ref.shape[-1]))


def inside_both(rows: Span, height: int, cols: Span, width: int) -> Array | None:
    """The mask of the pairs of a tile that are there; None where all tiles of this size are whole."""
    sides = inside(rows, height), inside(cols, width)
    masks = [jnp.expand_dims(side, axis) for side, axis in zip(sides, (1, 0), strict=True) if side is not None]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (rows.size, cols.size)) if masks else None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One head of a [batch, length, heads, width] array, as a kernel sees it: rows of `width` columns."""

    ref: jax.Ref
    width: int
    batch: Index | None = None  # which of the ref's batch elements and heads, where it holds several
    head: Index | None = None
    like: Any = None  # the dtype by which it is cut into chunks, where that is not the ref's own

    def _pieces(self, rows: Span, keep: Array | None):
        """(view of the ref, mask or None, chunk size) of each chunk."""
        start = 0
        for size in chunks(self.width, self.like or self.ref.dtype):
            index = (self.batch, _slice(rows), self.head, _slice(Span(start, size)))
            view = self.ref.at[tuple(x for x in index if x is not None)]
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
    batch: Index | None = None
    head: Index | None = None

    def _view(self, rows: Span):
        return self.ref.at[tuple(x for x in (self.batch, self.head, _slice(rows)) if x is not None)]

    def load(self, rows: Span, keep: Array | None, other: float) -> Array:
        return _load(self._view(rows), keep, other)

    def store(self, rows: Span, keep: Array | None, values: Array) -> None:
        plgpu.store(self._view(rows), values, mask=keep)


def _slice(span: Span) -> pl.Slice:
    # A Python int would be an int64 beside int32s in 64-bit mode, for the interpreter.
    return pl.ds(jnp.asarray(span.start, jnp.int32), span.size)


def _load(view, mask, other):
    return plgpu.load(view, mask=mask, other=None if mask is None else other)


def inside(rows: Span, length: int) -> Array | None:
    """The mask of the rows that are there; None where all tiles of this size are whole."""
    return None if length % rows.size == 0 else rows.indices() < length
