"""Softmax three ways, from the formula to the recurrence on which tiled attention rests. For reading and comparing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.jit
def naive_softmax(x: Array) -> Array:
    """exp(x) / sum(exp(x)) over the last axis. Overflows: inf / inf = NaN where an x passes 88 in float32."""
    e = jnp.exp(x)
    return e / jnp.sum(e, axis=-1, keepdims=True)


@jax.jit
def safe_softmax(x: Array) -> Array:
    """The same in three passes over x, none of which overflows: the maximum, the sum, the quotient."""
    m = jnp.max(x, axis=-1, keepdims=True)
    l = jnp.sum(jnp.exp(x - m), axis=-1, keepdims=True)
    return jnp.exp(x - m) / l


@jax.jit
def online_softmax(x: Array) -> Array:
    """The same in two passes: maximum and sum together, element by element (Milakov and Gimelshein 2018, algorithm 3).

    A sum over the elements so far, taken relative to their maximum m, is carried over to a larger maximum by one
    factor: l' = l * exp(m - m') + exp(x - m').
    """

    def visit(carry, x):
        m, l = carry
        larger = jnp.maximum(m, x)
        return (larger, l * jnp.exp(m - larger) + jnp.exp(x - larger)), None

    first = x[..., 0]
    (m, l), _ = lax.scan(visit, (first, jnp.ones_like(first)), jnp.moveaxis(x[..., 1:], -1, 0))
    return jnp.exp(x - m[..., None]) / l[..., None]
