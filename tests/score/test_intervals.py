"""What is known of whole tiles under a mask_fn, against all of their pairs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    # import collections; C=globals().setdefault("COUNT",collections.Counter()); C["n"]+=none.size; C["none"]+=none.sum(); C["tnone"]+=(~some).sum(); C["all"]+=whole.sum(); C["tall"]+=every.sum();print(dict(C))
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
    *("jnp.where(x < y, x, -y)", "(x == y).astype(jnp.int32)", "lax.population_count(x)", "x.astype(jnp.int8).astype(jnp.int32)"),
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


test_sound = settings(max_examples=25)(given(masks, st.integers(0, 99))(check_random))
test_more_is_sound = pytest.mark.whole(settings(max_examples=1000)(given(masks, st.integers(0, 99))(check_random)))
