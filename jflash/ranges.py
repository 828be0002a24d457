"""Which tiles a row or a column of tiles must visit, and which of those need no mask: both directions, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jflash.numerics import known, larger, select, smaller
from jflash.score import Score

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
        return [s for s in parts if not (known(s.lo, s.hi) and s.lo >= s.hi)]


class Span(NamedTuple):
    """`size` positions from `start` on: the rows or columns of one tile."""

    start: Index
    size: int

    def indices(self):
        return self.start + lax.iota(jnp.int32, self.size)

    def last(self, length: int) -> Index:
        """The last position of the span that is there."""
        return smaller(self.start + self.size, length) - 1


def kv_tiles(score: Score, rows: Span, block_kv: int) -> Tiles:
    """The kv tiles that a q tile visits."""
    return _tiles(score.key_bounds, rows, score.q_len, block_kv)


def q_tiles(score: Score, cols: Span, block_q: int) -> Tiles:
    """The q tiles that a kv tile visits."""
    return _tiles(score.query_bounds, cols, score.kv_len, block_q)


def for_all(tiles_of: Callable[[Score], Tiles], score: Score) -> Tiles:
    """tiles_of(score) for a loop that serves all batch elements at once: it visits what any of them must visit."""
    if not jax.tree.leaves(score):
        return tiles_of(score)
    tiles = jax.vmap(tiles_of)(score)
    lo, hi = jnp.min(tiles.lo), jnp.max(tiles.hi)
    full_lo = jnp.clip(jnp.max(tiles.full_lo), lo, hi)
    return Tiles(lo, full_lo, jnp.clip(jnp.min(tiles.full_hi), full_lo, hi), hi)


def seen_keys(score: Score, rows: Span, cols):
    """True for each of the keys `cols` that some query of `rows` sees.

    What no query of a tile sees is loaded as zero there: a NaN in it would pass through a product with p = 0.
    """
    return _reached(score.key_bounds, rows, score.q_len, cols)


def seeing_queries(score: Score, cols: Span, rows):
    """True for each of the queries `rows` that sees some key of `cols`."""
    return _reached(score.query_bounds, cols, score.kv_len, rows)


def _tiles(bounds: Bounds, span: Span, length: int, block: int) -> Tiles:
    """Bounds move by one with each position, so the first and the last of a span tell about all of it.

    They end at the last position that is there, so a tile that hangs over the end on either side is never a full one: a
    pair with a key that is not there has the logit 0, and its exp(0 - lse) may be infinite.
    """
    lowest, common_last = bounds(span.start)
    common_first, highest = bounds(span.last(length))
    hi = _tile(highest + block, block)  # the tile behind the one that holds `highest`
    lo = smaller(_tile(lowest, block), hi)
    full_lo = smaller(larger(_tile(common_first + block - 1, block), lo), hi)
    full_hi = smaller(larger(_tile(common_last + 1, block), full_lo), hi)
    if length % span.size:
        full_hi = select(span.start + span.size <= length, full_hi, full_lo)
    return Tiles(lo, full_lo, full_hi, hi)


def _tile(position: Index, block: int) -> Index:
    """The tile that holds `position`, 0 where that lies before the first."""
    position = larger(position, 0)
    return position // block if known(position) else lax.div(position, jnp.asarray(block, position.dtype))


def _reached(bounds: Bounds, span: Span, length: int, positions):
    first, last = bounds(span.start)[0], bounds(span.last(length))[1]
    reached = positions <= last
    return reached if isinstance(first, int) and first <= 0 else reached & (positions >= first)
