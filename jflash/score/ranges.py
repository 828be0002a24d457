"""Which tiles a row or a column of tiles must visit, and which of those need no mask: both directions, side by side.

Where bounds tell all about visibility, the tiles lie side by side, and arithmetic tells from where to where. Segments, masks
and functions may leave any of them: then they stand in a list, see visits.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash.numerics import known, larger, select, smaller
from jflash.score.score import ONE_FOR_EACH, Score

PARTIAL, FULL = 1, 2  # the states of tiles that are visited, pair by pair and without a mask; 0 is that of the others

Index = Any  # a Python int where it is known at trace time, an int32 scalar where it is not
Bounds = Callable[[Index], tuple[Index, Index]]


class Segment(NamedTuple):
    """A part of a visit: steps lo <= n < hi; `masked` says whether some of their pairs are invisible or not there."""

    lo: Index
    hi: Index
    masked: bool
    listed: Callable[[Index], Index] | None = None

    def tile(self, n: Index) -> Index:
        """The tile that is visited in step n."""
        return n if self.listed is None else self.listed(n)


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

    def state(self, t: Index) -> Any:
        """What is done with tile t: 0, PARTIAL or FULL."""
        of = lambda lo, hi: jnp.int32((lo <= t) & (t < hi))
        return of(self.lo, self.hi) * PARTIAL + of(self.full_lo, self.full_hi) * (FULL - PARTIAL)


class List(NamedTuple):
    """A row of Score.visits: how many tiles need no mask, how many are visited, all tiles in order of visit, their states.

    A tile that hangs over the end comes last, as where bounds tell all: what hides nothing changes no bit of a sum.
    """

    read: Callable[[Index], Index]  # number n of the row
    tiles: int  # how many there are

    def segments(self) -> list[Segment]:
        full, visited = self.read(0), self.read(1)
        listed = lambda n: self.read(n + 2)
        return [Segment(0, full, False, listed), Segment(full, visited, True, listed)]

    def state(self, t: Index) -> Any:
        return self.read(t + (2 + self.tiles))


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


def kv_tiles(score: Score, rows: Span, block_kv: int) -> Tiles | List:
    """The kv tiles that a q tile visits; `score` comes from visits.with_kv_visits."""
    if score.visits is not None:
        return _listed(score, rows)
    return _tiles(score.key_bounds, rows, score.q_len, score.queries, block_kv)


def q_tiles(score: Score, cols: Span, block_q: int) -> Tiles | List:
    """The q tiles that a kv tile visits; `score` comes from visits.with_q_visits."""
    if score.visits is not None:
        return _listed(score, cols)
    return _tiles(score.query_bounds, cols, score.kv_len, score.keys, block_q)


def over(tiles: Tiles | List, visit: Callable, state: Any) -> Any:
    """What is left of `state` after visit(t, state, masked=...) of each tile, in the order of the visit."""
    for part in tiles.segments():
        step = lambda n, state, part=part: visit(part.tile(n), state, masked=part.masked)
        state = lax.fori_loop(part.lo, part.hi, step, state)
    return state


def for_all(tiles_of: Callable[[Score], Any], score: Score) -> Any:
    """tiles_of(score) for a loop that serves all batch elements at once: it visits what any of them must visit.

    A list is one for all of them already.
    """
    own = {name: getattr(score, name) for name in ONE_FOR_EACH if getattr(score, name) is not None}
    if not own or score.visits is not None:
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


def _listed(score: Score, span: Span) -> List:
    return List(lambda n: score.visits[span.tile, n], (score.visits.shape[-1] - 2) // 2)


def _tiles(bounds: Bounds, span: Span, length: int, there: Index, block: int) -> Tiles:
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
    full_lo = smaller(larger(_tile(common_first + block - 1, block), lo), hi)
    full_hi = smaller(larger(_tile(common_last + 1, block), full_lo), hi)
    if length % span.size or not known(there):
        full_hi = select(span.start + span.size <= there, full_hi, full_lo)
    return Tiles(lo, full_lo, full_hi, hi)


def _tile(position: Index, block: int) -> Index:
    """The tile that holds `position`, 0 where that lies before the first."""
    position = larger(position, 0)
    return position // block if known(position) else lax.div(position, jnp.asarray(block, position.dtype))


def _reached(bounds: Bounds, span: Span, there: Index, positions: Span):
    first, last = bounds(span.start)[0], bounds(span.last(there))[1]
    reached = positions.indices() <= last
    reached = reached if isinstance(first, int) and first <= 0 else reached & (positions.indices() >= first)
    return reached if known(there) else reached & (span.start < there)
