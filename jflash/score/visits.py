"""Which tiles hold a visible pair, where bounds alone do not tell: lists of tiles for loops, computed on the device.

The summary of a tile says of each reason to hide a pair whether it hides none of the tile's pairs or all of them; of reasons
together it may know less than of each, and such a tile is visited and its pairs are looked at one by one. It takes
(q_len / block_q) x (kv_len / block_kv) numbers, for each batch element and head only where these differ. A dense mask
is read once for it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jflash.score import ranges
from jflash.score.intervals import Summary, of_mask_fn, positions
from jflash.score.ranges import FULL, PARTIAL, Span
from jflash.score.score import ONE_FOR_EACH, Score

GRANULE = 64  # of a mask's own summary, which kernels of larger tiles share


class Cut(NamedTuple):
    """How many batch elements and heads share a Score, and into tiles of what size its pairs are cut."""

    batch: int
    heads: int
    block_q: int
    block_kv: int


def with_kv_visits(score: Score, cut: Cut) -> Score:
    """`score` with the kv tiles that each q tile visits, if its bounds do not tell them.

    Score.visits is then int32 [batch or 1, heads or 1, q_tiles, 2 + 2 * kv_tiles], see ranges.List.
    """
    return score if score.banded else score.replace(visits=_lists(summary(score, cut)))


def with_visits_of_all(score: Score, cut: Cut, *, of_keys: bool = False) -> Score:
    """`score` with the kv tiles that each q tile visits for any batch element and head; `of_keys`: the other way round.

    Score.visits is then [tiles, 2 + 2 * others].
    """
    if score.banded:
        return score
    of = _together(summary(score, cut))
    return score.replace(visits=_lists(_across(of) if of_keys else of)[0, 0])


def with_q_visits(score: Score, cut: Cut, kv_heads: int) -> Score:
    """`score` with the q tiles that each kv tile visits: [batch or 1, kv_heads or 1, kv_tiles, 2 + 2 * q_tiles].

    The query heads of a kv head visit the same tiles, those that any of them needs.
    """
    if score.banded:
        return score
    of = _across(summary(score, cut))
    if of.none.shape[1] > 1:
        of = Summary(*(x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).all(axis=2) for x in of))
    return score.replace(visits=_lists(of))


def anything_visible(score: Score) -> bool | Array:
    """Whether any query of any batch element may see any key. False is certain; True says that nothing excludes it."""
    if not score.banded:
        return ~summary(score, Cut(1, 1, score.q_len, score.kv_len)).none.all()
    tiles = ranges.for_all(lambda score: ranges.kv_tiles(score, Span(0, score.q_len), score.kv_len), score)
    return tiles.lo < tiles.hi


def states(score: Score, cut: Cut, *, together: bool = False) -> Array:
    """What a loop over kv tiles does with each: 0, PARTIAL or FULL, int32 [batch or 1, heads or 1, q_tiles, kv_tiles].

    `together`: a loop that serves all batch elements and heads at once.
    """
    if not score.banded:
        of = summary(score, cut)
        return _states(_together(of) if together else of)
    t = jnp.arange(-(-score.kv_len // cut.block_kv), dtype=jnp.int32)

    def of_row(score: Score, i: Array) -> Array:
        tiles = ranges.for_all(lambda score: ranges.kv_tiles(score, Span(i, cut.block_q), cut.block_kv), score)
        return jnp.broadcast_to(tiles.state(t), t.shape)

    rows = jnp.arange(0, score.q_len, cut.block_q, dtype=jnp.int32)
    of_rows = jax.vmap(of_row, in_axes=(None, 0))
    own = {name: getattr(score, name)[:, None] for name in ONE_FOR_EACH if getattr(score, name) is not None}
    if together or not own:
        return of_rows(score, rows)[None, None]
    return jax.vmap(lambda own: of_rows(score.replace(**own), rows)[None])(own)


def summary(score: Score, cut: Cut) -> Summary:
    """What is known of each tile, [batch or 1, heads or 1, q_tiles, kv_tiles]."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _summary(score, cut)


def _summary(score: Score, cut: Cut) -> Summary:
    rows, cols = positions(score.q_len, cut.block_q), positions(score.kv_len, cut.block_kv)
    its = score.map_leaves(lambda name, x: x[:, None, None, None] if name in ONE_FOR_EACH else x)
    parts = [_of_bounds(its, cut, rows.lo[:, None], cols.lo)]
    if score.q_segments is not None:
        parts.append(_of_segments(score, cut))
    if score.mask is not None:
        parts.append(_of_mask(score.mask, cut))
    if score.mask_fn is not None:
        b, h = jnp.arange(cut.batch, dtype=jnp.int32), jnp.arange(cut.heads, dtype=jnp.int32)
        parts.append(of_mask_fn(its, b[:, None], h, rows, cols))
    none = functools.reduce(jnp.logical_or, [part.none for part in parts])
    every = functools.reduce(jnp.logical_and, [part.all for part in parts])
    lead = (1,) * (4 - none.ndim)
    return Summary(none.reshape(*lead, *none.shape), every.reshape(*lead, *every.shape))


