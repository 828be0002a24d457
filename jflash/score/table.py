"""What score_fn and mask_fn see of the arrays in score_args and mask_args."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array


class Table:
    """An array that can be indexed with integers, one for each dimension, and nothing else: table[h], table[h, i - j].

    A kernel holds the array in memory, not in registers, and reads from it just what is asked for. The indices are
    integers or integer arrays that broadcast against each other; one outside the array means the nearest inside it,
    a negative one 0.
    """

    def __init__(self, shape: tuple[int, ...], read: Callable[[Any], Array]):
        self.shape = shape
        self._read = read  # of the flattened array

    ndim = property(lambda self: len(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index) -> Array:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != len(self.shape):
            raise IndexError(
                f"one of score_args or mask_args takes one index for each dimension of {self.shape}, got {len(indices)}"
            )
        flat: Any = 0
        for x, size in zip(indices, self.shape, strict=True):
            if not isinstance(x, int) and not jnp.issubdtype(getattr(x, "dtype", object), jnp.integer):
                raise TypeError(f"one of score_args or mask_args takes integers as indices, got {x!r}")
            flat = flat * size + (min(max(x, 0), size - 1) if isinstance(x, int) else jnp.clip(x, 0, size - 1))
        return self._read(flat)

    def __iter__(self):
        raise TypeError("one of score_args or mask_args can only be indexed with integers")
