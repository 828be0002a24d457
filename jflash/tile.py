"""The mathematics of one tile of attention, forward, backward and their derivatives, on plain arrays.

A tile is the pairs of some queries (its rows) and some keys (its columns). Its operands come as tuples of chunks of
columns, because a head_dim of 96 is cheaper as 64 + 32 than as 128; outside the kernels there is one chunk.
Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022, algorithms 1 and 4, Dao 2023, algorithms 1 and 2.
"""

from __future__ import annotations

import functools
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
    delta: Any = None  # rowsum(o · do) - dlse: dp - delta is the cotangent of a row's logits over its probabilities

    @classmethod
    def of(cls, norm: Norm, slope: float, split: bool) -> Rows:
        """What the norm says of them. `split`: whether they have a top of their own."""
        log2l = norm.log_l * numerics.LOG2E
        if split:
            return cls(numerics.top_of(norm.m, slope), log2l)
        return cls(None, numerics.one_number(norm.m, log2l, slope))

    def map(self, fn: Callable[[Any], Any]) -> Rows:
        return Rows(*(None if x is None else fn(x) for x in self))


class RowTangents(NamedTuple):
    """The tangents of what is known of each row; None where zero."""

    lse: Any = None
    delta: Any = None

    def map(self, fn: Callable[[Any], Any]) -> RowTangents:
        return RowTangents(*(None if x is None else fn(x) for x in self))


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
    """What the backward needs of the forward. `split`: see Rows.of."""
    delta = jnp.where(norm.log_l == jnp.inf, 0, _products(o, do, dlse.dtype) - dlse)
    return Rows.of(norm, slope, split)._replace(delta=delta)


def delta_tangent(o: OfRows, ot: OfRows | None, do: OfRows, dot: OfRows | None, norm: Norm, dlset: PerRow | None) -> PerRow:
    """The tangent of Rows.delta."""
    dtype = norm.m.dtype
    terms = [_products(x, y, dtype) for x, y in ((ot, do), (o, dot)) if x is not None and y is not None]
    total = sum(terms, jnp.zeros_like(norm.m)) - (0 if dlset is None else dlset)
    return jnp.where(norm.log_l == jnp.inf, 0, total)


def _products(xs: OfRows, ys: OfRows, dtype) -> PerRow:
    return functools.reduce(jnp.add, [jnp.sum(x.astype(dtype) * y.astype(dtype), axis=1) for x, y in zip(xs, ys, strict=True)])


class Cotangents(NamedTuple):
    """What one tile adds to the gradients, before any sum."""

    p: Tile  # the probabilities that reached v: those that dropout kept, scaled
    operands: Operands  # of what the logits were computed from; that of qk lacks the factor `unit`


def backward(qk: Tile, dp: Tile, rows: Rows, score: Score, at: Pairs, visible: Visible | None, arith: Arithmetic) -> Cotangents:
    """One tile from its products qk and dp = do · vᵀ.

    Elementwise, so that queries may run down or across: `rows` and at.i broadcast one way, at.j the other.
    The derivative of the logit is taken by jax.vjp; what remains of it, the factor `unit`, belongs into the last store.
    """
    return _backward(_operands(score, qk, at, visible), dp, rows, score, at, visible, arith)


def _backward(operands: Operands, dp: Tile, rows: Rows, score: Score, at: Pairs, visible: Visible | None, arith: Arithmetic):
    x, pull = jax.vjp(lambda operands: score.logit(operands, at), operands)
    if visible is not None:
        x = jnp.where(visible, x, -jnp.inf)
    p = _probabilities(x, rows, score, arith)
    if (kept := score.kept(at)) is None:
        reached, ds = p, p * (dp - rows.delta)
    else:  # `kept` is used once: Triton would draw it anew for each layout that it is needed in
        reached = jnp.where(kept, p * score.upscale, 0)
        ds = reached * dp - p * rows.delta
    (operands,) = pull(ds)
    if visible is not None and score.score_fn is not None:
        operands = operands.where(visible)  # its derivative may be NaN where it was never meant to be taken
    return Cotangents(reached, operands)


