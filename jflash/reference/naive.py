"""Dense attention, line by line the textbook formula: the oracle. It shares no mathematics with tile.py.

Memory grows with q_len * kv_len. Everything is ordinary JAX, so forward mode and second derivatives work too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash.score import dropout
from jflash.score.score import Score, on_arrays
from jflash.shapes import K, O, PerQuery, Q, V


@functools.partial(jax.jit, static_argnames="precision")
def naive_attention(q: Q, k: K, v: V, score: Score, *, precision: lax.PrecisionLike = None) -> tuple[O, PerQuery]:
    """(o, lse) = (softmax(scale · q·kᵀ) · v, logsumexp(scale · q·kᵀ)), with rows that see no key 0 and -inf.

    Shapes as in jflash.attention, batch included; Score.of() makes a score.
    """
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=dtype)
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    b, h, i, j = (x.astype(jnp.int32) for x in jnp.ogrid[:batch, :heads, :q_len, :kv_len])
    offset = jnp.broadcast_to(jnp.asarray(score.offset, jnp.int32), (batch,))[:, None, None, None]
    visible = _visible(score, b, h, i, j, offset)

    # What nobody sees is not there: without this a NaN in it would pass through 0 * NaN.
    seen, seeing = (visible.any(axis=axis).swapaxes(1, 2)[..., None] for axis in (2, 3))
    q = jnp.where(seeing, q, 0)
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)

    s = jnp.where(visible, product("bihd,bjhd->bhij", q, k), 0) * score.scale
    if score.softcap is not None:
        s = score.softcap * jnp.tanh(s / score.softcap)
    if score.bias is not None:
        s = s + jnp.where(visible, score.bias.astype(dtype), 0)  # widened first, so that gradients are summed in `dtype`
    if score.score_fn is not None:
        s = on_arrays(score.score_fn, score.arg_shapes)(s, b, h, i + offset, j, *score.args)
    # Rounded once: fused with the difference below, a product is not what it is in the maximum.
    s = lax.optimization_barrier(jnp.where(visible, s, -jnp.inf))
    if score.sinks is not None:  # a key more, whose value is zero
        sinks = jnp.broadcast_to(score.sinks[None, :, None, None].astype(dtype), (batch, heads, q_len, 1))
        s = jnp.concatenate([s, sinks], axis=-1)
    largest = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    e = jnp.exp(s - largest)
    total = jnp.sum(e, axis=-1, keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    p = (e / total)[..., :kv_len]
    if score.dropout_keys is not None:
        k0, k1 = score.dropout_keys[..., 0, None, None], score.dropout_keys[..., 1, None, None]
        p = jnp.where(dropout.keep((k0, k1), i, j, score.dropout_rate), p / (1 - score.dropout_rate), 0)
    o = product("bhij,bjhd->bihd", p.astype(q.dtype), v)
    lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
    return o.astype(q.dtype), lse[..., 0]


def _visible(score: Score, b: Array, h: Array, i: Array, j: Array, offset: Array) -> Array:
    """bool [batch, heads, q_len, kv_len]"""
    ahead = j - (i + offset)
    visible = jnp.ones((b.size, h.size, i.size, j.size), bool)
    if score.left is not None:
        visible &= ahead >= -score.left
    if score.right is not None:
        visible &= ahead <= score.right
    if score.q_lengths is not None:
        visible &= i < score.q_lengths[:, None, None, None]
    if score.kv_lengths is not None:
        visible &= j < score.kv_lengths[:, None, None, None]
    if score.q_segments is not None:
        visible &= score.q_segments[:, None, :, None] == score.kv_segments[:, None, None, :]
    if score.mask is not None:
        visible &= score.mask
    if score.mask_fn is not None:
        visible &= score.mask_fn(b, h, i + offset, j, *score.seen_by_mask_fn)
    return visible
