"""Attention over two sets of keys from attention over each: what rings, shared prefixes and cascades are made of."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jflash.numerics import divide_or_zero
from jflash.shapes import O
from jflash.tile import Norm


def merge(*parts: tuple[ArrayLike, ArrayLike]) -> tuple[Array, Array]:
    """(o, lse) of some queries over all keys, from (o, lse) over each part of them: what `return_lse=True` returns.

    Differentiable in all of them, so that attention over keys that come from different places is one attention::

        prefix = jflash.attention(q, k_prefix, v_prefix, return_lse=True)  # what all requests share, once
        own = jflash.attention(q, k, v, causal=True, return_lse=True)
        o, lse = jflash.merge(prefix, own)

    Parts have no key in common: one that is in two of them counts twice. So "this or that" of two conditions is the one,
    and the other where the one does not hold. Where sinks are given, give them to one part alone.

    Args:
      parts: pairs of o `[batch, q_len, heads, v_dim]` and lse `[batch, heads, q_len]`, or both without batch; one shape and
        dtype for all o, float32 (float64) for lse. At least one pair.

    Returns:
      (o, lse) of the same shapes and dtypes. Where no part has seen a key, o = 0 and lse = -inf.

    Raises:
      TypeError, ValueError: with the argument, what was expected and what came.

    Source: the associative form of online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3.1.
    """
    checked = [_part(n, part) for n, part in enumerate(parts)]
    if not checked:
        raise ValueError("merge must be given at least one pair (o, lse), got none")
    first = checked[0][0]
    for n, (o, _) in enumerate(checked):
        if (o.shape, o.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"parts[{n}] must have an o like that of parts[0], {first.dtype}{list(first.shape)}, got "
                f"{o.dtype}{list(o.shape)}"
            )
    batched = first.ndim == 4
    whole = [(o, lse) if batched else (o[None], lse[None]) for o, lse in checked]
    o, norm = functools.reduce(functools.partial(merged, unit=1.0), [(o, _norm(lse)) for o, lse in whole])
    o, lse = o.astype(first.dtype), norm.lse(1.0)
    return (o, lse) if batched else (o[0], lse[0])


def merged(one: tuple[O, Norm], other: tuple[O, Norm], unit: float) -> tuple[O, Norm]:
    """(o, norm) of rows that have seen both the keys of `one` and those of `other`; o as wide as norm.

    The weights of the two sum to one, and those of rows that have seen nothing are 0. `unit`: see Score.unit.
    """
    empty = [norm.log_l == jnp.inf for _, norm in (one, other)]
    m = [jnp.where(nothing, -jnp.inf, norm.m) for nothing, (_, norm) in zip(empty, (one, other), strict=True)]
    # Whatever is subtracted cancels, and so does what a derivative would make of it.
    largest = lax.stop_gradient(jnp.maximum(*m))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    log_l = [jnp.where(nothing, 0, norm.log_l) for nothing, (_, norm) in zip(empty, (one, other), strict=True)]
    weights = [jnp.exp((x - largest) * unit + y) for x, y in zip(m, log_l, strict=True)]  # exp(-inf) where it is empty
    total = weights[0] + weights[1]
    shares = [divide_or_zero(weight, total).swapaxes(1, 2)[..., None] for weight in weights]
    o = shares[0] * one[0] + shares[1] * other[0]
    nothing = total == 0
    return o, Norm(largest, jnp.where(nothing, jnp.inf, jnp.log(jnp.where(nothing, 1, total))))


def _norm(lse: Array) -> Norm:
    empty = lse == -jnp.inf
    return Norm(jnp.where(empty, 0, lse), jnp.where(empty, jnp.inf, 0))


def _part(n: int, part: tuple[ArrayLike, ArrayLike]) -> tuple[Array, Array]:
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise TypeError(f"parts[{n}] must be a pair (o, lse), got {part!r}")
    o, lse = map(jnp.asarray, part)
    if o.ndim not in (3, 4):
        raise ValueError(f"parts[{n}] must have an o [batch, q_len, heads, v_dim] or [q_len, heads, v_dim], got {o.shape}")
    *batch, q_len, heads, _ = o.shape
    if lse.shape != (*batch, heads, q_len):
        raise ValueError(f"parts[{n}] must have an lse of shape {(*batch, heads, q_len)} beside o {o.shape}, got {lse.shape}")
    if lse.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"parts[{n}] must have an lse of float32 or float64, as attention() returns it, got {lse.dtype}")
    return o, lse
