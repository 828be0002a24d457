"""The oracle: dense attention against float64 numpy, formula by formula, and against jax.nn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import ESSENTIAL_CASES, essentials, exact

from jflash import attention, dropout_mask
from jflash.proof import accuracy
from jflash.proof.cases import CASES

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SMALL = [case for case in CASES if case.q_len <= 100 or not case.causal]


def numpy_attention(case, q, k, v, do, dlse):
    """(o, lse, dq, dk, dv) by the formulas of softmax and its derivative, one query at a time, float64.

    The gradients are right where the derivative of a logit is the scale: see LINEAR.
    """
    options, parameters = case.options(), case.parameters()
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    group = case.heads // case.kv_heads
    o, lse = np.zeros_like(do), np.full_like(dlse, -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    left, right = case.window if isinstance(case.window, tuple) else (case.window, case.window)
    j = np.arange(case.kv_len)
    everything = case.batch, case.heads, case.q_len, case.kv_len
    mask, bias = (np.broadcast_to(x, everything) for x in (options.get("mask", True), parameters.get("bias", 0.0)))
    kept = np.ones(everything)
    if case.dropout_rate:
        kept = np.asarray(dropout_mask(options["dropout_key"], case.dropout_rate, everything)) / (1 - case.dropout_rate)
    segments = [np.asarray(ids) for ids in options.get("segment_ids", ())]
    visible, score = (jax.jit(options[name]) if options.get(name) else None for name in ("mask_fn", "score_fn"))
    for b, h, i in np.ndindex(everything[:3]):
        position = i + (case.q_offset[b] if isinstance(case.q_offset, tuple) else case.q_offset)
        see = mask[b, h, i] & (i < (case.q_lengths[b] if case.q_lengths else case.q_len))
        see &= j < (case.kv_lengths[b] if case.kv_lengths else case.kv_len)
        see &= (j <= position) | (not case.causal)
        see &= (left is None) | (position - j <= (left or 0))
        see &= (right is None) | (j - position <= (right or 0))
        if case.segments:
            see &= segments[0][b, i] == segments[1][b]
        if case.mask_fn:
            see &= np.asarray(visible(b, h, position, j, *options.get("mask_args", ())))
        keys, values = k[b, see, h // group], v[b, see, h // group]
        s = scale * k[b, :, h // group] @ q[b, i, h]
        if case.softcap:
            s = case.softcap * np.tanh(s / case.softcap)
        s = s + bias[b, h, i]
        if case.score_fn:  # of all keys, so that it is compiled once
            s = np.asarray(score(s, b, h, position, j, *parameters.get("score_args", ())))
        s = s[see]
        sink = parameters["sinks"][h] if case.sinks else -np.inf
        largest = max(s.max(initial=-np.inf), sink)
        if largest == -np.inf:
            continue
        e = np.exp(s - largest)
        total = e.sum() + np.exp(sink - largest)
        lse[b, h, i] = largest + np.log(total)
        reached = e / total * kept[b, h, i, see]
        o[b, i, h] = reached @ values
        dp = values @ do[b, i, h] * kept[b, h, i, see]
        ds = e / total * (dp - o[b, i, h] @ do[b, i, h] + dlse[b, h, i])
        dq[b, i, h] = scale * ds @ keys
        dk[b, see, h // group] += scale * np.outer(ds, q[b, i, h])
        dv[b, see, h // group] += np.outer(reached, do[b, i, h])
    return o, lse, dq, dk, dv


LINEAR = (None, "alibi", "t5", "decay")


@pytest.mark.parametrize("case", essentials(SMALL, ESSENTIAL_CASES.__contains__), ids=lambda case: case.name)
def test_agrees_with_numpy_in_float64(case):
    arrays = case.arrays()
    with jax.enable_x64(True):
        expected = numpy_attention(case, *arrays)
    count = 5 if case.score_fn in LINEAR and case.softcap is None else 2
    for x, y in zip(exact(case)[:count], expected[:count], strict=True):
        size = max(1.0, np.max(np.abs(y[np.isfinite(y)]), initial=0.0))
        assert accuracy.distance(x, y) <= 1e-12 * size


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 5)}, {"window": (20, 0), "causal": True}])
@pytest.mark.parametrize("shape", [(100, 100, 4, 4), (64, 100, 4, 2), (100, 30, 4, 1)])
def test_agrees_with_jax_nn(options, shape):
    q_len, kv_len, heads, kv_heads = shape
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, q_len, heads, 32))
    k, v = (jax.random.normal(key, (2, kv_len, kv_heads, 32)) for key in keys[1:])
    o = attention(q, k, v, implementation="naive", **options)
    theirs = jax.nn.dot_product_attention(
        q, k, v, is_causal=options.get("causal", False), local_window_size=options.get("window"), implementation="xla"
    )
    sees = attention(q, k, v, implementation="naive", return_lse=True, **options)[1] > -jnp.inf
    sees = sees.swapaxes(1, 2)[..., None]  # jax.nn makes the mean of v of a row that sees nothing
    np.testing.assert_allclose(jnp.where(sees, o, 0), jnp.where(sees, theirs, 0), rtol=2e-5, atol=2e-6)


def test_forward_mode_and_second_derivatives():
    with jax.enable_x64(True):
        q = jax.random.normal(jax.random.key(0), (5, 2, 4), jnp.float64)
        f = lambda q: jnp.sum(attention(q, q, q, causal=True, implementation="naive") ** 2)
        hessian = jax.hessian(f)(q).reshape(40, 40)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)
    assert np.abs(hessian).max() > 0.1
