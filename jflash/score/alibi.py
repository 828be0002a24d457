"""The slopes of ALiBi."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array


def alibi_slopes(heads: int) -> Array:
    """The slope of each head for attention with linear biases (Press et al. 2022, section 3), float32 `[heads]`.

    2**-(8/heads), 2**-(16/heads), ... for a power of two; for other numbers of heads those of the power of two below, and
    then every second one of the power of two above, as in the authors' code. For use with score_fn::

        score_fn=lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i - j), score_args=(alibi_slopes(heads),)
    """
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be a positive int, got {heads!r}")
    below = 2 ** int(math.log2(heads))
    slopes = lambda n: [2.0 ** (-8 * (k + 1) / n) for k in range(n)]
    return jnp.array(slopes(below) + slopes(2 * below)[::2][: heads - below], jnp.float32)
