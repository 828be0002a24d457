"""Manners: what users set for all of JAX holds around attention() too, and where something is amiss, it says so in words.

Settings are tried with every option at once, forward and backward.
"""

import contextlib
import functools
import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, TILED, essentials, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflash
from jflash import attention
from jflash.proof import accuracy
from jflash.score import redefined

pytestmark = pytest.mark.usefixtures("quickly_compiled")

IMPLEMENTATIONS = (None, *TILED, "naive")
EVERYWHERE = pytest.mark.parametrize("implementation", essentials(IMPLEMENTATIONS, ("xla",).__contains__))


@contextlib.contextmanager
def looking_at_what_is_new():
    """JAX collects garbage for each trace whose leaks it looks for: spared is all that was there before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


SETTINGS = {
    "disable_jit": [jax.disable_jit],
    "rank promotion": [lambda: jax.numpy_rank_promotion("raise")],
    "dtype promotion": [lambda: jax.numpy_dtype_promotion("strict")],
    "64 bits": [lambda: jax.enable_x64(True)],
    "64 bits, all promotion": [
        lambda: jax.enable_x64(True),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
    ],
    "debug_nans": [lambda: jax.debug_nans(True)],
    "enable_checks": [lambda: jax.enable_checks(True)],
    "check_tracer_leaks": [looking_at_what_is_new, lambda: jax.check_tracer_leaks(True)],
}


@pytest.fixture
def setting(request):
    with contextlib.ExitStack() as stack:
        for setting in SETTINGS[request.param]:
            stack.enter_context(setting())
        yield request.param


STRICTEST = pytest.mark.parametrize("setting", ["64 bits, all promotion"], indirect=True)
COMBINED = ("64 bits", "dtype promotion", "rank promotion")  # in the strictest
UNDER_EACH = pytest.mark.parametrize("setting", essentials(SETTINGS, lambda name: name not in COMBINED), indirect=True)


def mask_fn(b, h, i, j, seen):
    return seen[(i + j + h + b) % 3]


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
        "mask_args": (jnp.array([False, True, True]),),
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


@pytest.fixture(scope="module")
def made():
    """The arrays, made before a setting holds."""
    return numbers()


@pytest.fixture(scope="module")
def wanted(made):
    return jax.tree.map(np.asarray, outputs(made, "naive", **ALL))


@EVERYWHERE
@UNDER_EACH
def test_every_option(made, wanted, setting, implementation):
    assert_close(jax.tree.map(np.asarray, outputs(made, implementation, **ALL)), wanted)


@EVERYWHERE
def test_no_tracer_is_kept(implementation):
    """Of a shape that nothing else has: a program that JAX remembers is not looked at for leaks again."""
    q, mapped = normal(1, 23, 2, 8), normal(3, 1, 23, 2, 8)
    fn = lambda q: attention(q, q, q, causal=True, implementation=implementation).sum()
    with looking_at_what_is_new(), jax.checking_leaks():
        jax.grad(fn)(q)
        jax.jit(jax.vmap(jax.grad(fn)))(mapped)


ALONE = (
    {},
    {"causal": True},
    {"window": (3, 5)},
    {"window": (None, 2), "q_offset": 3},
    {"softcap": 2.0},
    {"scale": -0.3},
    {"mask_fn": mask_fn, "mask_args": None},
    *({name: None} for name in ("q_offset", "q_lengths", "kv_lengths", "segment_ids", "mask", "bias", "sinks", "score_args")),
    {"dropout_key": None, "dropout_rate": 0.2},
)


@STRICTEST
@pytest.mark.parametrize("implementation", [*TILED, "naive"])
def test_each_option_alone_is_traced(made, setting, implementation):
    for options in ALONE:
        arrays = {name: x for name, x in made.items() if name in TENSORS or options.get(name, 0) is None}
        rest = {name: value for name, value in options.items() if value is not None}
        jax.jit(functools.partial(outputs, implementation=implementation, **rest)).lower(arrays)


@STRICTEST
@pytest.mark.parametrize("implementation", [*TILED, "naive"])
def test_every_option_is_traced_otherwise(made, setting, implementation):
    """Without groups of heads, and inside jax.vmap."""
    fn = functools.partial(outputs, implementation=implementation, **ALL)
    jax.jit(fn).lower({**made, **{name: jnp.repeat(made[name], 2, axis=2) for name in "kv"}})
    many = {name: jnp.stack([made[name]] * 2) for name in ("q", "do", "bias", "kv_lengths")}
    jax.jit(jax.vmap(lambda many: fn({**made, **many}))).lower(many)


@pytest.mark.parametrize("setting", ["dtype promotion"], indirect=True)
@pytest.mark.parametrize("implementation", TILED)
def test_half_precision_is_traced(made, setting, implementation):
    arrays = {**made, **{name: made[name].astype(jnp.bfloat16) for name in ("q", "k", "v", "do")}}
    jax.jit(functools.partial(outputs, implementation=implementation, **ALL)).lower(arrays)


# ------------------------------------------------------------------------------------------------- what functions are told


@pytest.mark.parametrize("setting", ["64 bits", "dtype promotion"], indirect=True)
@pytest.mark.parametrize("implementation", [*TILED, "naive"])
@pytest.mark.parametrize("heads", [2, 4])
def test_functions_are_told_int32(setting, implementation, heads):
    told = []

    def look(s, b, h, i, j):
        told.extend((b, h, i, j))
        return s

    def see(b, h, i, j):
        told.extend((b, h, i, j))
        return i >= j

    q, k = jnp.ones((2, 20, heads, 8), jnp.float32), jnp.ones((2, 20, 2, 8), jnp.float32)
    offset = jnp.array([0, 3])
    fn = lambda q: attention(q, k, k, score_fn=look, mask_fn=see, q_offset=offset, implementation=implementation).sum()
    jax.jit(jax.grad(fn)).lower(q)
    assert {x.dtype for x in told} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize("setting", ["rank promotion", "64 bits, all promotion"], indirect=True)
def test_the_layers_and_helpers_too(setting):
    equinox, flax = pytest.importorskip("jflash.equinox"), pytest.importorskip("jflash.flax")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        layer = equinox.MultiheadAttention(2, 16, causal=True, rope_theta=1e4, key=jax.random.key(0))
    x = jnp.ones((5, 16), jnp.float32)
    offset = jnp.array(3, jnp.int32)
    jax.jit(jax.grad(lambda q: equinox.rotate(q, 1e4, offset).sum())).lower(x[:, None])
    if setting == "rank promotion":
        jax.jit(lambda x: layer(x[:, None, :][:, 0], x, x, q_offset=offset)).lower(x)
    q, mask = jnp.ones((2, 20, 2, 8), jnp.float32), jnp.ones((2, 1, 1, 20), bool)
    jax.jit(functools.partial(flax.attention_fn, is_causal=True)).lower(q[:, :1], q, q, mask=mask)
    jax.jit(functools.partial(jflash.dot_product_attention, is_causal=True)).lower(q, q, q, scale=jnp.float32(2))
    jflash.dropout_mask(jax.random.key(0), 0.5, (2, 2, 20, 20))
    assert jflash.alibi_slopes(6).shape == (6,)


# ------------------------------------------------------------------------------------------------------- segment ids

DOCUMENTS = np.arange(20)[None].repeat(2, 0) // 7
IDS = {
    "int8": DOCUMENTS.astype(np.int8),
    "int64": DOCUMENTS,
    "above 32 bits": DOCUMENTS * 2**32,
    "uint32": DOCUMENTS.astype(np.uint32) + np.uint32(2**31),
    "uint64": DOCUMENTS.astype(np.uint64) * np.uint64(2**62),
    "negative": -DOCUMENTS * 2**40,
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("ids", IDS)
def test_segment_ids_of_any_integers(ids, wide):
    """Given by numpy, by JAX where it can hold them, and traced."""
    q, k, v = (normal(2, 20, 2, 8, seed=seed) for seed in range(3))
    fn = lambda ids: attention(q, k, v, segment_ids=ids)
    wanted = fn(jnp.asarray(DOCUMENTS, jnp.int32))
    with jax.enable_x64(wide):
        for given in [IDS[ids]] + [jnp.asarray(IDS[ids])] * (wide or IDS[ids].dtype.itemsize <= 4):
            np.testing.assert_array_equal(fn(given), wanted)
            if not isinstance(given, np.ndarray):
                np.testing.assert_array_equal(jax.jit(fn)(given), wanted)


def test_a_ring_takes_no_ids_of_64_bits():
    mesh = jax.make_mesh((2,), ("ring",), (AxisType.Auto,), devices=jax.devices()[:2])
    q = jnp.ones((2, 20, 2, 8))
    fn = lambda q, ids: jflash.ring_attention(q, q, q, axis_name="ring", segment_ids=ids)
    ring = jax.shard_map(fn, mesh=mesh, in_specs=P(None, "ring"), out_specs=P(None, "ring"))
    with jax.enable_x64(True), pytest.raises(TypeError, match="segment_ids must be of at most 32 bits in ring_attention"):
        ring(q, jnp.asarray(DOCUMENTS))


def test_segment_ids_that_wrapping_would_make_equal():
    q = jnp.ones((1, 2, 1, 8))
    with pytest.raises(TypeError, match=r"segment_ids must be of one dtype, .* got int32 for queries and uint32 for keys"):
        attention(q, q, q, segment_ids=(jnp.array([[-1, 0]]), jnp.array([[2**32 - 1, 0]], jnp.uint32)))


# ------------------------------------------------------------------------------------------------------- words

Q = jnp.ones((2, 8, 4, 16))
K = jnp.ones((2, 9, 4, 16))


TRANSFORMS = jax.jit, jax.grad, lambda fn: jax.jit(jax.grad(fn)), lambda fn: lambda x: jax.vmap(fn)(x[None])


@pytest.mark.parametrize("transform", TRANSFORMS)
@EVERYWHERE
def test_a_function_that_closes_over_a_traced_number(transform, implementation):
    call = lambda **options: attention(Q, Q, Q, implementation=implementation, **options).sum()
    with pytest.raises(ValueError, match=r"score_fn must not close over .* traced .* shape \(\): give them as score_args"):
        transform(lambda x: call(score_fn=lambda s, b, h, i, j: s * x))(jnp.float32(2))
    with pytest.raises(ValueError, match=r"mask_fn must not close over .* traced .* shape \(\): give them as mask_args"):
        transform(lambda x: call(mask_fn=lambda b, h, i, j: i < x))(jnp.float32(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, r"window must not be negative, got \(-1, -1\): None on a side is no limit"),
        ({"window": (-1, 0)}, r"window must not be negative, got \(-1, 0\): None on a side is no limit"),
        ({"mask": jnp.ones((2, 9), bool)}, r"got shape \(2, 9\): write mask\[:, None, None, :\]"),
        ({"mask": jnp.ones((2, 8, 9), bool)}, r"got shape \(2, 8, 9\): write mask\[:, None\]"),
        ({"bias": jnp.ones((2, 1, 9))}, r"got shape \(2, 1, 9\): write bias\[:, None\]"),
        ({"mask": jnp.ones((3, 9), bool)}, r"got shape \(3, 9\)$"),
    ],
)
def test_what_to_write_instead(options, message):
    with pytest.raises(ValueError, match=message):
        attention(Q, K, K, **options)


def test_score_args_may_be_integers_but_not_bools():
    with pytest.raises(TypeError, match=r"score_args\[0\] must be a float of at most 32 bits .*, or an integer, got bool"):
        attention(Q, K, K, score_fn=lambda s, b, h, i, j, x: s, score_args=(True,))


@pytest.mark.parametrize("fn", [attention, jax.jit(attention, static_argnames="implementation")])
def test_the_kernels_on_a_cpu(fn):
    with pytest.raises(ValueError, match=r'implementation="triton" needs an NVIDIA GPU, .* lowered for a CPU: .* "xla"'):
        fn(Q, Q, Q, implementation="triton")


def test_deterministic_is_inference_in_equinox():
    layer = pytest.importorskip("jflash.equinox").MultiheadAttention(2, 16, dropout_p=0.5, key=jax.random.key(0))
    x, key = normal(5, 16), jax.random.key(1)
    for inference in (True, False):
        with pytest.warns(UserWarning, match="deterministic=.* is deprecated: give inference instead"):
            got = layer(x, x, x, key=key, deterministic=inference)
        np.testing.assert_array_equal(got, layer(x, x, x, key=key, inference=inference))


# ------------------------------------------------------------------------------------------- functions defined in a loop


def warnings_of(caplog, times, call):
    """How many lines `times` calls of call() log."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jflash"):
        for n in range(times):
            call(n)
    return [record.getMessage() for record in caplog.records if "define it once" in record.getMessage()]


