"""jflash.dot_product_attention beside jax.nn.dot_product_attention: what is the same, and each thing that differs."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import essentials, fewest_that_cover, normal, options_of

from jflash import dot_product_attention
from jflash.proof import accuracy
from jflash.proof.cases import Case

pytestmark = pytest.mark.usefixtures("quickly_compiled")
NAMES = {"causal": "is_causal", "window": "local_window_size", "q_lengths": "query_seq_lengths"}
NAMES |= {"kv_lengths": "key_value_seq_lengths", "scale": "scale", "mask": "mask"}

# What both can be asked for. Some queries of some cases see no key.
CASES = (
    Case(40, 40, dtype="bfloat16", heads=4, kv_heads=1),
    Case(40, 40, dtype="bfloat16", heads=4, kv_heads=2, causal=True, bias="1hqk"),
    Case(51, 30, head_dim=17, heads=4, kv_heads=1, causal=True),
    Case(1, 51, head_dim=16, batch=1, scale=-0.4),
    Case(51, 40, head_dim=16, window=(5, 0)),
    Case(40, 51, head_dim=16, window=7, q_lengths=(33, 0)),
    Case(40, 51, head_dim=16, window=(3, 2), causal=True, kv_lengths=(17, 51)),
    Case(40, 51, head_dim=16, mask="bhqk", heads=4, kv_heads=2, q_lengths=(40, 22), kv_lengths=(0, 30)),
    Case(40, 51, head_dim=16, mask="hq1", bias="b1q1", heads=4, kv_heads=1),
    Case(40, 51, head_dim=16, mask="qk", causal=True, bias="1hqk", bias_holes=True),
    Case(40, 51, head_dim=16, mask="b11k", bias="k", scale=0.7),
    Case(
        40, 51, head_dim=16, heads=4, kv_heads=2, bias="bhqk", mask="1h1k", causal=True, window=(20, 3), scale=0.5,
        q_lengths=(40, 31), kv_lengths=(33, 51),
    ),
)  # fmt: skip


def outputs(fn, case, arrays, empty, **how):
    """The outputs of a function like jax.nn's, as attention() gives them: lse [batch, heads, q_len], 0 and -inf if `empty`."""
    options = {NAMES[name]: value for name, value in case.options().items() if name in NAMES}

    def as_attention(q, k, v, **parameters):
        o, residual = fn(q, k, v, **parameters, **options, **how, return_residual=True)
        return jnp.where(empty.swapaxes(1, 2)[..., None], 0, o), jnp.where(empty, -jnp.inf, residual.swapaxes(1, 2))

    def all_of(q, k, v, do, **parameters):
        lse = jax.eval_shape(as_attention, q, k, v, **parameters)[1]
        return accuracy.outputs(as_attention, q, k, v, do, jnp.zeros(lse.shape, lse.dtype), **parameters)

    q, k, v, do, parameters = jax.tree.map(lambda x: jnp.asarray(x, case.dtype), (*arrays[:4], case.parameters()))
    return jax.jit(all_of)(q, k, v, do, **parameters)


ESSENTIAL = fewest_that_cover(CASES, options_of)


