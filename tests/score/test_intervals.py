"""What is known of whole tiles under a mask_fn, against all of their pairs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import essentials
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jflash import Score
from jflash.score import intervals
from jflash.score.arguments import FARTHEST
from jflash.score.intervals import Interval, positions
from jflash.score.score import MaskTable, Pairs

pytestmark = pytest.mark.usefixtures("quickly_compiled")

B, H = 1, 2  # of one pair


def score_of(mask_fn, *args, q_len=24, kv_len=24, offset=0):
    args = [jnp.asarray(x) for x in args]
    tables = [MaskTable.of(x) for x in args]
    flat = tuple(table.flattened(x) for table, x in zip(tables, args, strict=True))
    offset = {"static_offset": offset} if isinstance(offset, int) else {"q_offset": offset}
    return Score(q_len, kv_len, 1.0, mask_fn=mask_fn, mask_tables=tuple(tables), mask_args=flat, **offset)


@jax.jit
def pairs(score, b=B, h=H):
    i, j = (np.arange(n, dtype=np.int32) for n in (score.q_len, score.kv_len))
    at = Pairs(jnp.int32(b), jnp.int32(h), jnp.asarray(i[:, None]), jnp.asarray(j[None, :]))
    seen = score.mask_fn(*score._arguments(at), *score.seen_by_mask_fn)
    return jnp.broadcast_to(seen, (score.q_len, score.kv_len))


def known(score, rows, cols, b=B, h=H):
    shape = len(rows.lo), len(cols.lo)
    return [np.broadcast_to(x, shape) for x in jax.jit(intervals.of_mask_fn)(score, b, h, rows, cols)]


def truth(seen, rows, cols):
    """(some pair is visible, every pair is) of each tile."""
    tiles = [[seen[a : b + 1, c : d + 1] for c, d in zip(*cols, strict=True)] for a, b in zip(*rows, strict=True)]
    return [np.array([[reduce(tile) for tile in line] for line in tiles]) for reduce in (np.any, np.all)]


def assert_sound(score, rows, cols):
    some, every = truth(np.asarray(pairs(score)), *([np.asarray(x) for x in side] for side in (rows, cols)))
    none, whole = known(score, rows, cols)
    assert not (none & some).any(), "a tile of which nothing is said to be visible"
    assert not (whole & ~every).any(), "a tile of which all is said to be visible"
    return none, whole, some, every


def assert_exact(score, block_q=128, block_kv=128):
    none, whole, some, every = assert_sound(score, positions(score.q_len, block_q), positions(score.kv_len, block_kv))
    np.testing.assert_array_equal(~none, some)
    np.testing.assert_array_equal(whole, every)


# ------------------------------------------------------------------------------------------- whatever one may write

INTS = (
    *("x + y", "x - y", "x * y", "x // y", "x % y", "div(x, y)", "rem(x, y)", "jnp.minimum(x, y)", "jnp.maximum(x, y)"),
    *("x % 6", "x // 5", "x % -5", "x // -3", "div(x, 5)", "rem(x, -4)", "jnp.divmod(x, y)[1]", "jnp.fmod(x, y)"),
    *("x & y", "x | y", "x ^ y", "~x", "x & 7", "x >> y", "x << y", "x >> (y & 7)", "x << (y & 3)", "logical(x, y & 3)"),
    *("-x", "abs(x)", "jnp.sign(x)", "x * x", "x**2", "x**3", "jnp.square(x)", "jnp.clip(x, -3, y)", "clamp(y, x, y + 3)"),
    *(
        "jnp.where(x < y, x, -y)",
        "(x == y).astype(jnp.int32)",
        "lax.population_count(x)",
        "x.astype(jnp.int8).astype(jnp.int32)",
    ),
    *("x.astype(jnp.uint32).astype(jnp.int32)", "(x.astype(jnp.uint32) - 1).astype(jnp.int32)", "remainder(x, y)"),
    *("x.astype(jnp.uint8).astype(jnp.int32)", "(x.astype(jnp.float32) * 0.3).astype(jnp.int32)"),
    *("(x.astype(jnp.uint32) % 6).astype(jnp.int32)", "(x.astype(jnp.uint32) & 9).astype(jnp.int32)"),
)
FLOATS = (
    *("x + y", "x - y", "x * y", "x / y", "x % y", "x // y", "abs(x)", "-x", "x**2", "x * x", "x * 1e30", "jnp.sqrt(x)"),
    *("jnp.minimum(x, y)", "jnp.maximum(x, y)", "jnp.where(x > y, x, jnp.nan)", "jnp.floor(x)", "jnp.ceil(x)", "jnp.sign(x)"),
    *("x.astype(jnp.bfloat16).astype(jnp.float32)", "jnp.exp(x)"),
)
COMPARISONS = [f"x {relation} y" for relation in ("==", "!=", "<", "<=", ">", ">=")]
BOOLS = ("x & y", "x | y", "x ^ y", "x == y", "~x", "jnp.where(x, y, ~y)", "x < y")
EDGES = (0, 1, -1, 2, 3, 7, 16, 2**16, 2**30, 2**31 - 1, -(2**31), 1 - 2**31)


def broadcasting(fn):
    return lambda *xs: fn(*jnp.broadcast_arrays(*map(jnp.int32, xs)))


@jax.jit
def remainder(x, y):
    """Has a name that is known, but is not what it says."""
    return x + y % 5


NAMES = {"jnp": jnp, "lax": lax, "remainder": remainder, "clamp": broadcasting(lax.clamp)}
NAMES |= {"div": broadcasting(lax.div), "rem": broadcasting(lax.rem), "logical": broadcasting(lax.shift_right_logical)}


def applied(form, x, y):
    return "(" + re.sub(r"\b[xy]\b", lambda match: {"x": x, "y": y}[match[0]], form) + ")"


def applications(forms, operands):
    return st.builds(applied, st.sampled_from(forms), operands, operands)


def expressions(leaves, forms):
    return st.recursive(leaves, functools.partial(applications, forms), max_leaves=5)


numbers = (st.sampled_from(EDGES) | st.integers(-9, 40)).map(lambda n: f"jnp.int32({n})")
ints = expressions(st.sampled_from(["i", "j", "i - j", "i", "j", "b", "h"]).map("({})".format) | numbers, INTS)
floats = ints.map("{}.astype(jnp.float32)".format) | st.sampled_from(["jnp.float32(3.5)", "jnp.float32(-0.1)"])
masks = expressions(applications(COMPARISONS, ints) | applications(COMPARISONS, expressions(floats, FLOATS)), BOOLS)


def some_tiles(random, length=24, count=10):
    """Of any size, anywhere, and over each other; the first are single positions."""
    ends = np.sort(random.integers(0, length, (2, count)), axis=0).astype(np.int32)
    ends[1, :3] = ends[0, :3]
    return Interval(*ends)


def check_random(mask, seed):
    mask_fn = eval(f"lambda b, h, i, j: {mask}", NAMES)
    random = np.random.default_rng(seed)
    for offset in (0, *random.integers(-60, 60, 2), *random.choice([FARTHEST, -FARTHEST, -11], 1)):
        assert_sound(score_of(mask_fn, offset=jnp.int32(offset)), some_tiles(random), some_tiles(random))


SIGNS = [  # each of its operands may be of either sign, or of both
    "((i - 9) % -5 == 0) | ((j - 9) % 5 == 4) & (i % (j + 2) == 0)",
    "(rem(i - 9, -5) == 0) | (rem(j - 9, 5) == -4) & (rem(i - 9, j - 30) > 2)",
    "((i - 9) // -5 == 0) | (div(j - 9, 5) == -1) & ((i - 9) // (j - 30) < 0)",
    "((i - 9) & (j - 5) == 4) | ((i - 9) | (j - 5) == -1) | ((i - 9) ^ (j - 5) > 12)",
    "((i - 9) & 5 == 4) | ((i - 9) >> (j & 3) == -2) | ((i - 9) << (j & 3) == -8)",
]


def test_sound():
    for mask in SIGNS:
        check_random(mask, 0)


test_random_is_sound = settings(max_examples=20)(given(masks, st.integers(0, 99))(check_random))
test_more_random_is_sound = pytest.mark.whole(settings(max_examples=600)(given(masks, st.integers(0, 99))(check_random)))


# ------------------------------------------------------------------------------------------- what people write

LENGTH = 2048
POSITIONS = np.arange(LENGTH)
DOCUMENTS = np.searchsorted([90, 128, 500, 1300, 1301, 2000], POSITIONS, side="right").astype(np.int32)
GLOBAL = np.isin(POSITIONS, [0, 777, 1100])
BLOCKS = np.random.default_rng(0).random((LENGTH // 128, LENGTH // 128)) < 0.2
RELATIVE = np.arange(-LENGTH, LENGTH) % 700 < 9


def squared(x):
    return x * x


PATTERNS = {
    "causal": (lambda b, h, i, j: j <= i,),
    "window with sinks": (lambda b, h, i, j: (j < 4) | ((i - j < 256) & (j <= i)),),
    "prefix": (lambda b, h, i, j, prefix: (j <= i) | (j < prefix[b]), [3, 900]),
    "strided": (lambda b, h, i, j: (i - j) % 4 == 0,),
    "dilated window": (lambda b, h, i, j: (abs(i - j) < 512) & ((i - j) % 64 == 0),),
    "bands": (lambda b, h, i, j: (i - j) % 1024 < 64,),
    "blocks": (lambda b, h, i, j: i // 200 == j // 200,),
    "blocks by a shift": (lambda b, h, i, j: i >> 8 == j >> 8,),
    "blocks by their bits": (lambda b, h, i, j: (i ^ j) < 256,),
    "checkerboard": (lambda b, h, i, j: (i // 256 + j // 256) % 2 == 0,),
    "columns": (lambda b, h, i, j: (i // 256 == j // 256) | (j % 256 >= 248),),
    "in the plane": (lambda b, h, i, j: (abs(i // 48 - j // 48) <= 3) & (abs(i % 48 - j % 48) <= 3),),
    "in a wide plane": (lambda b, h, i, j: (abs((i >> 9) - (j >> 9)) <= 1) & (abs((i & 511) - (j & 511)) <= 8),),
    "in space": (
        lambda b, h, i, j: (
            (abs(i // 256 - j // 256) <= 2) & (abs(i // 16 % 16 - j // 16 % 16) <= 2) & (abs(i % 16 - j % 16) < 3)
        ),
    ),
    "disk": (lambda b, h, i, j: (i // 64 - j // 64) ** 2 + squared(i % 64 - j % 64) <= 25,),
    "radius": (lambda b, h, i, j: jnp.sqrt(((i // 64 - j // 64) ** 2).astype(jnp.float32)) < 5.5,),
    "documents": (lambda b, h, i, j, document: (document[i] == document[j]) & (j <= i), DOCUMENTS),
    "documents of each": (lambda b, h, i, j, d: d[b, i] == d[b, j], np.stack([DOCUMENTS[::-1], DOCUMENTS])),
    "global": (lambda b, h, i, j, all_see: all_see[i] | all_see[j] | (abs(i - j) < 200), GLOBAL),
    "blocks of a table": (lambda b, h, i, j, seen: seen[i // 128, j // 128], BLOCKS),
    "relative": (lambda b, h, i, j, seen: seen[i - j + LENGTH], RELATIVE),
    "every third": (lambda b, h, i, j, seen: seen[(i // 128 + j // 128) % 3], [True, False, False]),
    "near, of each head": (lambda b, h, i, j, near: (i - j <= near[h]) & (i - j >= 0.0), [9.0, 2.5, 300.0]),
    "a number": (lambda b, h, i, j, near: abs(i - j) <= near, 300),
    "by head": (lambda b, h, i, j: jnp.where(h % 2 == 0, j <= i, abs(i - j) < 99),),
}
ESSENTIAL = {"prefix", "bands", "blocks", "in the plane", "in a wide plane", "disk", "documents of each", "near, of each head"}


@pytest.mark.parametrize("name", essentials(PATTERNS, ESSENTIAL.__contains__))
def test_just_what_is_seen_is_visited(name):
    assert_exact(score_of(*PATTERNS[name], q_len=LENGTH, kv_len=LENGTH))


@pytest.mark.parametrize(
    ("most", "mask_fn"),
    [
        (1.6, lambda b, h, i, j: ((i - j) % 1024 > 400) & ((i - j) % 1024 < 464)),
        (1.05, lambda b, h, i, j: (abs(i // 200 - j // 200) <= 8) & (abs(i % 200 - j % 200) <= 8)),
    ],
)
def test_not_much_more_is_visited(most, mask_fn):
    """Where i % n wraps around within a tile, all from 0 to n - 1 is thought possible."""
    tiles = positions(LENGTH, 128)
    none, _, some, _ = assert_sound(score_of(mask_fn, q_len=LENGTH, kv_len=LENGTH), tiles, tiles)
    assert some.sum() < (~none).sum() < most * some.sum()


@pytest.mark.parametrize("lengths", essentials([(300, 500), (500, 300), (1, 129)], lambda x: x == (300, 500)))
def test_lengths_that_tiles_do_not_divide(lengths):
    for mask_fn in (lambda b, h, i, j: (j <= i) & (i - j < 70), lambda b, h, i, j: j >= 0):
        assert_exact(score_of(mask_fn, q_len=lengths[0], kv_len=lengths[1], offset=jnp.int32(13)), 64, 128)


def test_tables_of_all_sizes_and_dtypes():
    """Ranges of indices that are random, of which some lie partly outside: there, the nearest is read."""
    random = np.random.default_rng(0)
    for size, dtype in ((1, np.int32), (2, np.bool_), (8, np.uint8), (17, np.bool_), (17, np.float16)):
        table = random.integers(0, 2 if dtype == np.bool_ else 9, size).astype(dtype)
        fn = lambda b, h, i, j, t: t[i] == t[j - 3]
        none, whole, some, every = assert_sound(score_of(fn, table), some_tiles(random), some_tiles(random))
        if size == 1 or dtype == np.bool_:  # of no more than two values, a range tells all
            np.testing.assert_array_equal(whole, every)
            np.testing.assert_array_equal(~none, some)


def test_tables_that_are_not_finite():
    for value, fn in (
        (np.nan, lambda b, h, i, j, t: jnp.sign(t[j]) < 2),
        (np.inf, lambda b, h, i, j, t: ~(i <= t[j])),
        (-np.inf, lambda b, h, i, j, t: jnp.maximum(i, t[j]) == 4),
    ):
        score = score_of(fn, jnp.zeros(24).at[7].set(value))
        none, whole, *_ = assert_sound(score, positions(24, 4), positions(24, 4))
        assert not (none | whole)[:, 1].any()


# ------------------------------------------------------------------------------------------- what is not known


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


def test_functions_within_are_looked_into():
    inner = jax.jit(lambda i, j: jax.checkpoint(lambda x: doubled(x) + 1)(i) <= jnp.where(True, 2 * j, 0))
    assert_exact(score_of(lambda b, h, i, j: inner(i, j)), 4, 8)


def test_a_function_may_have_any_name():
    assert_exact(score_of(lambda b, h, i, j: remainder(i, 7) < j), 4, 8)


UNKNOWN = {
    "no rule": lambda b, h, i, j: lax.population_count(i - j) <= 64,
    "loop": lambda b, h, i, j: lax.fori_loop(0, 3, lambda _, x: x + 1, i) >= j + 3,
    "random": lambda b, h, i, j: jax.random.bits(jax.random.fold_in(jax.random.key(0), b)) > 0,
    "array": lambda b, h, i, j: jnp.arange(3).sum() + i >= j,
    "half": lambda b, h, i, j: i.astype(jnp.float16) >= 0,
    "division by zero": lambda b, h, i, j: i // (j - j) <= i,
    "sum": lambda b, h, i, j: i + (2**31 - 1) < 0,
    "difference": lambda b, h, i, j: i - jnp.int32(-(2**31)) < 0,
    "product": lambda b, h, i, j: (i + 1) * 2**30 > 2**30,
    "square": lambda b, h, i, j: (i * 2**12) ** 2 >= 0,
    "shift": lambda b, h, i, j: (i + 1) << 30 > 0,
    "negative": lambda b, h, i, j: -(i // 99 - 2**30 - 2**30) < 0,
    "size": lambda b, h, i, j: abs(i // 99 - 2**30 - 2**30) < 0,
    "shift too far": lambda b, h, i, j: i >> (j + 32) == 0,
    "narrow": lambda b, h, i, j: (i * 30).astype(jnp.int8) >= 0,
    "unsigned": lambda b, h, i, j: i.astype(jnp.uint32) - 1 < 99,
    "infinite": lambda b, h, i, j: (i + 1).astype(jnp.float32) * 3e38 > 0,
    "below infinity": lambda b, h, i, j: jnp.sqrt((i - 40).astype(jnp.float32)) <= jnp.inf,
    "not a number": lambda b, h, i, j: jnp.sqrt((i - 40).astype(jnp.float32)) < 0,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name):
    """Also where it is always the same: nothing may be said of what may wrap around."""
    tiles = positions(24, 12)
    none, whole = jax.jit(intervals.of_mask_fn)(score_of(UNKNOWN[name]), B, H, tiles, tiles)
    assert not (none | whole)[-1].any()


def test_what_is_not_looked_at_has_no_axis():
    at = jnp.arange(3)[:, None], jnp.arange(2)
    shape_of = lambda fn: intervals.of_mask_fn(score_of(fn), *at, positions(24, 4), positions(24, 8)).none.shape
    assert shape_of(lambda b, h, i, j: i > 3) == (6, 1)
    assert shape_of(lambda b, h, i, j: i > h) == (2, 6, 1)
    assert shape_of(lambda b, h, i, j: (i > h) & (j > b)) == (3, 2, 6, 3)
    assert shape_of(lambda b, h, i, j: jnp.bool_(True)) == (1, 1)


def test_batch_elements_of_a_map_and_of_an_export():
    fn = lambda b, h, i, j, prefix: j < prefix[b]
    tiles = positions(24, 8)
    of = lambda prefix: intervals.of_mask_fn(score_of(fn, prefix), jnp.arange(prefix.size), 0, tiles, tiles)
    prefix = jnp.array([[0, 8], [7, 24]])
    got = jax.vmap(of)(prefix)
    np.testing.assert_array_equal(got.none[..., 0, :], prefix[..., None] <= tiles.lo)
    np.testing.assert_array_equal(got.all[..., 0, :], prefix[..., None] > tiles.hi)
    (batch,) = jax.export.symbolic_shape("batch")
    exported = jax.export.export(jax.jit(of))(jax.ShapeDtypeStruct((batch,), jnp.int32))
    np.testing.assert_array_equal(exported.call(prefix[0]).none, of(prefix[0]).none)


def test_large():
    """65536 positions: nothing as large as four numbers for each of the 512 x 512 tiles, but a few bools."""
    tiles = positions(2**16, 128)
    score = score_of(PATTERNS["in a wide plane"][0])
    memory = jax.jit(intervals.of_mask_fn).lower(score, B, H, tiles, tiles).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 16 * 512**2
