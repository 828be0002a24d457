"""The mathematics of one tile of attention, forward and backward, on plain arrays.

A tile is the pairs of some queries (its rows) and some keys (its columns). Its operands come as tuples of chunks of
columns, because a head_dim of 96 is cheaper as 64 + 32 than as 128; outside the kernels there is one chunk.
Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022, algorithms 1 and 4, Dao 2023, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jflash import numerics
from jflash.numerics import Arithmetic
from jflash.score.score import Operands, Pairs, Score
from jflash.shapes import OfCols, OfRows, PerHead, PerQuery, PerRow, Tile, Visible


class Softmax(NamedTuple):
    """The running softmax of some rows."""

    m: PerRow  # largest logit so far, in units of score.unit
    l: PerRow  # sum of exp(logit - m) so far
    acc: OfRows  # sum of exp(logit - m) * v so far


def start(rows: int, v_chunks: tuple[int, ...], dtype, score: Score) -> Softmax:
    """The softmax of rows that have seen nothing yet but, if there is one, their sink: a logit without a value."""
    m = jnp.full((rows,), -jnp.inf, dtype)
    if score.sinks is not None:
        m = jnp.broadcast_to(jnp.minimum(score.sinks.astype(dtype) / score.unit, jnp.finfo(dtype).max), (rows,))
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
    zeros = jnp.zeros_like(m)
    if arith.fused:
        origin, slope = numerics.reference_point(m, score.slope)
        p = arith.exp2(x, slope[:, None], (origin * slope)[:, None])
    else:
        origin, slope = jnp.where(m == -jnp.inf, 0, m), score.slope
        p = arith.exp2(arith.below(x, origin[:, None]), slope, zeros[:, None])
    # Exactly one where the maximum stays: a rounding error here would be raised to the power of the number of tiles.
    alpha = arith.exp2(state.m - origin, slope, zeros)
    l = state.l * alpha + jnp.sum(p, axis=1)
    if (kept := score.kept(at)) is not None:
        p = jnp.where(kept, p, 0)  # finish() scales
    return Softmax(m, l, numerics.add(tuple(a * alpha[:, None] for a in state.acc), arith.combine(p, v)))


class Norm(NamedTuple):
    """What the weights of a row are divided by, exp(lse), in two numbers: lse = m * unit + log_l.

    Their sum alone would not do: beside a largest logit of 1e9, and more so of finfo.min, log_l is less than float32 can
    hold, and with it is lost how many keys share the row. Of a row that has seen nothing m is 0 and log_l is inf.
    """

    m: Any  # the largest logit, in units of score.unit; an array with one number a row, or whatever stands for one
    log_l: Any  # natural log of the sum of exp(logit - m)

    def lse(self, unit: float) -> Array:
        """The natural log-sum-exp; -inf of a row that has seen nothing."""
        return jnp.where(self.log_l == jnp.inf, -jnp.inf, self.m * unit + self.log_l)


class Rows(NamedTuple):
    """What the backward must know of each row. A logit x has the probability exp2(slope * (x - top) - rest).

    Without `top`, rest is all of lse in base 2, which is cheaper, and right as long as logits stay under 4e7.
    """

    top: Any  # Norm.m, see numerics.top_of; or None
    rest: Any  # inf where there is no row, or an empty one
    delta: Any  # rowsum(o · do) - dlse: dp - delta is the cotangent of a row's logits over its probabilities

    def map(self, fn: Callable[[Any], Any]) -> Rows:
        return Rows(*(None if x is None else fn(x) for x in self))


def finish(state: Softmax, score: Score, arith: Arithmetic) -> tuple[OfRows, Norm]:
    """(o, norm) of rows that have seen all their keys; o = 0 where there were none."""
    o = tuple(numerics.divide_or_zero(a, state.l[:, None]) for a in state.acc)
    if score.upscale != 1:
        o = tuple(x * score.upscale for x in o)
    log_l = jnp.log(state.l)
    if not score.plain:  # of plain logits it is in the backward's one number too, and cancels
        log_l = log_l - arith.lost(state.m, score.slope) / numerics.LOG2E
    empty = state.l == 0
    return o, Norm(jnp.where(empty, 0, state.m), jnp.where(empty, jnp.inf, log_l))


def rows(o: OfRows, do: OfRows, norm: Norm, dlse: PerRow, slope: float, split: bool) -> Rows:
    """What the backward needs of the forward. `split`: whether the rows have a top of their own."""
    dtype = dlse.dtype
    products = sum(jnp.sum(x.astype(dtype) * y.astype(dtype), axis=1) for x, y in zip(o, do, strict=True))
    delta = jnp.where(norm.log_l == jnp.inf, 0, products - dlse)
    log2l = norm.log_l * numerics.LOG2E
    if split:
        return Rows(numerics.top_of(norm.m, slope), log2l, delta)
    return Rows(None, numerics.one_number(norm.m, log2l, slope), delta)


class Cotangents(NamedTuple):
    """What one tile adds to the gradients, before any sum."""

    p: Tile  # the probabilities that reached v: those that dropout kept, scaled
    operands: Operands  # of what the logits were computed from; that of qk lacks the factor `unit`


def backward(qk: Tile, dp: Tile, rows: Rows, score: Score, at: Pairs, visible: Visible | None, arith: Arithmetic) -> Cotangents:
    """One tile from its products qk and dp = do · vᵀ.

    Elementwise, so that queries may run down or across: `rows` and at.i broadcast one way, at.j the other.
    The derivative of the logit is taken by jax.vjp; what remains of it, the factor `unit`, belongs into the last store.
    """
    x, pull = jax.vjp(lambda operands: score.logit(operands, at), _operands(score, qk, at, visible))
    if visible is not None:
        x = jnp.where(visible, x, -jnp.inf)
    if rows.top is not None:
        x = arith.below(x, rows.top)
    p = arith.exp2(x, score.slope, rows.rest)
    if (kept := score.kept(at)) is None:
        reached, ds = p, p * (dp - rows.delta)
    else:  # `kept` is used once: Triton would draw it anew for each layout that it is needed in
        reached = jnp.where(kept, p * score.upscale, 0)
        ds = reached * dp - p * rows.delta
    (operands,) = pull(ds)
    if visible is not None and score.score_fn is not None:
        operands = operands.where(visible)  # its derivative may be NaN where it was never meant to be taken
    return Cotangents(reached, operands)


def sinks_cotangent(norm: Norm, delta: PerQuery, score: Score) -> PerHead:
    """The gradient of the sinks: a sink is a key whose value is 0, so its dp is 0."""
    logit = score.sinks.astype(delta.dtype)[None, :, None]
    p = jnp.exp(logit - norm.m * score.unit - norm.log_l)
    return -jnp.sum(p * delta, axis=(0, 2)).astype(score.sinks.dtype)


def _operands(score: Score, qk: Tile, at: Pairs, visible: Visible | None) -> Operands:
    operands = score.operands(qk, at)
    return operands if visible is None or score.plain else operands.where(visible)