def backward_tangent(
    qk: Tile, dp: Tile, rows: Rows, qkt: Tile | None, dpt: Tile | None, rows_t: RowTangents, score: Score, score_t: Score,
    at: Pairs, visible: Visible | None, arith: Arithmetic,
) -> tuple[Cotangents, Cotangents]:  # fmt: skip
    """(backward(), its tangent). With those of lse and delta known, all else is local to the tile: it is jax.jvp of it.

    `score_t`: the tangents of the Score's own arrays, as `score` has the arrays.
    """
    operands = _operands(score, qk, at, visible)
    of_lse = None if rows_t.lse is None else rows_t.lse * numerics.LOG2E
    return numerics.jvp(
        lambda operands, dp, rows: _backward(operands, dp, rows, score, at, visible, arith),
        (operands, dp, rows),
        (_operand_tangents(score, score_t, operands, qkt, at, visible), dpt, Rows(None, of_lse, rows_t.delta)),
    )


class Matrices(NamedTuple):
    """What a tile is multiplied from, or its tangents; None where these are zero."""

    q: OfRows | None
    k: OfCols | None
    v: OfCols | None
    do: OfRows | None


class Moving(NamedTuple):
    """The tangents of all that the backward of a tile is computed from."""

    x: Matrices
    rows: RowTangents
    score: Score


def terms(
    x: Matrices, rows: Rows, score: Score, moving: Moving | None, at: Pairs, visible: Visible | None, arith: Arithmetic,
    across: bool = False,
) -> list[tuple[Cotangents, Matrices]]:  # fmt: skip
    """What a tile adds to a gradient is a product, of its cotangents and the other operand: (backward(), x).

    What it adds to the gradient's tangent are two, by the product rule. `across`: whether queries run across the tile.
    """
    inner = lambda a, b: arith.inner(b, a) if across else arith.inner(a, b)
    qk, dp = inner(x.q, x.k), inner(x.do, x.v)
    if moving is None:
        return [(backward(qk, dp, rows, score, at, visible, arith), x)]
    xt = moving.x
    qkt, dpt = product_tangent(inner, x.q, xt.q, x.k, xt.k), product_tangent(inner, x.do, xt.do, x.v, xt.v)
    known, changed = backward_tangent(qk, dp, rows, qkt, dpt, moving.rows, score, moving.score, at, visible, arith)
    return [(changed, x), (known, xt)]


def product_tangent(product: Callable, a: Any, at: Any, b: Any, bt: Any) -> Array | None:
    """The tangent of product(a, b); None for zero."""
    both = [product(x, y) for x, y in ((at, b), (a, bt)) if x is not None and y is not None]
    return functools.reduce(jnp.add, both) if both else None


class Moments(NamedTuple):
    """The running sums of the tangents of lse and o.

    And of the probabilities, where rows are known by one number: its rounding is in all three, and in no quotient of them.
    """

    l: Any  # sum of p, one but for that; or None
    lset: PerRow  # sum of p * st, st being the tangent of the logit
    acc: OfRows  # sum of p * st * v + p * vt over the probabilities that reached v


def tangent(
    state: Moments, qk: Tile, qkt: Tile | None, v: OfCols, vt: OfCols | None, rows: Rows, score: Score, score_t: Score,
    at: Pairs, visible: Visible | None, arith: Arithmetic,
) -> Moments:  # fmt: skip
    """Adds one tile of keys to the tangents of rows of which the norm is known."""
    operands = _operands(score, qk, at, visible)
    operands_t = _operand_tangents(score, score_t, operands, qkt, at, visible)
    x, xt = numerics.jvp(lambda operands: score.logit(operands, at), (operands,), (operands_t,))
    if visible is not None:
        x = jnp.where(visible, x, -jnp.inf)
    p = _probabilities(x, rows, score, arith)
    reached = p if (kept := score.kept(at)) is None else jnp.where(kept, p * score.upscale, 0)
    l, lset, acc = state
    if l is not None:
        l = l + jnp.sum(p, axis=1)
    if xt is not None:
        st = xt if score.unit == 1 else xt * score.unit
        if visible is not None:
            st = jnp.where(visible, st, 0)
        lset = lset + jnp.sum(p * st, axis=1)
        acc = numerics.add(acc, arith.combine(reached * st, v))
    if vt is not None:
        acc = numerics.add(acc, arith.combine(reached, vt))
    return Moments(l, lset, acc)


