"""Which tiles a row or a column of tiles must visit, and which of those need no mask: both directions, side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash.numerics import known, larger, select, smaller
from jflash.score.score import ONE_FOR_EACH, Pairs, Score

Index = Any  # a Python int where it is known at trace time, an int32 scalar where it is not
Bounds = Callable[[Index], tuple[Index, Index]]


class Segment(NamedTuple):
    """Tiles lo <= t < hi; `masked` says whether some of their pairs are invisible or not there."""

    lo: Index
    hi: Index
    masked: bool


class Tiles(NamedTuple):
    """Tiles to visit, lo <= t < hi, of which full_lo <= t < full_hi are visible everywhere."""

    lo: Index
    full_lo: Index
    full_hi: Index
    hi: Index

    def segments(self) -> list[Segment]:
        """The visit in order, without the segments that are known to be empty."""
        parts = [
            Segment(self.lo, self.full_lo, masked=True),
            Segment(self.full_lo, self.full_hi, masked=False),
            Segment(self.full_hi, self.hi, masked=True),
        ]
        return [s for s in parts if not (s.lo is s.hi or (known(s.lo, s.hi) and s.lo >= s.hi))]


class Span(NamedTuple):
    """`size` positions from `start` on: the rows or columns of one tile."""

    start: Index
    size: int

    def indices(self):
        return self.start + lax.iota(jnp.int32, self.size)

    def last(self, length: Index) -> Index:
        """The last position of the span that is there."""
        return smaller(self.start + self.size, length) - 1

    @property
    def tile(self) -> Index:
        """Which tile of this size it is."""
        return _tile(self.start, self.size)


def kv_tiles(score: Score, rows: Span, block_kv: int) -> Tiles:
    """The kv tiles that a q tile visits; with segments, `score` comes from with_kv_visits."""
    return _tiles(score, score.key_bounds, rows, score.q_len, score.queries, block_kv)


def q_tiles(score: Score, cols: Span, block_q: int) -> Tiles:
    """The q tiles that a kv tile visits; with segments, `score` comes from with_q_visits."""
    return _tiles(score, score.query_bounds, cols, score.kv_len, score.keys, block_q)


def anything_visible(score: Score) -> bool | Array:
    """Whether any query of any batch element may see any key. False is certain; True says that nothing excludes it."""
    everything = with_kv_visits(score, score.q_len, score.kv_len)
    tiles = for_all(lambda score: kv_tiles(score, Span(0, score.q_len), score.kv_len), everything)
    return tiles.lo < tiles.hi


def with_kv_visits(score: Score, block_q: int, block_kv: int) -> Score:
    """`score` with what its segments leave of the kv tiles that each q tile must visit."""
    return _with_visits(score, (score.q_segments, block_q), (score.kv_segments, block_kv))


def with_q_visits(score: Score, block_q: int, block_kv: int) -> Score:
    """`score` with what its segments leave of the q tiles that each kv tile must visit."""
    return _with_visits(score, (score.kv_segments, block_kv), (score.q_segments, block_q))


def for_all(tiles_of: Callable[[Score], Tiles], score: Score) -> Tiles:
    """tiles_of(score) for a loop that serves all batch elements at once: it visits what any of them must visit."""
    own = {name: getattr(score, name) for name in (*ONE_FOR_EACH, "visits") if getattr(score, name) is not None}
    if not own:
        return tiles_of(score)
    each = jax.vmap(lambda own: jax.tree.map(jnp.int32, tiles_of(score.replace(**own))))(own)
    lo, hi = jnp.min(each.lo), jnp.max(each.hi)
    full_lo = jnp.clip(jnp.max(each.full_lo), lo, hi)
    return Tiles(lo, full_lo, jnp.clip(jnp.min(each.full_hi), full_lo, hi), hi)


def seen_keys(score: Score, rows: Span, cols: Span) -> Array:
    """True for each of the keys `cols` that the bounds of the score let some query of `rows` see.

    What no query of a tile sees is loaded as zero there: a NaN in it would pass through a product with p = 0.
    """
    return _reached(score.key_bounds, rows, score.queries, cols)


def seeing_queries(score: Score, cols: Span, rows: Span) -> Array:
    """True for each of the queries `rows` that the bounds of the score let see some key of `cols`."""
    return _reached(score.query_bounds, cols, score.keys, rows)


def with_reach(score: Score, q: Array, k: Array, v: Array, *tangents: Array) -> Score:
    """`score` with what the bounds know nothing of: which keys some query sees and which queries see some key.

    Only segments, masks and functions hide more than the bounds, and it matters only where q, k, v or their tangents hold
    something that is not finite: only then are all pairs looked at, a few queries at a time.
    """
    if score.banded:
        return score
    finite = functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in (q, k, v, *tangents)])
    seen = jax.ShapeDtypeStruct((k.shape[0], k.shape[2], k.shape[1]), jnp.int8)
    sees = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.int8)
    all_of_them = lambda: (jnp.ones(seen.shape, seen.dtype), jnp.ones(sees.shape, sees.dtype))
    key_seen, query_sees = lax.cond(finite, all_of_them, lambda: _reach(score, seen, sees))
    return score.replace(key_seen=key_seen, query_sees=query_sees)


def _reach(score: Score, seen: jax.ShapeDtypeStruct, sees: jax.ShapeDtypeStruct) -> tuple[Array, Array]:
    """(which keys some query sees, which queries see some key), int8 of the given shapes."""
    batch, heads, q_len = sees.shape
    count = min(64, q_len)  # the last rows are looked at twice where 64 does not divide the length
    starts = jnp.minimum(jnp.arange(0, q_len, count, dtype=jnp.int32), q_len - count)
    b, h, j = (lax.iota(jnp.int32, n) for n in (batch, heads, score.kv_len))

    def leaf_of(name, x, start):
        """What broadcasts to [batch, heads, count, kv_len]."""
        if name in ONE_FOR_EACH:
            return x[:, None, None, None]
        if name == "q_segments":
            return lax.dynamic_slice_in_dim(x, start, count, 1)[:, None, :, None]
        if name == "kv_segments":
            return x[:, None, None, :]
        return x if name != "mask" or x.shape[2] == 1 else lax.dynamic_slice_in_dim(x, start, count, 2)

    def visit(start, reached):
        seen, sees = reached
        rows = start + lax.iota(jnp.int32, count)
        these = score.only(*ONE_FOR_EACH, "q_segments", "kv_segments", "mask", "mask_args", "first")
        these = these.map_leaves(lambda name, x: leaf_of(name, x, start))
        at = Pairs(b[:, None, None, None], h[None, :, None, None], rows[None, None, :, None], j[None, None, None, :])
        visible = jnp.broadcast_to(these.visible(at), (batch, heads, count, score.kv_len))
        by_group = visible.reshape(batch, seen.shape[1], -1, score.kv_len)
        sees = lax.dynamic_update_slice_in_dim(sees, visible.any(axis=3).astype(sees.dtype), start, 2)
        return seen | by_group.any(axis=2).astype(seen.dtype), sees

    zeros = jnp.zeros(seen.shape, seen.dtype), jnp.zeros(sees.shape, sees.dtype)
    return lax.fori_loop(0, len(starts), lambda n, reached: visit(starts[n], reached), zeros)


def _tiles(score: Score, bounds: Bounds, span: Span, length: int, there: Index, block: int) -> Tiles:
    """Bounds move by one with each position, so the first and the last of a span tell about all of it.

    They end at the last position that is there, so a tile that hangs over the end on either side is never a full one: a
    pair with a key that is not there has the logit 0, and its exp(0 - lse) may be infinite.
    """
    lowest, common_last = bounds(span.start)
    common_first, highest = bounds(span.last(there))
    hi = _tile(highest + block, block)  # the tile behind the one that holds `highest`
    lo = smaller(_tile(lowest, block), hi)
    if not known(there):
        hi = select(span.start < there, hi, lo)
    visits = Tiles(0, 0, 0, 0) if score.visits is None else Tiles(*(score.visits[span.tile, n] for n in range(4)))
    if score.visits is not None:
        lo = smaller(larger(lo, visits.lo), hi)
        hi = larger(smaller(hi, visits.hi), lo)
    if score.patterned:
        return Tiles(lo, hi, hi, hi)
    full_lo = smaller(larger(_tile(common_first + block - 1, block), lo), hi)
    full_hi = smaller(larger(_tile(common_last + 1, block), full_lo), hi)
    if score.visits is not None:
        full_lo = smaller(larger(full_lo, visits.full_lo), hi)
        full_hi = larger(smaller(full_hi, visits.full_hi), full_lo)
    if length % span.size or not known(there):
        full_hi = select(span.start + span.size <= there, full_hi, full_lo)
    return Tiles(lo, full_lo, full_hi, hi)


def _with_visits(score: Score, own: tuple[Any, int], other: tuple[Any, int]) -> Score:
    """Tiles whose ranges of ids do not meet need no visit; where both hold one id alone, the same, they need no mask.

    From the least to the last tile that is needed, int32 [batch, tiles, 4]: sorted ids lose nothing by that. Compared and
    reduced in one pass, so that nothing of tiles x tiles is kept.
    """
    if score.q_segments is None:
        return score
    (own_least, own_most), (other_least, other_most) = (_extremes(*side) for side in (own, other))
    meet = (other_least[:, None, :] <= own_most[:, :, None]) & (other_most[:, None, :] >= own_least[:, :, None])
    alone = (own_least == own_most)[:, :, None] & (other_least == other_most)[:, None, :]
    full = meet & alone
    count = other_least.shape[1]
    tile = lax.broadcasted_iota(jnp.int32, (1, 1, count), 2)
    first = lambda condition: jnp.min(jnp.where(condition, tile, count), axis=2)
    lo, hi = first(meet), jnp.max(jnp.where(meet, tile + 1, 0), axis=2)
    full_lo = first(full)
    full_hi = first(~full & (tile >= full_lo[:, :, None]))
    return score.replace(visits=jnp.stack([lo, full_lo, full_hi, hi], axis=-1))


def _extremes(ids: Any, block: int) -> tuple[Array, Array]:
    """(least, largest) of the ids of each tile, [batch, tiles]."""
    batch, length = ids.shape
    limits = jnp.iinfo(jnp.int32)
    tiles = lambda fill: jnp.pad(ids, ((0, 0), (0, -length % block)), constant_values=fill).reshape(batch, -1, block)
    return tiles(limits.max).min(axis=2), tiles(limits.min).max(axis=2)


def _tile(position: Index, block: int) -> Index:
    """The tile that holds `position`, 0 where that lies before the first."""
    position = larger(position, 0)
    return position // block if known(position) else lax.div(position, jnp.asarray(block, position.dtype))


def _reached(bounds: Bounds, span: Span, there: Index, positions: Span):
    first, last = bounds(span.start)[0], bounds(span.last(there))[1]
    reached = positions.indices() <= last
    reached = reached if isinstance(first, int) and first <= 0 else reached & (positions.indices() >= first)
    return reached if known(there) else reached & (span.start < there)
