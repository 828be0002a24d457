"""What a query sees, against matrices of 0 and 1 that are written out, and its bounds against what it sees."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jflash import Score
from jflash.score.score import Operands, Pairs


def score(q_len, kv_len, **options):
    return Score.of(np.zeros((1, q_len, 1, 4)), np.zeros((1, kv_len, 1, 4)), **options)


def visible(s, offset=None):
    s = s if offset is None else s.select(lambda leaf: jnp.int32(offset))
    seen = s.visible(Pairs(jnp.int32(0), jnp.int32(0), jnp.arange(s.q_len)[:, None], jnp.arange(s.kv_len)[None, :]))
    return np.broadcast_to(seen, (s.q_len, s.kv_len)).astype(int)


DRAWN = [
    ({}, "11111 11111 11111"),
    ({"causal": True}, "10000 11000 11100"),
    ({"causal": True, "q_offset": 2}, "11100 11110 11111"),
    ({"causal": True, "q_offset": -2}, "00000 00000 10000"),
    ({"causal": True, "q_offset": 9}, "11111 11111 11111"),
    ({"window": (1, 1)}, "11000 11100 01110"),
    ({"window": 1}, "11000 11100 01110"),
    ({"window": 0}, "10000 01000 00100"),
    ({"window": (0, None)}, "11111 01111 00111"),
    ({"window": (None, 0)}, "10000 11000 11100"),
    ({"window": (None, 1)}, "11000 11100 11110"),
    ({"window": (1, None), "causal": True, "q_offset": 2}, "01100 00110 00011"),
    ({"window": (1, 5), "causal": True, "q_offset": 2}, "01100 00110 00011"),
    ({"window": (1, 1), "q_offset": 4}, "00011 00001 00000"),
    ({"window": (2**40, 2**29)}, "11111 11111 11111"),
]


@pytest.mark.parametrize(("options", "drawn"), DRAWN)
def test_visible(options, drawn):
    rows = [[int(x) for x in row] for row in drawn.split()]
    np.testing.assert_array_equal(visible(score(3, 5, **options)), rows)
    if "q_offset" in options:
        traced = score(3, 5, **options | {"q_offset": jnp.array([options["q_offset"]])})
        np.testing.assert_array_equal(visible(traced, options["q_offset"]), rows)


SIDES = st.one_of(st.none(), st.integers(0, 12))


@given(st.integers(1, 9), st.integers(1, 9), SIDES, SIDES, st.booleans(), st.integers(-12, 12))
def test_bounds_hold_what_is_visible_and_nothing_else(q_len, kv_len, left, right, causal, offset):
    s = score(q_len, kv_len, window=(left, right), causal=causal, q_offset=offset)
    seen = visible(s)
    for bounds, lines in ((s.key_bounds, seen), (s.query_bounds, seen.T)):
        for position, line in enumerate(lines):
            first, last = bounds(position)
            among = np.arange(len(line))
            np.testing.assert_array_equal((among >= first) & (among <= last), line)


def test_a_positive_scale_costs_nothing_and_others_are_applied():
    logit = lambda s: s.logit(Operands(jnp.float32(3)), None)
    assert score(3, 3).unit == 0.5
    assert logit(score(3, 3)) == 3.0
    for scale in (0.0, -0.5):
        s = score(3, 3, scale=scale)
        assert s.unit == 1.0
        assert logit(s) == 3.0 * scale
