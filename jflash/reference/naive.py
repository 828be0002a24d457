"""Dense attention, line by line the textbook formula: the oracle. It shares no mathematics with tile.py.

Memory grows with q_len * kv_len. Everything is ordinary JAX, so forward mode and second derivatives work too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash.score import Score


@functools.partial(jax.jit, static_argnames="precision")
def naive_attention(q: Array, k: Array, v: Array, score: Score, *, precision: lax.PrecisionLike = None) -> tuple[Array, Array]:
    """(o, lse) = (softmax(scale · q·kᵀ) · v, logsumexp(scale · q·kᵀ)), with rows that see no key 0 and -inf.

    Shapes as in jflash.attention, batch included; Score.of() makes a score.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=dtype)
    group = q.shape[2] // k.shape[2]
    visible = _visible(score, len(q))

    # What nobody sees is not there: without this a NaN in it would pass through 0 * NaN.
    seen, seeing = visible.any(axis=1)[:, :, None, None], visible.any(axis=2)[:, :, None, None]
    k, v, q = jnp.where(seen, k, 0), jnp.where(seen, v, 0), jnp.where(seeing, q, 0)
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)

    s = product("bihd,bjhd->bhij", q, k) * score.scale
    s = jnp.where(visible[:, None], s, -jnp.inf)
    largest = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    e = jnp.exp(s - largest)
    total = jnp.sum(e, axis=-1, keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    o = product("bhij,bjhd->bihd", (e / total).astype(q.dtype), v)
    lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
    return o.astype(q.dtype), lse[..., 0]


def _visible(score: Score, batch: int) -> Array:
    """bool [batch, q_len, kv_len]"""
    offset = jnp.broadcast_to(jnp.asarray(score.offset, jnp.int32), (batch,))
    position = offset[:, None, None] + jnp.arange(score.q_len)[None, :, None]
    ahead = jnp.arange(score.kv_len)[None, None, :] - position
    visible = jnp.ones(ahead.shape, bool)
    if score.left is not None:
        visible &= ahead >= -score.left
    if score.right is not None:
        visible &= ahead <= score.right
    return visible
