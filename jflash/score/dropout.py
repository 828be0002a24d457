"""Dropout by a counter-based generator: whether a probability is kept is a pure function of (key, b, h, i, j).

The generator is Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1,
2, 3"; table 2: the least number of rounds that passes all of BigCrush). It is the cheapest of that paper's on a GPU: a
round is two 32-bit products with their upper halves and two three-way exclusive ors, and threefry would need 12 rounds
of additions and rotations for the same four words.

One block of four words serves the four pairs (i, j), (i, j + 8), (i + 8, j) and (i + 8, j + 8) where neither i nor j has
its bit of value 8 set. Tensor cores leave these four in one thread, whether queries run down or across, and the compiler
then finds that it needs the block only once. What that costs a pair, compiled for H100 (head_dim 64, JAX 0.12.0.1): 11
instructions in the forward, 12 in dQ; 20 in dK/dV, where only two of the four are found to be the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

ROUNDS = 7
ROUNDS_FOR_KEYS = 10  # the paper's own default; once a head it costs nothing

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by each round: the golden ratio and sqrt(3) - 1

Words = tuple[Array, Array, Array, Array]


def philox(counter: Words, key: tuple[Array, Array], rounds: int) -> Words:
    """Philox4x32: four uint32 words for each counter of four, elementwise with broadcasting."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        (high0, low0), (high1, low1) = _multiply(c0, _MULTIPLIERS[0]), _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
    return c0, c1, c2, c3


def _multiply(x: Array, constant: int) -> tuple[Array, Array]:
    """The upper and the lower 32 bits of a product: one machine instruction."""
    with jax.enable_x64(True):  # there is no other way to say it: without this uint64 would silently be uint32
        product = lax.convert_element_type(x, jnp.uint64) * lax.full(x.shape, constant, jnp.uint64)
        high = lax.convert_element_type(lax.shift_right_logical(product, lax.full(x.shape, 32, jnp.uint64)), jnp.uint32)
    return high, x * np.uint32(constant)


def words(name: str, key) -> Array:
    """The uint32 words of a jax.random key, new style or raw, filled up to four with zeros."""
    key = jnp.asarray(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape:
            raise ValueError(f"{name} must be one jax.random key, got an array of them, shape {key.shape}")
        key = jax.random.key_data(key)
    elif key.dtype != jnp.uint32 or key.shape not in ((2,), (4,)):
        raise TypeError(
            f"{name} must be a jax.random key or the two or four uint32 of a raw one, got {key.dtype}{list(key.shape)}"
        )
    return jnp.pad(key, (0, 4 - key.size))


def keys(words: Array, batch: int, heads: int) -> Array:
    """The generator's key for each batch element and head: uint32 [batch, heads, 2].

    An array like any other, so that a program whose batch or heads are sharded takes its part of the unsharded one.
    """
    b = lax.broadcasted_iota(jnp.uint32, (batch, heads), 0)
    h = lax.broadcasted_iota(jnp.uint32, (batch, heads), 1)
    w = [jnp.broadcast_to(word, (batch, heads)) for word in words]
    return jnp.stack(philox((b, h, w[2], w[3]), (w[0], w[1]), ROUNDS_FOR_KEYS)[:2], axis=-1)


def keep(key: tuple[Array, Array], i: Array, j: Array, rate: float) -> Array:
    """True with probability 1 - rate, to 2**-32. The indices i and j broadcast to a tile, the two words of the key too."""
    shape = jnp.broadcast_shapes(i.shape, j.shape)
    i, j = i.astype(jnp.uint32), j.astype(jnp.uint32)
    zero = jnp.zeros(shape, jnp.uint32)
    counter = jnp.broadcast_to(_without_bit_3(i), shape), jnp.broadcast_to(_without_bit_3(j), shape), zero, zero
    w = philox(counter, key, ROUNDS)
    i3, j3 = (i & 8) != 0, (j & 8) != 0
    word = jnp.where(i3, jnp.where(j3, w[3], w[2]), jnp.where(j3, w[1], w[0]))
    return word >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _without_bit_3(x: Array) -> Array:
    return (x >> 4) << 3 | x & 7


def dropout_mask(key, rate: float, shape: tuple[int, ...]) -> Array:
    """What dropout_rate and dropout_key of attention() keep, written out.

    Args:
      key: as dropout_key.
      rate: the probability of being dropped, in [0, 1).
      shape: (batch, heads, q_len, kv_len), or (heads, q_len, kv_len) for inputs without batch.

    Returns:
      bool of that shape, True where a probability is kept (and then divided by 1 - rate).
    """
    if len(shape) not in (3, 4):
        raise ValueError(f"shape must be (batch, heads, q_len, kv_len) or (heads, q_len, kv_len), got {shape}")
    if not 0 <= rate < 1:
        raise ValueError(f"rate must lie in [0, 1), got {rate}")
    batch, heads, q_len, kv_len = (1,) * (4 - len(shape)) + tuple(shape)
    each = keys(words("key", key), batch, heads)
    k0, k1 = each[:, :, 0, None, None], each[:, :, 1, None, None]
    i, j = (lax.broadcasted_iota(jnp.int32, shape, axis) for shape, axis in (((1, 1, q_len, 1), 2), ((1, 1, 1, kv_len), 3)))
    return keep((k0, k1), i, j, rate).reshape(shape)
