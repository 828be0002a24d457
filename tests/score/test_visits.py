"""Which tiles are visited under segments, masks and functions, against all pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jflash
from jflash import Score
from jflash.score import ranges, visits
from jflash.score.ranges import Span
from jflash.score.score import Pairs
from jflash.score.visits import Cut

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def score_of(q_len=1024, kv_len=1024, batch=1, heads=1, **options):
    x = lambda length: np.zeros((batch, length, heads, 16), np.float32)
    return Score.of(x(q_len), x(kv_len), **options)


def visible(score, batch=1, heads=1):
    """All pairs, [batch, heads, q_len, kv_len]."""
    b, h, i, j = np.indices((batch, heads, score.q_len, score.kv_len), np.int32, sparse=True)
    pairs = lambda name, x: {"q_segments": x[:, None, :, None], "kv_segments": x[:, None, None, :]}.get(name, x)
    wide = score.map_leaves(lambda name, x: pairs(name, x) if name.endswith("segments") else x)
    wide = wide.map_leaves(lambda name, x: x[:, None, None, None] if name in ("q_offset", "q_lengths", "kv_lengths") else x)
    seen = wide.visible(Pairs(*map(jnp.asarray, (b, h, i, j)))) & (i < wide.queries)
    return np.broadcast_to(seen, (batch, heads, score.q_len, score.kv_len))


def tiles_of(seen, block_q, block_kv):
    """(some pair is visible, every pair is, and the tile is whole) of each tile."""
    rows, cols = (-(-size // block) for size, block in zip(seen.shape[2:], (block_q, block_kv), strict=True))
    padded = np.zeros((*seen.shape[:2], rows * block_q, cols * block_kv), bool)
    padded[:, :, : seen.shape[2], : seen.shape[3]] = seen
    tiles = padded.reshape(*seen.shape[:2], rows, block_q, cols, block_kv)
    return tiles.any((3, 5)), tiles.all((3, 5))


def walked(row):
    """The states of the tiles of a row, as a loop meets them."""
    found = np.zeros(row.tiles if isinstance(row, ranges.List) else int(row.hi), int)
    for part in row.segments():
        for n in range(int(part.lo), int(part.hi)):
            t = int(part.tile(n))
            assert found[t] == 0, "a tile is visited once"
            found[t] = ranges.PARTIAL if part.masked else ranges.FULL
    np.testing.assert_array_equal([int(row.state(t)) for t in range(len(found))], found)
    return found


def padded(found, size):
    return np.pad(found, (0, size - len(found)))


def assert_sound(score, cut, kv_heads=1):
    """No tile with a visible pair is left out, no tile with a hidden one goes without a mask. Returns (states, truth)."""
    some, every = tiles_of(visible(score, cut.batch, cut.heads), cut.block_q, cut.block_kv)
    known = visits.summary(score, cut)
    none, full = (np.broadcast_to(x, some.shape) for x in known)
    assert not (none & some).any()
    assert not (full & ~every).any()
    rows = jax.jit(lambda score: visits.with_kv_visits(score, cut).visits)(score)
    cols = jax.jit(lambda score: visits.with_q_visits(score, cut, kv_heads).visits)(score)
    states = np.where(none, 0, np.where(full, ranges.FULL, ranges.PARTIAL))
    for listed, whole, step in ((rows, states, cut.block_q), (cols, states.swapaxes(2, 3), cut.block_kv)):
        for b, h in np.ndindex(*listed.shape[:2]):
            for t in range(listed.shape[2]):
                row = ranges.kv_tiles(score.replace(visits=np.asarray(listed[b, h])), Span(t * step, step), 1)
                together = whole[b].reshape(listed.shape[1], -1, *whole.shape[2:])[h, :, t]
                expected = np.where((together == 0).all(0), 0, np.where((together == 2).all(0), 2, 1))
                np.testing.assert_array_equal(walked(row), expected)
    return none, full, some, every


WIDTH = 32  # of a grid of 32 x 32 positions


def neighbourhood(b, h, i, j):
    return (abs(i // WIDTH - j // WIDTH) <= 3) & (abs(i % WIDTH - j % WIDTH) <= 3)


def cubes(b, h, i, j):
    """Neighbours on a grid of 4 x 16 x 16."""
    near = lambda n, size: abs(i // n % size - j // n % size) <= 1
    return near(256, 4) & near(16, 16) & near(1, 16)


PACKED = np.repeat(np.random.default_rng(0).integers(0, 16, 64), 16)[None]
PATTERNS = {
    "sorted documents": {"segment_ids": np.sort(PACKED)},
    "causal documents": {"segment_ids": np.sort(PACKED), "causal": True},
    "unsorted documents": {"segment_ids": PACKED},
    "interleaved documents": {"segment_ids": np.arange(1024)[None] // 32 % 16},
    "queries and keys of other documents": {"segment_ids": (np.sort(PACKED), PACKED)},
    "prefix-LM": {"mask_fn": lambda b, h, i, j: (j < 300) | (j <= i)},
    "dilated window": {"mask_fn": lambda b, h, i, j: (i - j) % 128 < 8},
    "strided": {"mask_fn": lambda b, h, i, j: (i // 64 - j // 64) % 4 == 0},
    "window by a function": {"mask_fn": lambda b, h, i, j: (i - j < 200) & (j <= i)},
    "sinks and a window": {"mask_fn": lambda b, h, i, j: (j <= i) & ((i - j < 128) | (j < 4))},
    "block diagonal": {"mask_fn": lambda b, h, i, j: i // 100 == j // 100},
    "2-D neighbourhood": {"mask_fn": neighbourhood},
    "3-D neighbourhood": {"mask_fn": cubes},
    "a dense mask": {"mask": np.kron(np.random.default_rng(1).random((1, 1, 16, 16)) < 0.2, np.ones((64, 64), bool))},
    "a triangle": {"mask": np.tri(1024, dtype=bool)[None, None]},
    "keys that are padding": {"mask": (np.arange(1024) < 700)[None, None, None]},
}
SMALL = Cut(1, 1, 32, 32)


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_visited_holds_a_visible_pair(name):
    """All of these visit just the tiles that they must, and full tiles go without a mask where their reason is known whole."""
    none, _, some, _ = assert_sound(score_of(**PATTERNS[name]), SMALL)
    assert (~none).sum() == some.sum(), f"{(~none).sum()} of {none.size} tiles are visited, {some.sum()} hold a visible pair"


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ("dilated window", "3-D neighbourhood")])
def test_full_tiles_need_no_mask(name):
    _, full, _, every = assert_sound(score_of(**PATTERNS[name]), SMALL)
    np.testing.assert_array_equal(full, every)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_options_together_are_sound(data):
    batch, heads, q_len, kv_len = 2, 4, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    one_of = lambda *options: data.draw(st.sampled_from(options))
    ids = lambda length: np.repeat(rng.integers(-2, 3, (batch, -(-length // 8))), 8, axis=1)[:, :length]
    shape = one_of(1, batch), one_of(1, heads), one_of(1, q_len), one_of(1, kv_len)
    options = {
        "segment_ids": one_of(None, (ids(q_len), ids(kv_len))),
        "mask": one_of(None, rng.random(shape) < one_of(0.02, 0.5, 0.98, 1.0)),
        "mask_fn": one_of(None, lambda b, h, i, j: (i // 4 + b) % 3 != j // (8 + h), lambda b, h, i, j: j <= i + 3),
        "q_offset": one_of(0, 7, jnp.asarray([3, -5])),
        "window": one_of(None, (9, 3)),
        "kv_lengths": one_of(None, jnp.asarray([kv_len // 2, kv_len])),
        "q_lengths": one_of(None, jnp.asarray([q_len, q_len // 3])),
    }
    score = score_of(q_len, kv_len, batch, heads, **options)
    if not score.banded:
        assert_sound(score, Cut(batch, heads, one_of(4, 8, 16), one_of(4, 8, 16)), kv_heads=one_of(1, 2, 4))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_states_are_what_loops_do(data):
    batch, q_len, kv_len = 2, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    one_of = lambda *options: data.draw(st.sampled_from(options))
    options = {
        "causal": one_of(False, True),
        "window": one_of(None, (9, 3), (0, None)),
        "q_offset": one_of(0, 7, jnp.asarray([3, -30])),
        "kv_lengths": one_of(None, jnp.asarray([kv_len // 2, kv_len])),
        "q_lengths": one_of(None, jnp.asarray([q_len, 0])),
        "mask_fn": one_of(None, lambda b, h, i, j: (i // 4 + b) % 3 != j // 8),
    }
    score, cut = score_of(q_len, kv_len, batch, **options), Cut(batch, 1, one_of(4, 16), one_of(4, 16))
    rows = [Span(i, cut.block_q) for i in range(0, q_len, cut.block_q)]
    listed, together = visits.with_kv_visits(score, cut), visits.with_visits_of_all(score, cut)
    states, of_all = visits.states(score, cut), visits.states(score, cut, together=True)
    assert of_all.shape[:2] == (1, 1)
    for n, span in enumerate(rows):
        tiles_of = lambda score, span=span: ranges.kv_tiles(score, span, cut.block_kv)
        row = np.asarray(of_all[0, 0, n])
        np.testing.assert_array_equal(row, padded(walked(ranges.for_all(tiles_of, together)), row.size))
        for b in range(batch):
            own = listed.select(lambda leaf, b=b: leaf[b])
            own = own if own.visits is None else own.replace(visits=own.visits[b % own.visits.shape[0], 0])
            row = np.asarray(states[b % states.shape[0], 0, n])
            np.testing.assert_array_equal(row, padded(walked(tiles_of(own)), row.size))


def test_heads_and_batch_elements_that_agree_share_a_list():
    x = score_of(64, 64, 3, 2, mask_fn=lambda b, h, i, j: j <= i)
    assert visits.with_kv_visits(x, Cut(3, 2, 16, 16)).visits.shape[:2] == (1, 1)
    x = score_of(64, 64, 3, 2, mask_fn=lambda b, h, i, j: (j <= i) | (h == 0))
    assert visits.with_kv_visits(x, Cut(3, 2, 16, 16)).visits.shape[:2] == (1, 2)
    x = score_of(64, 64, 3, 2, segment_ids=np.zeros((3, 64), np.int32))
    assert visits.with_kv_visits(x, Cut(3, 2, 16, 16)).visits.shape[:2] == (3, 1)


def test_one_list_for_all_is_what_any_of_them_visits():
    x = score_of(64, 64, 2, 2, mask_fn=lambda b, h, i, j: i // 16 == (j // 16 + b + h) % 4)
    cut = Cut(2, 2, 16, 16)
    known = visits.summary(x, cut)
    for of_keys, axes in ((False, (0, 1, 2, 3)), (True, (0, 1, 3, 2))):
        row = visits.with_visits_of_all(x, cut, of_keys=of_keys).visits
        states = np.asarray(row[:, 2 + 4 :])
        np.testing.assert_array_equal(states == 0, np.asarray(known.none).transpose(axes).all((0, 1)))
        np.testing.assert_array_equal(states == 2, np.asarray(known.all).transpose(axes).all((0, 1)))


def test_lengths_skip_what_is_not_there():
    def visited(score):
        first = score.select()
        rows = [ranges.kv_tiles(first, Span(i, 64), 64) for i in range(0, 1024, 64)]
        cols = [ranges.q_tiles(first, Span(j, 64), 64) for j in range(0, 1024, 64)]
        return tuple(sum(int(t.hi) - int(t.lo) for t in tiles) for tiles in (rows, cols))

    assert visited(score_of(kv_lengths=jnp.array([130])))[0] == 16 * 3
    assert visited(score_of(q_lengths=jnp.array([130]), kv_lengths=jnp.array([70]))) == (3 * 2, 2 * 3)
    assert visited(score_of(q_lengths=0, kv_lengths=0)) == (0, 0)


@pytest.mark.parametrize("options", [{"mask_fn": PATTERNS["prefix-LM"]["mask_fn"]}, {"segment_ids": True}])
def test_a_summary_of_65536_is_small(options):
    """Nothing of q_len x kv_len is ever there; of 128 x 128 tiles, 512 x 512 numbers are."""
    length = 65536
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)

    def lists(ids):
        more = {"segment_ids": ids} if "segment_ids" in options else options
        return visits.with_kv_visits(Score.of(x, x, **more), Cut(1, 1, 128, 128)).visits

    compiled = jax.jit(lists).lower(ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


@functools.partial(jax.jit, static_argnames=("options", "implementation"))
def _gradients(q, k, v, options, implementation):
    of = lambda *x: jnp.sum(jnp.sin(jflash.attention(*x, implementation=implementation, **dict(options))))
    return jax.grad(of, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_what_no_query_sees_may_hold_anything_under_a_function(implementation):
    """Keys 5, 11, ... are seen by nobody, queries 7, 15, ... see nothing."""
    sees = lambda b, h, i, j: (j % 6 != 5) & (i % 8 != 7) & (j <= i)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 80, 2, 16)).astype(np.float32) for _ in range(3))
    expected = _gradients(q, k, v, (("mask_fn", sees),), implementation)
    q[:, 7::8], k[:, 5::6], v[:, 5::6] = np.nan, np.nan, np.inf
    got = _gradients(q, k, v, (("mask_fn", sees),), implementation)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


UNFOLLOWED = lambda x: jnp.arcsinh(jnp.float32(x))  # what intervals do not follow, of the sign of x
LOOKED_AT = {
    "every head": lambda b, h, i, j: (j + h + b) % 4 == 0,
    "every head, not followed": lambda b, h, i, j: UNFOLLOWED((j + h + b) % 4) == 0,
    "positions, not followed": lambda b, h, i, j: UNFOLLOWED(i - j - 38) > 0,
}


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", LOOKED_AT)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_what_is_seen_is_asked_of_each_head_that_a_function_looks_at(implementation, name, kv_heads):
    """What is known of the tiles may be the same for all of them, also with one kv head, and what is seen is not."""
    rng = np.random.default_rng(0)
    of = lambda heads: rng.standard_normal((2, 40, heads, 16)).astype(np.float32)
    q, k, v = of(4), of(kv_heads), of(kv_heads)
    options = {"mask_fn": LOOKED_AT[name], "q_offset": jnp.asarray([0, 5])}
    program = jax.jit(
        lambda implementation: jflash.attention(q, k, v, **options, implementation=implementation), static_argnums=0
    )
    np.testing.assert_allclose(program(implementation), program("naive"), atol=1e-5)