@pytest.mark.parametrize("case", essentials(CASES, ESSENTIAL.__contains__), ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_jax_nn(case):
    """No farther from float64 than twice what jax.nn is, and that is in float32 no farther than the oracle may be."""
    *arrays, dlse = case.arrays()
    arrays = *arrays, np.zeros_like(dlse)  # jax.nn has no gradient of it
    x64 = accuracy.exact(case, arrays)
    empty = np.isneginf(x64.lse)
    theirs = outputs(jax.nn.dot_product_attention, case, arrays, empty)
    ours = outputs(dot_product_attention, case, arrays, empty)
    assert ours.o.dtype == theirs.o.dtype
    pairs = [(ours, theirs)]
    if case.dtype == "float32":
        pairs.append((theirs, accuracy.run(case, arrays, implementation="naive")))
    for judged, beside in pairs:
        for verdict in accuracy.verdicts(case, arrays, judged, beside, x64):
            assert verdict.agrees, verdict


def test_the_signature_is_that_of_jax_nn():
    facts = lambda fn: [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()]
    assert facts(dot_product_attention) == facts(jax.nn.dot_product_attention)


# ------------------------------------------------------------------------------------------- how it may be called

Q, K, V = normal(2, 20, 4, 8), normal(2, 33, 2, 8, seed=1), normal(2, 33, 2, 8, seed=2)
BIAS, MASK = normal(4, 20, 33, seed=3), np.random.default_rng(4).random((20, 33)) < 0.7
BOTH = (dot_product_attention, jax.nn.dot_product_attention)


def value_and_gradients(fn, *arrays, **options):
    """fn(*arrays), and the gradients of a sum of squares by those that are floats."""
    arrays = [None if x is None else jnp.asarray(x) for x in arrays]
    floats = tuple(n for n, x in enumerate(arrays) if x is not None and jnp.issubdtype(x.dtype, jnp.floating))
    loss = lambda *arrays: (jnp.sum(jnp.square(o := fn(*arrays, **options))), o)
    grads, o = jax.jit(jax.grad(loss, floats, has_aux=True))(*arrays)
    return o, *grads


def assert_the_same(*arrays, change=lambda fn: fn, **options):
    ours, theirs = (value_and_gradients(change(fn), *arrays, **options) for fn in BOTH)
    for x, y in zip(ours, theirs, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "arrays",
    [
        (Q, K, V, BIAS, MASK),  # by position, broadcast
        (Q[0], K[0], V[0], BIAS, MASK),  # without batch
        (Q[0], K[0], V[0], BIAS[None], MASK[None, None]),  # and options with one
        (Q[:1], K[0], V[:1], BIAS, MASK),  # of different ranks
        (Q[0, 0], K[0], V[0], BIAS[:, :1], None),  # one query
        (Q, K, V, np.arange(33), None),  # integers to add
        (Q, K, V, MASK, None),
        (Q.tolist(), np.asarray(K), V, None, MASK.tolist()),
    ],
    ids=lambda arrays: " ".join(str(np.shape(x)) for x in arrays),
)
def test_shapes_and_kinds_of_arrays(arrays):
    assert_the_same(*arrays)


def test_vmap_of_inputs_without_batch():
    assert_the_same(Q, K, V, BIAS, MASK, change=lambda fn: jax.vmap(fn, in_axes=(0, 0, 0, None, None)))


def test_the_gradient_of_a_bias_for_each_element_under_vmap_with_a_mask_of_rank_3():
    x, bias = normal(3, 2, 20, 4, 8), normal(3, 2, 4, 20, 20, seed=1)
    attend = lambda fn: lambda x, bias, mask: fn(query=x, key=x, value=x, bias=bias, mask=mask, is_causal=False)
    assert_the_same(x, bias, np.ones((1, 1, 20), bool), change=lambda fn: jax.vmap(attend(fn), in_axes=(0, 0, None)))


@pytest.mark.parametrize("scale", [0.3, np.float64(0.3), np.array(0.3), jnp.array(0.3, jnp.bfloat16)], ids=type)
def test_scales(scale):
    assert_the_same(Q, K, V, BIAS, scale=scale)


@pytest.mark.parametrize("size", [0.0, -0.5])
def test_a_traced_scale_has_a_gradient(size):
    assert_the_same(Q, K, V, size, change=lambda fn: lambda q, k, v, scale: fn(q, k, v, mask=MASK, scale=scale))
    in_a_program = lambda fn: lambda q, k, v: fn(q, k, v, is_causal=True, scale=size / jnp.sqrt(q.shape[-1]))
    assert_the_same(Q, K, V, change=in_a_program)


@pytest.mark.parametrize("implementation", [None, "xla", "naive", "interpret"])
def test_implementations(implementation):
    o, residual = dot_product_attention(Q, K, V, implementation=implementation, return_residual=True)
    expected, expected_residual = jax.nn.dot_product_attention(Q, K, V, return_residual=True)
    np.testing.assert_allclose(o, expected, atol=1e-6)
    np.testing.assert_allclose(residual, expected_residual, atol=1e-6)
    without_batch = dot_product_attention(Q[0], K[0], V[0], implementation=implementation, return_residual=True)
    assert [x.shape for x in without_batch] == [(20, 4, 8), (20, 4)]


# ------------------------------------------------------------------------------------------- what differs, each by itself


@pytest.mark.parametrize("options", [{"mask": np.zeros((20, 33), bool)}, {"key_value_seq_lengths": np.zeros(2, np.int32)}])
def test_a_query_that_sees_nothing_gives_zero_and_there_the_mean(options):
    (o, residual), (mean, lowest) = (fn(Q, K, V, **options, return_residual=True) for fn in BOTH)
    assert not o.any()
    assert (residual == -jnp.inf).all()
    np.testing.assert_allclose(mean, jnp.broadcast_to(jnp.repeat(V.mean(1, keepdims=True), 2, 2), mean.shape), atol=1e-6)
    np.testing.assert_allclose(lowest, -0.7 * float(jnp.finfo(jnp.float32).max), rtol=1e-6)
    ours, theirs = (value_and_gradients(fn, Q, K, V, **options) for fn in BOTH)
    assert not any(x.any() for x in ours)
    assert theirs[3].any()


def test_a_bias_that_hides_all_gives_zero_and_there_nan():
    ours, theirs = (value_and_gradients(fn, Q, K, V, jnp.full((20, 1), -jnp.inf)) for fn in BOTH)
    assert not any(x.any() for x in ours)
    assert np.isnan(theirs[0]).all()


def test_a_hidden_nan_reaches_nobody_and_there_everybody():
    key, value = K.at[:, 30:].set(jnp.nan), V.at[:, 30:].set(jnp.nan)
    ours, theirs = (fn(Q, key, value, key_value_seq_lengths=jnp.array([30, 30])) for fn in BOTH)
    np.testing.assert_allclose(ours, dot_product_attention(Q, K[:, :30], V[:, :30]), atol=1e-6)
    assert np.isnan(theirs).all()


def test_the_residual_is_float32_and_differentiable_and_there_neither():
    q, k, v = (x.astype(jnp.bfloat16) for x in (Q, K, V))
    (_, ours), (_, theirs) = (fn(q, k, v, return_residual=True) for fn in BOTH)
    assert (ours.dtype, theirs.dtype) == (jnp.float32, jnp.bfloat16)
    ours, theirs = (jax.grad(lambda q, fn=fn: fn(q, K, V, return_residual=True)[1].sum())(Q) for fn in BOTH)
    s = jnp.einsum("btnh,bsnh->bnts", Q, jnp.repeat(K, 2, 2)) / 8**0.5
    expected = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), jnp.repeat(K, 2, 2)) / 8**0.5
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert not theirs.any()


