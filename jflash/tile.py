"""The mathematics of one tile of attention, forward and backward, on plain arrays.

A tile is the pairs of some queries (its rows) and some keys (its columns). Its operands come as tuples of chunks of
columns, because a head_dim of 96 is cheaper as 64 + 32 than as 128; outside the kernels there is one chunk.
Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022, algorithms 1 and 4, Dao 2023, algorithms 1 and 2.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jflash import numerics
from jflash.numerics import Arithmetic
from jflash.score import Operands, Pairs, Score
from jflash.shapes import OfCols, OfRows, PerHead, PerQuery, PerRow, PerRowOrCol, Tile, Visible


class Softmax(NamedTuple):
    """The running softmax of some rows."""

    m: PerRow  # largest logit so far, in units of score.unit
    l: PerRow  # sum of exp(logit - m) so far
    acc: OfRows  # sum of exp(logit - m) * v so far


def start(rows: int, v_chunks: tuple[int, ...], dtype, score: Score) -> Softmax:
    """The softmax of rows that have seen nothing yet but, if there is one, their sink: a logit without a value."""
    m = jnp.full((rows,), -jnp.inf, dtype)
    if score.sinks is not None:
        m = jnp.broadcast_to(score.sinks.astype(dtype) / score.unit, (rows,))
    return Softmax(
        m=m,
        l=jnp.zeros((rows,), dtype) if score.sinks is None else jnp.where(m == -jnp.inf, 0, 1).astype(dtype),
        acc=tuple(jnp.zeros((rows, width), dtype) for width in v_chunks),
    )


def forward(
    state: Softmax, q: OfRows, k: OfCols, v: OfCols, score: Score, at: Pairs, visible: Visible | None, arith: Arithmetic
) -> Softmax:  # fmt: skip
    """Shows one tile of keys to the rows. `visible`: None where all pairs are."""
    x = score.logit(_operands(score, arith.inner(q, k), at, visible), at)
    if visible is not None:
        x = jnp.where(visible, x, -jnp.inf)
    m = jnp.maximum(state.m, jnp.max(x, axis=1))
    origin, slope = numerics.reference_point(m, score.slope)
    p = arith.exp2(x, slope[:, None], (origin * slope)[:, None])
    # Exactly one where the maximum stays: a rounding error here would be raised to the power of the number of tiles.
    alpha = arith.exp2(state.m - origin, slope, jnp.zeros_like(m))
    l = state.l * alpha + jnp.sum(p, axis=1)
    if (kept := score.kept(at)) is not None:
        p = jnp.where(kept, p, 0)  # finish() scales
    return Softmax(m, l, numerics.add(tuple(a * alpha[:, None] for a in state.acc), arith.combine(p, v)))


def finish(state: Softmax, score: Score) -> tuple[OfRows, PerRow]:
    """(o, lse) of rows that have seen all their keys; o = 0 and lse = -inf where there were none."""
    o = tuple(numerics.divide_or_zero(a, state.l[:, None]) for a in state.acc)
    if score.upscale != 1:
        o = tuple(x * score.upscale for x in o)
    return o, state.m * score.unit + jnp.log(state.l)


def delta(o: OfRows, do: OfRows, lse: PerRow, dlse: PerRow) -> tuple[PerRow, PerRow]:
    """(lse2, delta) of each row: what the backward needs to know of the forward.

    dp - delta is the cotangent of a row's logits over its probabilities, where delta = rowsum(o · do) - dlse.
    """
    products = sum(jnp.sum(x.astype(lse.dtype) * y.astype(lse.dtype), axis=1) for x, y in zip(o, do, strict=True))
    return numerics.base2_lse(lse), jnp.where(lse == -jnp.inf, 0, products - dlse)


class Cotangents(NamedTuple):
    """What one tile adds to the gradients, before any sum."""

    p: Tile  # the probabilities that reached v: those that dropout kept, scaled
    operands: Operands  # of what the logits were computed from; that of qk lacks the factor `unit`


def backward(
    qk: Tile, dp: Tile, lse2: PerRowOrCol, delta: PerRowOrCol,
    score: Score, at: Pairs, visible: Visible | None, arith: Arithmetic,
) -> Cotangents:  # fmt: skip
    """One tile from its products qk and dp = do · vᵀ.

    Elementwise, so that queries may run down or across: lse2, delta and at.i broadcast one way, at.j the other.
    The derivative of the logit is taken by jax.vjp; what remains of it, the factor `unit`, belongs into the last store.
    """
    x, pull = jax.vjp(lambda operands: score.logit(operands, at), _operands(score, qk, at, visible))
    if visible is not None:
        x = jnp.where(visible, x, -jnp.inf)
    p = arith.exp2(x, score.slope, lse2)
    if (kept := score.kept(at)) is None:
        reached, ds = p, p * (dp - delta)
    else:  # `kept` is used once: Triton would draw it anew for each layout that it is needed in
        reached = jnp.where(kept, p * score.upscale, 0)
        ds = reached * dp - p * delta
    (operands,) = pull(ds)
    if visible is not None and score.score_fn is not None:
        operands = operands.where(visible)  # its derivative may be NaN where it was never meant to be taken
    return Cotangents(reached, operands)


def sinks_cotangent(sinks: PerHead, lse: PerQuery, delta: PerQuery) -> PerHead:
    """The gradient of the sinks from lse and delta.

    A sink is a key whose value is 0, so its dp is 0.
    """
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks.astype(lse.dtype)[:, None] - lse))
    return -jnp.sum(p * delta, axis=(0, 2)).astype(sinks.dtype)


def _operands(score: Score, qk: Tile, at: Pairs, visible: Visible | None) -> Operands:
    operands = score.operands(qk, at)
    return operands if visible is None or score.plain else operands.where(visible)