X = jnp.ones((2, 0, 1, 8))  # of no length: these are about calls, and nothing need be compiled


def test_a_function_defined_in_a_loop_is_told_once(caplog):
    (line,) = warnings_of(caplog, 6, lambda n: attention(X, X, X, mask_fn=lambda b, h, i, j: i >= j))
    assert "mask_fn=test_manners.test_a_function_defined_in_a_loop_is_told_once.<locals>" in line
    assert "has been defined 4 times" in line
    score = lambda q: attention(q, q, q, score_fn=lambda s, b, h, i, j: s * 2.0).sum()
    assert len(warnings_of(caplog, 6, lambda n: jax.grad(score)(X))) == 1
    assert not warnings_of(caplog, 6, lambda n: jax.grad(score)(X))


def test_nothing_is_said_of_other_functions(caplog):
    once = lambda b, h, i, j, shift=0: i + shift >= j
    assert not warnings_of(caplog, 6, lambda n: attention(X, X, X, mask_fn=once))
    assert not warnings_of(caplog, 6, lambda n: attention(X, X, X, mask_fn=functools.partial(once, shift=1)))
    assert not warnings_of(caplog, 6, lambda n: attention(X, X, X, mask_fn=lambda b, h, i, j: i + n >= j))

    @jax.jit
    def layers(x):
        for _ in range(6):
            x = attention(x, x, x, mask_fn=lambda b, h, i, j: i >= j)
        return x

    assert not warnings_of(caplog, 1, lambda n: jax.grad(lambda x: layers(x).sum())(X))


def test_what_looks_out_keeps_nothing_alive():
    class Held:
        pass

    def watched(held):
        fn = lambda b, h, i, j: held is not None
        redefined.look_out("mask_fn", fn, X)
        return weakref.ref(held), weakref.ref(fn)

    references = watched(Held())
    gc.collect()
    assert [x() for x in references] == [None, None]
