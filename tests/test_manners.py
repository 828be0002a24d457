"""Manners: what users set for all of JAX holds around attention() too, with every option at once, forward and backward."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, TILED, normal

from jflash import attention
from jflash.proof import accuracy

pytestmark = pytest.mark.usefixtures("quickly_compiled")

IMPLEMENTATIONS = (None, *TILED, "naive")
EVERYWHERE = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
SETTINGS = {
    "disable_jit": [jax.disable_jit],
    "rank promotion": [lambda: jax.numpy_rank_promotion("raise")],
    "dtype promotion": [lambda: jax.numpy_dtype_promotion("strict")],
    "64 bits": [lambda: jax.enable_x64(True)],
    "64 bits, dtype promotion": [lambda: jax.enable_x64(True), lambda: jax.numpy_dtype_promotion("strict")],
    "debug_nans": [lambda: jax.debug_nans(True)],
    "enable_checks": [lambda: jax.enable_checks(True)],
    "check_tracer_leaks": [lambda: jax.check_tracer_leaks(True)],
}


@pytest.fixture
def setting(request):
    with contextlib.ExitStack() as stack:
        for setting in SETTINGS[request.param]:
            stack.enter_context(setting())
        yield request.param


UNDER_EACH = pytest.mark.parametrize("setting", SETTINGS, indirect=True)


def mask_fn(b, h, i, j):
    return (i + j + h + b) % 3 != 0


def score_fn(s, b, h, i, j, slopes, table, power):
    return s * power - slopes[h] * jnp.abs(i - j).astype(s.dtype) + table[h, jnp.clip(j - i, 0, 2)]


def numbers() -> dict:
    """Arrays for every argument that takes one, by name, and the cotangents do and dlse."""
    random = np.random.default_rng(0)
    return {
        "q": normal(2, 20, 4, 8),
        "k": normal(2, 20, 2, 8, seed=1),
        "v": normal(2, 20, 2, 8, seed=2),
        "do": normal(2, 20, 4, 8, seed=3),
        "dlse": normal(2, 4, 20, seed=4),
        "bias": normal(4, 1, 20, seed=5),
        "sinks": normal(4, seed=6),
        "score_args": (normal(4, seed=7), normal(4, 3, seed=8), jnp.float32(0.5)),
        "mask": jnp.asarray(random.random((2, 1, 20, 20)) < 0.9),
        "segment_ids": jnp.asarray(np.sort(random.integers(0, 2, (2, 20))).astype(np.int32)),
        "q_lengths": jnp.array([20, 17], jnp.int32),
        "kv_lengths": jnp.array([19, 20], jnp.int32),
        "q_offset": jnp.array([0, 3], jnp.int32),
        "dropout_key": jax.random.key(0),
    }


ALL = {"causal": True, "window": (15, None), "softcap": 9.0, "mask_fn": mask_fn, "dropout_rate": 0.2}
TENSORS = ("q", "k", "v", "do", "dlse")
FLOATS = ("bias", "sinks", "score_args")


def outputs(arrays: dict, implementation, **options):
    """o, lse and all gradients."""
    q, k, v, do, dlse = (arrays[name] for name in TENSORS)
    floats = {name: arrays[name] for name in FLOATS if name in arrays}
    rest = {name: x for name, x in arrays.items() if name not in (*TENSORS, *FLOATS)}
    if "score_args" in floats:
        options = {**options, "score_fn": score_fn}

    def fn(q, k, v, **floats):
        return attention(
            q, k, v, **floats, **rest, **options, return_lse=True, block_sizes=SMALL_TILES, implementation=implementation
        )

    return accuracy.outputs(fn, q, k, v, do, dlse, **floats)


def assert_close(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-5)


LEFT_OUT = {"rank promotion": ("sinks",)}  # see test_what_is_not_yet_right
STRICT = ("rank promotion", "64 bits, dtype promotion")


@pytest.fixture(scope="module")
def made():
    """Arrays and what naive makes of them before a setting holds, by what is left out."""

    def make(left_out):
        arrays = {name: x for name, x in numbers().items() if name not in left_out}
        return arrays, jax.tree.map(np.asarray, outputs(arrays, "naive", **ALL))

    return {left_out: make(left_out) for left_out in ((), *LEFT_OUT.values())}


@EVERYWHERE
@UNDER_EACH
def test_every_option(made, setting, implementation):
    arrays, wanted = made[LEFT_OUT.get(setting, ())]
    assert_close(jax.tree.map(np.asarray, outputs(arrays, implementation, **ALL)), wanted)


ALONE = (
    {},
    {"causal": True},
    {"window": (3, 5)},
    {"window": (None, 2), "q_offset": 3},
    {"softcap": 2.0},
    {"scale": -0.3},
    {"mask_fn": mask_fn},
    *({name: None} for name in ("q_offset", "q_lengths", "kv_lengths", "segment_ids", "mask", "bias", "score_args")),
    {"dropout_key": None, "dropout_rate": 0.2},
)


@pytest.mark.parametrize("setting", STRICT, indirect=True)
@pytest.mark.parametrize("implementation", [*TILED, "naive"])
def test_each_option_alone_is_traced(made, setting, implementation):
    for options in ALONE:
        arrays = {name: x for name, x in made[()][0].items() if name in TENSORS or options.get(name, 0) is None}
        rest = {name: value for name, value in options.items() if value is not None}
        jax.jit(functools.partial(outputs, implementation=implementation, **rest)).lower(arrays)


@pytest.mark.parametrize("setting", STRICT, indirect=True)
@pytest.mark.parametrize("implementation", [*TILED, "naive"])
def test_every_option_is_traced_otherwise(made, setting, implementation):
    """Without groups of heads, and inside jax.vmap."""
    arrays, _ = made[LEFT_OUT.get(setting, ())]
    fn = functools.partial(outputs, implementation=implementation, **ALL)
    jax.jit(fn).lower({**arrays, **{name: jnp.repeat(arrays[name], 2, axis=2) for name in "kv"}})
    many = {name: jnp.stack([arrays[name]] * 2) for name in ("q", "do", "bias", "kv_lengths")}
    jax.jit(jax.vmap(lambda many: fn({**arrays, **many}))).lower(many)


NOT_YET = {
    "rank promotion": "tile.sinks_cotangent broadcasts [heads, 1] with [batch, heads, q_len]",
    "dtype promotion": "numerics.accumulator promotes bfloat16 and float32, which strict promotion refuses",
}


xfail = lambda name: pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=NOT_YET[name]))


@pytest.mark.parametrize("setting", [xfail(name) for name in NOT_YET], indirect=True)
@pytest.mark.parametrize("implementation", TILED)
def test_what_is_not_yet_right(made, setting, implementation):
    arrays, _ = made[()]
    if setting == "dtype promotion":
        arrays = {**arrays, **{name: arrays[name].astype(jnp.bfloat16) for name in ("q", "k", "v", "do")}}
    jax.jit(functools.partial(outputs, implementation=implementation, **ALL)).lower(arrays)