def _together(of: Summary) -> Summary:
    """What is known of each tile for all batch elements and heads together."""
    return Summary(*(x.all(axis=(0, 1), keepdims=True) for x in of))


def _states(of: Summary) -> Array:
    return jnp.where(of.none, 0, jnp.where(of.all, FULL, PARTIAL)).astype(jnp.int32)


def _across(of: Summary) -> Summary:
    """With the q tiles of each kv tile in a row."""
    return Summary(*(x.swapaxes(2, 3) for x in of))


def _of_bounds(score: Score, cut: Cut, i: Array, j: Array) -> Summary:
    """i and j are the first positions of the tiles. Bounds move by one with each position, so ends of a tile tell of all.

    A tile that hangs over the end is never full: a pair with a key that is not there has the logit 0, and its
    exp(0 - lse) may be infinite.
    """
    last = jnp.minimum(i + cut.block_q, score.queries) - 1
    lowest, common_last = score.key_bounds(i)
    common_first, highest = score.key_bounds(last)
    end = j + cut.block_kv - 1
    none = (last < i) | (j > highest) | (end < lowest)
    return Summary(none, (last - i == cut.block_q - 1) & (j >= common_first) & (end <= common_last))


def _of_segments(score: Score, cut: Cut) -> Summary:
    """Of tiles whose ids have no bit in common no pair is visible; where both hold one id alone, the same, every pair is."""
    rows = [x[:, None, :, None] for x in _ids(score.q_segments, cut.block_q)]
    cols = [x[:, None, None, :] for x in _ids(score.kv_segments, cut.block_kv)]
    (least, most, *bits), (other_least, other_most, *other_bits) = rows, cols
    apart = (other_least > most) | (other_most < least)
    for x, y in zip(bits, other_bits, strict=True):
        apart = apart | ((x & y) == 0)
    return Summary(apart, (least == most) & (other_least == other_most) & (least == other_least))


def _ids(ids: Any, block: int) -> tuple[Array, ...]:
    """(least, largest, and two sets of bits) of the ids of each tile, [batch, tiles].

    An id is a bit of each set: by its last digits, which tells all apart where there are no more than 32, and by a product
    of it, which tells many apart of others.
    """
    batch, length = ids.shape
    tiles = jnp.pad(ids, ((0, 0), (0, -length % block)), mode="edge").reshape(batch, -1, block)
    number = lax.bitcast_convert_type(tiles, jnp.uint32)
    of_32 = number & np.uint32(31), (number * np.uint32(2654435769)) >> np.uint32(27)
    bit_or = lambda x: lax.reduce(x, np.uint32(0), lax.bitwise_or, (2,))
    return tiles.min(axis=2), tiles.max(axis=2), *(bit_or(jnp.left_shift(np.uint32(1), x)) for x in of_32)


def _of_mask(mask: Array, cut: Cut) -> Summary:
    """Of a dimension of size 1 there is one tile, which stands for all."""
    blocks = [1 if size == 1 else block for size, block in zip(mask.shape[2:], cut[2:], strict=True)]
    granules = [math.gcd(block, GRANULE) for block in blocks]
    some, every = _reduced(mask != 0, jnp.any, granules), _reduced(mask != 0, jnp.all, granules)
    counts = [block // granule for block, granule in zip(blocks, granules, strict=True)]
    return Summary(~_reduced(some, jnp.any, counts), _reduced(every, jnp.all, counts))


def _reduced(x: Array, how: Any, blocks: list[int]) -> Array:
    """x [batch, heads, rows, cols] reduced over blocks of rows and columns, False beyond the ends."""
    pads = [(0, -size % block) for size, block in zip(x.shape[2:], blocks, strict=True)]
    x = jnp.pad(x, [(0, 0), (0, 0), *pads]) if any(pad for _, pad in pads) else x
    batch, heads, rows, cols = x.shape
    return how(x.reshape(batch, heads, rows // blocks[0], blocks[0], cols // blocks[1], blocks[1]), axis=(3, 5))


def _lists(of: Summary) -> Array:
    """[batch, heads, tiles, others] -> [batch, heads, tiles, 2 + 2 * others], int32, see ranges.List."""
    state = _states(of)
    count = jnp.int32(state.shape[-1])
    # Sorted by what is to be done with a tile, then by its number: first those that need no mask.
    order = jnp.where(state == 0, 2 * count, jnp.where(state == PARTIAL, count, 0))
    order = lax.rem(jnp.sort(order + lax.broadcasted_iota(jnp.int32, state.shape, 3), axis=-1), count)
    number = lambda condition: jnp.sum(condition, axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.concatenate([number(state == FULL), number(state != 0), order, state], axis=-1)