def finish_tangent(state: Moments, o: OfRows) -> tuple[OfRows, PerRow]:
    """(ot, lset) of rows that have seen all their keys; `state` began with the share of their sink, see sinks_tangent.

    Where there is a sum of p it divides, so that st - lset cancels where one key has all the weight.
    """
    l, lset, acc = state
    if l is not None:
        lset, acc = numerics.divide_or_zero(lset, l), tuple(numerics.divide_or_zero(a, l[:, None]) for a in acc)
    return tuple(a - lset[:, None] * x.astype(a.dtype) for a, x in zip(acc, o, strict=True)), lset


def _probabilities(x: Tile, rows: Rows, score: Score, arith: Arithmetic) -> Tile:
    """Of logits x in units of score.unit."""
    return _weights(arith, score.slope, x, rows.top, rows.rest)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _weights(arith: Arithmetic, slope: float, x: Tile, top: Any, rest: Any) -> Tile:
    return arith.exp2(x if top is None else arith.below(x, top), slope, rest)


@_weights.defjvp
def _weights_jvp(arith, slope, primals, tangents):
    """Not by jax.jvp: a minimum has half a derivative at a row's largest logit, and inline assembly has none."""
    p, (xt, _, restt) = _weights(arith, slope, *primals), tangents
    return p, p * (xt * (slope / numerics.LOG2E) - restt * (1 / numerics.LOG2E))


def sinks_tangent(norm: Norm, sinks_t: PerHead | None, score: Score) -> tuple[PerQuery, PerQuery]:
    """What Moments (l, lset) begin with: the share of the sinks."""
    if score.sinks is None:
        return jnp.zeros_like(norm.m), jnp.zeros_like(norm.m)
    p = _of_sinks(norm, score)
    return p, jnp.zeros_like(p) if sinks_t is None else p * sinks_t.astype(p.dtype)[None, :, None]


def sinks_cotangent(norm: Norm, delta: PerQuery, score: Score) -> PerHead:
    """The gradient of the sinks: a sink is a key whose value is 0, so its dp is 0."""
    return -jnp.sum(_of_sinks(norm, score) * delta, axis=(0, 2)).astype(score.sinks.dtype)


def sinks_cotangent_tangent(norm: Norm, delta: PerQuery, score: Score, sinks_t: PerHead | None, rows_t: RowTangents) -> PerHead:
    """The tangent of sinks_cotangent(): pt = p (st - lset), and delta has one of its own."""
    st = 0 if sinks_t is None else sinks_t.astype(delta.dtype)[None, :, None]
    lset, deltat = (jnp.zeros_like(delta) if x is None else x for x in rows_t)
    total = jnp.sum(_of_sinks(norm, score) * ((st - lset) * delta + deltat), axis=(0, 2))
    return -total.astype(score.sinks.dtype)


def _of_sinks(norm: Norm, score: Score) -> PerQuery:
    """The probability of each row's sink."""
    logit = score.sinks.astype(norm.m.dtype)[None, :, None]
    return jnp.exp(logit - norm.m * score.unit - norm.log_l)


def _operands(score: Score, qk: Tile, at: Pairs, visible: Visible | None) -> Operands:
    operands = score.operands(qk, at)
    return operands if visible is None or score.plain else operands.where(visible)


def _operand_tangents(
    score: Score, score_t: Score, operands: Operands, qkt: Tile | None, at: Pairs, visible: Visible | None
) -> Operands:
    """The tangents of _operands(); None where zero."""
    qk = operands.qk
    spread = lambda x: None if x is None else jnp.broadcast_to(x.astype(qk.dtype), qk.shape)
    looked_up = ((score_t.args[arg], index) for arg, index, _ in score.lookups(qk, at)) if jax.tree.leaves(score_t.args) else ()
    values = tuple(None if t is None else spread(t[index]) for t, index in looked_up) or (None,) * len(operands.values)
    tangents = Operands(qkt, spread(score_t.bias), values)
    return tangents if visible is None or score.plain else tangents.where(visible)
