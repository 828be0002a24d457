"""Segment ids of any integer dtype as int32, which is what kernels compare."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

INT32 = np.iinfo(np.int32)


def in_32_bits(q_ids: Array | np.ndarray, kv_ids: Array | np.ndarray) -> tuple[Array, Array]:
    """Ids [batch, length] of queries and keys as int32: equal where, and only where, the given ones are.

    Up to 32 bits they are what they were, unsigned ones from 2**31 on wrapped: nothing else becomes negative then. Wider
    ones become their ranks among all ids of their batch element, so that those that were sorted still are.
    """
    pair = q_ids, kv_ids
    signed = [jnp.issubdtype(x.dtype, jnp.signedinteger) for x in pair]
    if any(signed) and any(x.dtype in (jnp.uint32, jnp.uint64) for x in pair):  # 2**32 - 1 would be -1
        raise TypeError(
            f"segment_ids must be of one dtype, or both signed, got {q_ids.dtype} for queries and {kv_ids.dtype} for keys"
        )
    pair = tuple(map(_narrow, pair))
    if all(x.dtype.itemsize <= 4 for x in pair):
        q_ids, kv_ids = (jnp.asarray(x).astype(jnp.int32) for x in pair)
        return q_ids, kv_ids
    return _ranks(*pair)


def _narrow(ids: Array | np.ndarray) -> Array | np.ndarray:
    """The same, in 32 bits where the values are known and fit."""
    fits = isinstance(ids, np.ndarray) and (ids.size == 0 or (ids.min() >= INT32.min and ids.max() <= INT32.max))
    return ids.astype(np.int32) if fits else ids


def _ranks(q_ids: Array | np.ndarray, kv_ids: Array | np.ndarray) -> tuple[Array, Array]:
    """How many ids of a batch element, of queries and keys together, are less than each."""
    wide = jnp.uint64 if jnp.uint64 in (q_ids.dtype, kv_ids.dtype) else jnp.int64
    with jax.enable_x64(True):  # beside arrays of numpy, which may be wide outside of 64-bit mode too
        q_ids, kv_ids = (jnp.asarray(x).astype(wide) for x in (q_ids, kv_ids))
        everyone = jnp.sort(jnp.concatenate([q_ids, kv_ids], axis=1), axis=1)
        rank = jax.vmap(lambda ids: jnp.searchsorted(*ids).astype(jnp.int32))
        return rank((everyone, q_ids)), rank((everyone, kv_ids))
