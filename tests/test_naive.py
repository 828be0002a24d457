"""The oracle: dense attention against float64 numpy, formula by formula, and against jax.nn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import accuracy, attention
from jflash.cases import CASES

SMALL = [case for case in CASES if case.q_len <= 100 or not case.causal]


def numpy_attention(case, q, k, v, do, dlse):
    """(o, lse, dq, dk, dv) by the formulas of softmax and its derivative, one head at a time, float64."""
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    group = case.heads // case.kv_heads
    o, lse = np.zeros_like(do), np.full_like(dlse, -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    left, right = case.window if isinstance(case.window, tuple) else (case.window, case.window)
    for b in range(case.batch):
        offset = case.q_offset[b] if isinstance(case.q_offset, tuple) else case.q_offset
        for h in range(case.heads):
            for i in range(case.q_len):
                see = np.ones(case.kv_len, bool)
                for j in range(case.kv_len):
                    ahead = j - (offset + i)
                    see[j] = not (case.causal and ahead > 0) and -ahead <= (left or abs(ahead) * (left is None))
                    see[j] &= ahead <= (right or abs(ahead) * (right is None))
                if not see.any():
                    continue
                keys, values = k[b, see, h // group], v[b, see, h // group]
                s = scale * keys @ q[b, i, h]
                e = np.exp(s - s.max())
                p = e / e.sum()
                lse[b, h, i] = s.max() + np.log(e.sum())
                o[b, i, h] = p @ values
                dp = values @ do[b, i, h]
                ds = p * (dp - p @ dp + dlse[b, h, i])
                dq[b, i, h] = scale * ds @ keys
                dk[b, see, h // group] += scale * np.outer(ds, q[b, i, h])
                dv[b, see, h // group] += np.outer(p, do[b, i, h])
    return o, lse, dq, dk, dv


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_agrees_with_numpy_in_float64(case):
    arrays = case.arrays()
    for x, expected in zip(accuracy.exact(case, arrays), numpy_attention(case, *arrays), strict=True):
        size = max(1.0, np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0))
        assert accuracy.distance(x, expected) <= 1e-12 * size


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
