"""The mathematics of one tile of attention, forward and backward, on plain arrays.

A tile is the pairs of some queries (its rows) and some keys (its columns). Its operands come as tuples of chunks of
columns, because a head_dim of 96 is cheaper as 64 + 32 than as 128; outside the kernels there is one chunk.
Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022, algorithms 1 and 4, Dao 2023, algorithms 1 and 2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jflash import numerics
from jflash.numerics import Arithmetic
from jflash.score import Score

Chunks = tuple[Array, ...]


class Softmax(NamedTuple):
    """The running softmax of some rows."""

    m: Array  # [rows] largest logit so far, in units of score.unit
    l: Array  # [rows] sum of exp(logit - m) so far
    acc: Chunks  # [rows, chunk] sum of exp(logit - m) * v so far


def start(rows: int, v_chunks: tuple[int, ...], dtype) -> Softmax:
    """The softmax of rows that have seen nothing yet."""
    return Softmax(
        m=jnp.full((rows,), -jnp.inf, dtype),
        l=jnp.zeros((rows,), dtype),
        acc=tuple(jnp.zeros((rows, width), dtype) for width in v_chunks),
    )


def forward(
    state: Softmax, q: Chunks, k: Chunks, v: Chunks, score: Score, rows: Array, cols: Array, masked: bool, arith: Arithmetic
) -> Softmax:  # fmt: skip
    """Shows one tile of keys to the rows. `rows` is [rows, 1], `cols` [1, cols]; `masked`: some pairs are invisible."""
    x = score.logit(arith.inner(q, k), rows, cols)
    if masked:
        x = jnp.where(score.visible(rows, cols), x, -jnp.inf)
    m = jnp.maximum(state.m, jnp.max(x, axis=1))
    origin, slope = numerics.reference_point(m, score.slope)
    p = arith.exp2(x, slope[:, None], (origin * slope)[:, None])
    # Exactly one where the maximum stays: a rounding error here would be raised to the power of the number of tiles.
    alpha = arith.exp2(state.m - origin, slope, jnp.zeros_like(m))
    return Softmax(
        m=m,
        l=state.l * alpha + jnp.sum(p, axis=1),
        acc=numerics.add(tuple(a * alpha[:, None] for a in state.acc), arith.combine(p, v)),
    )


def finish(state: Softmax, score: Score) -> tuple[Chunks, Array]:
    """(o, lse) of rows that have seen all their keys; o = 0 and lse = -inf where there were none."""
    o = tuple(numerics.divide_or_zero(a, state.l[:, None]) for a in state.acc)
    return o, state.m * score.unit + jnp.log(state.l)


def delta(o: Chunks, do: Chunks, lse: Array, dlse: Array) -> tuple[Array, Array]:
    """(lse2, delta) of each row: what the backward needs to know of the forward.

    dp - delta is the cotangent of a row's logits over its probabilities, where delta = rowsum(o · do) - dlse.
    """
    products = sum(jnp.sum(x.astype(lse.dtype) * y.astype(lse.dtype), axis=1) for x, y in zip(o, do, strict=True))
    return numerics.base2_lse(lse), jnp.where(lse == -jnp.inf, 0, products - dlse)


def backward(
    qk: Array, dp: Array, lse2: Array, delta: Array, score: Score, rows: Array, cols: Array, masked: bool, arith: Arithmetic
) -> tuple[Array, Array]:  # fmt: skip
    """(p, dqk / unit) of one tile from its products qk and dp = do · vᵀ.

    Elementwise, so that rows may run down or across: lse2, delta and `rows` broadcast one way, `cols` the other.
    The derivative of the logit is taken by jax.vjp; what remains of it, the factor `unit`, belongs into the last store.
    """
    x, pull = jax.vjp(lambda qk: score.logit(qk, rows, cols), qk)
    if masked:
        x = jnp.where(score.visible(rows, cols), x, -jnp.inf)
    p = arith.exp2(x, score.slope, lse2)
    (dqk,) = pull(p * (dp - delta))
    return p, dqk