def test_float64_is_float64_and_there_softmax_is_float32():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x), jnp.float64) for x in (Q, K, V))
        s = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, 2)) / 8**0.5
        p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
        expected = np.einsum("bnts,bsnh->btnh", p, np.repeat(v, 2, 2))
        ours, theirs = (fn(q, k, v, return_residual=True) for fn in BOTH)
        assert accuracy.distance(ours[0], expected) < 1e-14
        assert accuracy.distance(theirs[0], expected) > 1e-9
        assert ours[1].dtype == jnp.float64


def test_value_has_a_width_of_its_own_and_there_not():
    value = normal(2, 33, 2, 5)
    assert dot_product_attention(Q, K, value).shape == (2, 20, 4, 5)
    with pytest.raises(ValueError, match="value shape"):
        jax.nn.dot_product_attention(Q, K, value)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"key_value_seq_lengths": 7}, {"key_value_seq_lengths": np.array([7, 7], np.int32)}),
        ({"query_seq_lengths": np.array([3, 9], np.int8)}, {"query_seq_lengths": np.array([3, 9], np.int32)}),
        ({"local_window_size": (None, 2)}, {"local_window_size": (99, 2)}),
        ({"local_window_size": [3, None]}, {"local_window_size": (3, 99)}),
    ],
    ids=str,
)
def test_what_may_be_left_out_here(ours, theirs):
    expected = jax.nn.dot_product_attention(Q, K, V, **theirs)
    np.testing.assert_allclose(dot_product_attention(Q, K, V, **ours), expected, atol=1e-6)
    with pytest.raises((TypeError, ValueError, AssertionError)):
        jax.nn.dot_product_attention(Q, K, V, **ours)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"local_window_size": (-1, 3)}, ValueError, r"window must not be negative, got \(-1, 3\)"),
        ({"local_window_size": (jnp.array(3), 3)}, TypeError, "window must hold ints or None"),
        ({"implementation": "cudnn"}, ValueError, "implementation='cudnn' is not there: jflash has kernels of its own"),
        ({"implementation": "fast"}, ValueError, "implementation must be None or one of .*'triton'.*, got 'fast'"),
        ({"mask": np.ones((20, 33), np.int8)}, TypeError, "mask must be bool, .* got int8"),
        ({"query_seq_lengths": np.ones(3, np.int32)}, ValueError, r"q_lengths must be .* \(2,\), got shape \(3,\)"),
        ({"bias": jnp.ones((1, 1, 1, 20, 33))}, ValueError, "bias must broadcast to"),
    ],
)
def test_what_raises(options, error, message):
    with pytest.raises(error, match=message):
        dot_product_attention(Q, K, V, **options)


def test_errors_of_attention_come_with_the_names_that_are_used_here():
    with pytest.raises(ValueError, match="k must have the head_dim of q, 8, got shape") as caught:
        dot_product_attention(Q, K[..., :4], V)
    assert "k" in str(caught.value)
    (note,) = caught.value.__notes__
    for name in ("query", "key", "value", *NAMES.values()):
        assert name in ("scale", "mask") or name in note


def test_a_traced_scale_does_not_go_together_with_a_bias():
    scaled = lambda scale: dot_product_attention(Q, K, V, BIAS, scale=scale)
    with pytest.raises(TypeError, match="scale must be a Python number beside a bias, got a traced value"):
        jax.jit(scaled)(0.5)
    with pytest.raises(ValueError, match=r"scale must be a number, got shape \(4,\)"):
        jax.jit(lambda scale: dot_product_attention(Q, K, V, scale=scale))(jnp.ones(4))


def test_a_bias_that_would_be_rounded_raises():
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"bias must be a float of at most 32 bits .* got float64"):
        dot_product_attention(Q, K, V, jnp.zeros((20, 33), jnp.float64))


@pytest.mark.parametrize("implementation", [None, "naive"])
def test_forward_mode_is_that_of_the_dense_implementation(implementation):
    tangents = [jnp.ones_like(x) for x in (Q, K, V)]
    push = lambda fn: jax.jvp(fn, (Q, K, V), tuple(tangents))[1]
    expected = push(jax.nn.dot_product_attention)
    got = push(functools.partial(dot_product_attention, implementation=implementation))
    np.testing.assert_allclose(got, expected, atol=1e-5)
