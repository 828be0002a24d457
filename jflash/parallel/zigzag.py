"""Zigzag order: how tokens are dealt out to the devices of a ring so that each has as much causal work as the others."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def zigzag(x: ArrayLike, size: int, axis: int = 1) -> Array | np.ndarray:
    """x, reordered so that an even split over `size` devices gives device d the chunks d and 2 * size - 1 - d of 2 * size.

    The length in tokens, by device, for size = 4 (16 tokens)::

        contiguous    0 1  2  3 | 4 5  6  7 | 8 9 10 11 | 12 13 14 15
        zigzag        0 1 14 15 | 2 3 12 13 | 4 5 10 11 |  6  7  8  9

    Under a causal mask device 0 of the contiguous order has keys to look at in one step of a ring, device 3 in all four. In
    zigzag order each has an early chunk and a late one, and at every step half of the pairs to compute.

    Whatever belongs to tokens is reordered alike: ids, targets, segments, and the positions of rotary embeddings, which are
    `zigzag(jnp.arange(length), size, axis=0)`. Do it once, where batches are made, not in each layer; an array whose length is
    split over an explicit mesh axis is made whole first (jax.reshard).

    Args:
      x: any array with a multiple of 2 * size tokens along `axis`. A numpy array gives a numpy array.
      size: how many devices the ring has.
      axis: which axis counts tokens: 1, as in `[batch, length, ...]`.

    Raises:
      ValueError: for a length that is no multiple of 2 * size.

    Source: Brandon et al. 2023 (Striped Attention, arXiv:2311.09431) for the imbalance; the order is that of Llama 3
    (arXiv:2407.21783, section 3.3.2).
    """
    return _reordered(x, size, axis, order_of(size))


def unzigzag(x: ArrayLike, size: int, axis: int = 1) -> Array | np.ndarray:
    """The inverse of zigzag(), with the same arguments: tokens in the order of their positions."""
    return _reordered(x, size, axis, np.argsort(order_of(size)))


def order_of(size: int) -> np.ndarray:
    """The chunks, of 2 * size, in the order in which zigzag() lays them down."""
    if size < 1:
        raise ValueError(f"size must be the number of devices of the ring, at least 1, got {size}")
    return np.stack([np.arange(size), 2 * size - 1 - np.arange(size)], axis=1).ravel()


def _reordered(x: ArrayLike, size: int, axis: int, order: np.ndarray) -> Array | np.ndarray:
    lib = np if isinstance(x, np.ndarray) else jnp
    x = lib.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be one of the {x.ndim} axes of x, got {axis}")
    axis %= x.ndim
    length = x.shape[axis]
    if length % len(order):
        raise ValueError(
            f"the length of x along axis {axis} must be a multiple of 2 * size, {len(order)}, got {length}: pad it, and give "
            "the padding a segment id of its own"
        )
    chunks = x.reshape(*x.shape[:axis], len(order), length // len(order), *x.shape[axis + 1 :])
    return lib.take(chunks, order, axis=axis).reshape(x.shape)
