"""The tiles that are visited, against what is visible: exhaustively for small lengths."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import Score
from jflash.score import ranges
from jflash.score.ranges import Segment, Span
from jflash.score.score import Pairs

LENGTHS = ((6, 6), (7, 13), (13, 7), (1, 9), (9, 1))
SIDES = (None, 0, 2, 20)
OFFSETS = (0, 3, -4, 40, -40)


def dense(score):
    at = Pairs(0, 0, np.arange(score.q_len)[:, None], np.arange(score.kv_len)[None, :])
    seen = score.visible(at)
    return np.broadcast_to(seen, (score.q_len, score.kv_len))


def check(tiles, lines, block, whole):
    """`lines`: what is visible to a span, its positions down, those of the other side across; whether it is `whole`."""
    length = lines.shape[1]
    lo, full_lo, full_hi, hi = (int(x) for x in tiles)
    assert 0 <= lo <= full_lo <= full_hi <= hi <= -(-length // block)
    for t in range(-(-length // block)):
        tile = lines[:, t * block : (t + 1) * block]
        if tile.any():
            assert lo <= t < hi, "a tile with something to see is visited"
        if full_lo <= t < full_hi:
            assert tile.all(), "a tile without a mask is visible everywhere"
            assert whole, "and so is its span"
            assert tile.shape[1] == block, "and neither hangs over the end"
        if tile.all() and tile.shape[1] == block and whole:
            assert full_lo <= t < full_hi, "a tile that is visible everywhere needs no mask"
    if lines.any():
        assert lines[:, lo * block : (lo + 1) * block].any(), "the first visited tile has something to see"
        assert lines[:, (hi - 1) * block : hi * block].any(), "so has the last"
    else:
        assert hi - lo <= 1, "a span that sees nothing visits at most the tile where its keys would be"


@pytest.mark.parametrize("lengths", LENGTHS)
def test_tiles_and_reach(lengths):
    q_len, kv_len = lengths
    for left, right, offset in itertools.product(SIDES, SIDES, OFFSETS):
        score = Score(q_len, kv_len, 1.0, left, right, offset)
        seen = dense(score)
        for block_q, block_kv in ((2, 4), (4, 2), (16, 16)):
            for start in range(0, q_len, block_q):
                lines = seen[start : start + block_q]
                rows = Span(start, block_q)
                check(ranges.kv_tiles(score, rows, block_kv), lines, block_kv, len(lines) == block_q)
                np.testing.assert_array_equal(ranges.seen_keys(score, rows, Span(0, kv_len + 3))[:kv_len], lines.any(0))
                assert not ranges.seen_keys(score, rows, Span(0, kv_len + 3))[kv_len:].any()
            for start in range(0, kv_len, block_kv):
                lines = seen[:, start : start + block_kv].T
                cols = Span(start, block_kv)
                check(ranges.q_tiles(score, cols, block_q), lines, block_q, len(lines) == block_kv)
                np.testing.assert_array_equal(ranges.seeing_queries(score, cols, Span(0, q_len)), lines.any(0))


def test_traced_and_known_ranges_are_the_same():
    traced = jax.jit(
        lambda offset, start, left, right: ranges.kv_tiles(
            Score(50, 90, 1.0, left, right, q_offset=offset), Span(start, 8), 16
        ),
        static_argnums=(2, 3),
    )
    for left, right, offset, start in itertools.product(SIDES, SIDES, OFFSETS, (0, 8, 48)):
        known = ranges.kv_tiles(Score(50, 90, 1.0, left, right, offset), Span(start, 8), 16)
        assert tuple(map(int, traced(offset, start, left, right))) == tuple(known)


def test_segments_leave_out_what_is_known_to_be_empty():
    full = Score(64, 64, 1.0)
    assert ranges.kv_tiles(full, Span(0, 16), 16).segments() == [Segment(0, 4, False)]
    ragged = Score(64, 60, 1.0)
    assert ranges.kv_tiles(ragged, Span(0, 16), 16).segments() == [Segment(0, 3, False), Segment(3, 4, True)]


def test_several_batch_elements_visit_what_any_of_them_must():
    offsets = (-40, 0, 7, 30, 200)
    tiles_of = lambda score: ranges.kv_tiles(score, Span(16, 8), 4)
    together = ranges.for_all(tiles_of, Score(50, 90, 1.0, 9, 3, q_offset=jnp.array(offsets)))
    each = [tiles_of(Score(50, 90, 1.0, 9, 3, offset)) for offset in offsets]
    visited = [t for one in each for t in range(one.lo, one.hi)]
    assert all(together.lo <= t < together.hi for t in visited)
    for t in range(int(together.full_lo), int(together.full_hi)):
        assert all(one.full_lo <= t < one.full_hi for one in each)
    same = ranges.for_all(tiles_of, Score(50, 90, 1.0, 20, 3, q_offset=jnp.array([7, 7])))
    assert tuple(map(int, same)) == tuple(tiles_of(Score(50, 90, 1.0, 20, 3, 7)))
    assert same.full_hi > same.full_lo
