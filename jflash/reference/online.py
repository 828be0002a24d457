"""Attention by online softmax over tiles of keys, in plain JAX: what runs where there are no kernels.

The same tile.py as in the kernels, with lax loops for the grid. Every tile covers all batch elements and all heads at
once, because a CPU's matrix product wants large operands; the query heads that share a kv head are rows of one tile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash import numerics, tile
from jflash.derivatives import Tangents, attend
from jflash.launch.blocks import DEFAULTS, BlockSizes
from jflash.numerics import Arithmetic
from jflash.reference.layout import Layout
from jflash.score import ranges, visits
from jflash.score.score import Score
from jflash.score.visits import Cut
from jflash.shapes import K, O, PerQuery, Q, V
from jflash.tile import Norm


class _Keys(NamedTuple):
    """What is multiplied for keys, or its tangents; None where these are zero."""

    k: Any
    v: Any


class _Queries(NamedTuple):
    """What is multiplied for queries, or its tangents; None where these are zero.

    Each also with the queries across: XLA's CPU compiler multiplies qᵀ·ds twice as fast as dsᵀ·q, so dk and dv are summed
    with the keys across.
    """

    q: Any
    do: Any
    q_across: Any
    do_across: Any

    @classmethod
    def cut(cls, layout: Layout, q: Any, do: Any) -> _Queries:
        down = jax.tree.map(layout.cut_queries, (q, do))
        return cls(*down, *jax.tree.map(lambda x: x.swapaxes(-1, -2), down))

    @property
    def down(self) -> _Queries:
        """With all queries down, for one tile."""
        return _Queries(self.q, self.do, *jax.tree.map(jnp.transpose, (self.q_across, self.do_across)))


def _product_tangent(q: Q, qt: Q | None, k: K, kt: K | None) -> tuple[Any, Any]:
    """What to multiply for the tangent of q · kᵀ: one product twice as wide where both move, which a CPU likes better."""
    if qt is None or kt is None:
        return (None, None) if qt is kt else (q, kt) if qt is None else (qt, k)
    return jnp.concatenate([qt, q], axis=-1), jnp.concatenate([k, kt], axis=-1)


def _matrices(queries: _Queries, keys: _Keys) -> tile.Matrices:
    return tile.Matrices(*map(_chunks, (queries.q, *keys, queries.do)))


def _chunks(x: Array | None) -> Any:
    """What stands for x in tile.py: one chunk of columns."""
    return None if x is None else (x,)


def _across(arith: Arithmetic, queries: Array, pairs: Array) -> Array:
    """queriesᵀ · pairs, what a tile adds to dk or dv; the keys run across."""
    return arith.dot(queries.T, pairs.astype(queries.dtype), (1, 0))


def _over_row(layout: Layout, score: Score, i, visit: Callable, state):
    """visit(j, state, masked=...) of each kv tile that q tile i visits."""
    tiles = ranges.for_all(lambda score: ranges.kv_tiles(score, layout.row_span(i), layout.block_kv), score)
    return ranges.over(tiles, visit, state)


@dataclasses.dataclass(frozen=True)
class Online:
    """The engine of implementation="xla"."""

    blocks: BlockSizes = DEFAULTS
    precision: lax.PrecisionLike = None
    partial: bool = False

    def for_parts(self) -> Online:
        return dataclasses.replace(self, partial=True)

    def result_dtype(self, dtype):
        return numerics.result_dtype(dtype, self.partial)

    def forward(self, q: Q, k: K, v: V, score: Score) -> tuple[O, Norm]:
        layout = Layout.of(q, v, self.blocks.block_q, self.blocks.block_kv)
        score = layout.cut_score(visits.with_visits_of_all(score, layout.cut))
        k_tiles, v_tiles = layout.cut_keys(k), layout.cut_keys(v)
        dtype, arith = numerics.accumulator(q.dtype), Arithmetic(self.precision)

        def visit(j, state, q, i, masked):
            def one(state, q, k, v, score, at):
                visible = score.visible(at) if masked else None
                _, (k, v) = layout.hide(visible, at, (), (k, v))
                return tile.forward(state, (q,), (k,), (v,), score, at, visible, arith)

            return layout.for_each(one, (score,), i, j)(state, q, k_tiles[j], v_tiles[j])

        def row_of_tiles(x):
            i, q = x
            state = _over_row(layout, score, i, functools.partial(visit, q=q, i=i), layout.start(score, v.shape[-1], dtype))
            (o,), norm = jax.vmap(jax.vmap(functools.partial(tile.finish, score=score, arith=arith)))(state)
            return self._result(o, q.dtype), norm

        o, norm = lax.map(row_of_tiles, (jnp.arange(layout.q_count, dtype=jnp.int32), layout.cut_queries(q)))
        return layout.join_queries(o), jax.tree.map(layout.join_rows, norm)

    def cut(self, q: Q, v: V, score: Score) -> Cut:
        """The tiles of the forward; they do not depend on the score."""
        return Layout.of(q, v, self.blocks.block_q, self.blocks.block_kv).cut

    def visits(self, score: Score, cut: Cut) -> Array:
        """What it does with each of them, see score.visits.states()."""
        return visits.states(score, cut, together=True)

    def tangent(self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, tangents: Tangents) -> tuple[O, PerQuery]:
        layout = Layout.of(q, v, self.blocks.block_q, self.blocks.block_kv)
        rows = tile.Rows.of(norm, score.slope, split=True)
        _, start = tile.sinks_tangent(norm, tangents.score.sinks, score)
        scores = visits.with_visits_of_all(score, layout.cut), tangents.score
        scores = score, _ = tuple(map(layout.cut_score, scores))
        left, right = _product_tangent(q, tangents.q, k, tangents.k)
        query_tiles = jax.tree.map(layout.cut_queries, (q, left))
        key_tiles = jax.tree.map(layout.cut_keys, (k, right, v, tangents.v))
        arith = Arithmetic(self.precision)

        def visit(j, state, queries, rows, i, masked):
            def one(state, queries, rows, keys, score, score_t, at):
                visible = score.visible(at) if masked else None
                queries, keys = layout.hide(visible, at, queries, keys)
                (q, left), (k, right, v, vt) = map(_chunks, queries), map(_chunks, keys)
                qkt = None if left is None else arith.inner(left, right)
                rows = rows.map(lambda x: x[:, None])
                return tile.tangent(state, arith.inner(q, k), qkt, v, vt, rows, score, score_t, at, visible, arith)

            return layout.for_each(one, scores, i, j)(state, queries, rows, jax.tree.map(lambda x: x[j], key_tiles))

        def row_of_tiles(x):
            i, queries, rows, lset, o = x
            state = tile.Moments(None, lset, (jnp.zeros(o.shape, norm.m.dtype),))
            state = _over_row(layout, score, i, functools.partial(visit, queries=queries, rows=rows, i=i), state)
            (ot,), lset = jax.vmap(jax.vmap(tile.finish_tangent))(state, (o,))
            return self._result(ot, q.dtype), lset

        row_tiles = jax.tree.map(layout.cut_rows, rows, tile.Rows(0, jnp.inf))  # p = 0 beyond the end
        counts = jnp.arange(layout.q_count, dtype=jnp.int32)
        ot, lset = lax.map(row_of_tiles, (counts, query_tiles, row_tiles, layout.cut_rows(start, 0), layout.cut_queries(o)))
        return layout.join_queries(ot), layout.join_rows(lset)

    def backward(self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery) -> tuple[Q, K, V, Score]:
        rows = rows_of(o, do, norm, dlse, score)
        dscore = score.only()
        if score.sinks is not None:
            dscore = dscore.replace(sinks=tile.sinks_cotangent(norm, rows.delta, score))
        return self._gradients(q, k, v, score, do, rows, dscore)

    def backward_tangent(
        self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery, tangents: Tangents
    ) -> tuple[Q, K, V, Score]:
        rows, rows_t = rows_of(o, do, norm, dlse, score), row_tangents_of(o, do, norm, tangents)
        dscore = score.only()
        if score.sinks is not None:
            sinks = tile.sinks_cotangent_tangent(norm, rows.delta, score, tangents.score.sinks, rows_t)
            dscore = dscore.replace(sinks=sinks)
        return self._gradients(q, k, v, score, do, rows, dscore, tangents, rows_t)

    def _gradients(
        self, q: Q, k: K, v: V, score: Score, do: O, rows: tile.Rows, dscore: Score, tangents: Tangents | None = None,
        rows_t: tile.RowTangents | None = None,
    ) -> tuple[Q, K, V, Score]:  # fmt: skip
        """(dq, dk, dv, dscore), or their tangents. One loop over the tiles does for all of them, five products a tile."""
        layout = Layout.of(q, v, self.blocks.block_q_dkv, self.blocks.block_kv_dkv)
        dtype, arith = numerics.accumulator(q.dtype), Arithmetic(self.precision)
        whole_score = score.replace(sinks=None)
        score = layout.cut_score(visits.with_visits_of_all(whole_score, layout.cut, of_keys=True))
        query_tiles, key_tiles = _Queries.cut(layout, q, do), jax.tree.map(layout.cut_keys, _Keys(k, v))
        row_tiles = jax.tree.map(layout.cut_rows, rows, tile.Rows(0, jnp.inf, 0))  # p = 0 beyond the end
        scores, moving = (score,), None  # of the tangents: what there is of each q tile, and of each kv tile
        if tangents is not None:
            scores = score, layout.cut_score(tangents.score)
            queries_t = _Queries.cut(layout, tangents.q, tangents.do)
            moving = queries_t, jax.tree.map(lambda x: layout.cut_rows(x, 0), rows_t)
        keys_t_tiles = None if tangents is None else jax.tree.map(layout.cut_keys, _Keys(tangents.k, tangents.v))

        def visit(i, grads, keys, keys_t, j, masked):
            dq_tiles, dk, dv, dbias, dargs = grads

            def one(queries, keys, rows, moving, keys_t, score, *rest):
                *score_t, at = rest
                visible = score.visible(at) if masked else None
                queries, queries_t = queries.down, None if moving is None else moving[0].down
                (queries, queries_t), (keys, keys_t) = layout.hide(visible, at, (queries, queries_t), (keys, keys_t))
                down = lambda row: row.map(lambda x: x[:, None])
                if moving is not None:
                    moving = tile.Moving(_matrices(queries_t, keys_t), down(moving[1]), *score_t)
                terms = tile.terms(_matrices(queries, keys), down(rows), score, moving, at, visible, arith)
                both = (queries, keys), (queries_t, keys_t)
                ds, its = terms[0][0], [(c, *both[n]) for n, (c, _) in enumerate(terms)]
                dq = [arith.combine(c.operands.qk, (x.k,))[0] for c, _, x in its if x.k is not None]
                dk = [_across(arith, x.q_across, c.operands.qk) for c, x, _ in its if x.q is not None]
                dv = [_across(arith, x.do_across, c.p) for c, x, _ in its if x.do is not None]
                gradients = tuple(functools.reduce(jnp.add, xs) for xs in (dq, dk, dv))
                return gradients, ds.operands.bias, _scattered(score.lookups(ds.operands.qk, at), ds.operands.values, score)

            its, its_rows, its_moving = jax.tree.map(lambda x: x[i], (query_tiles, row_tiles, moving))
            more, ds, more_args = layout.for_each(one, scores, i, j)(its, keys, its_rows, its_moving, keys_t)
            if dbias is not None:
                dbias = layout.add_pairs(dbias, ds, i, j)
            dargs = jax.tree.map(lambda total, x: total + jnp.sum(x, axis=(0, 1)), dargs, more_args)
            return dq_tiles.at[i].add(more[0]), dk + more[1], dv + more[2], dbias, dargs

        def column_of_tiles(totals, x):
            dq_tiles, dbias, dargs = totals
            j, keys, keys_t = x
            zeros_across = lambda x: zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]))
            grads = dq_tiles, zeros_across(keys.k), zeros_across(keys.v), dbias, dargs
            tiles = ranges.for_all(lambda score: ranges.q_tiles(score, layout.col_span(j), layout.block_q), score)
            its_visit = functools.partial(visit, keys=keys, keys_t=keys_t, j=j)
            dq_tiles, dk, dv, dbias, dargs = ranges.over(tiles, its_visit, grads)
            dk, dv = dk.swapaxes(-1, -2), dv.swapaxes(-1, -2)
            return (dq_tiles, dbias, dargs), (self._result(dk * score.unit, k.dtype), self._result(dv, v.dtype))

        zeros = lambda shape: jnp.zeros(shape, dtype)
        floating = [n for n, yes in enumerate(score.differentiable_args) if yes]
        dbias = None if score.bias is None else zeros(score.bias.shape)
        dargs = tuple(zeros(score.args[n].shape) for n in floating)
        columns = jnp.arange(layout.kv_count, dtype=jnp.int32), key_tiles, keys_t_tiles
        totals = zeros(query_tiles.q.shape), dbias, dargs
        (dq_tiles, dbias, dargs), (dk, dv) = lax.scan(column_of_tiles, totals, columns)
        if dbias is not None:
            dscore = dscore.replace(bias=layout.join_pairs(dbias, whole_score.bias))
        if floating:
            of = dict(zip(floating, dargs, strict=True))
            dscore = dscore.replace(args=tuple(of[n].astype(x.dtype) if n in of else None for n, x in enumerate(score.args)))
        dq = layout.join_queries(self._result(dq_tiles * score.unit, q.dtype))
        return dq, layout.join_keys(dk), layout.join_keys(dv), dscore

    def _result(self, x: Array, dtype) -> Array:
        return x.astype(self.result_dtype(dtype))


def rows_of(o: O, do: O, norm: Norm, dlse: PerQuery, score: Score) -> tile.Rows:
    """What the backward must know of each row, [batch, heads, q_len]."""
    of_head = lambda o, do, norm, dlse: tile.rows((o,), (do,), norm, dlse, score.slope, split=True)
    return jax.vmap(jax.vmap(of_head, in_axes=(1, 1, 0, 0)))(o, do, norm, dlse)


def row_tangents_of(o: O, do: O, norm: Norm, tangents: Tangents) -> tile.RowTangents:
    """Their tangents, [batch, heads, q_len]."""
    of_head = lambda o, ot, do, dot, *of_rows: tile.delta_tangent(*map(_chunks, (o, ot, do, dot)), *of_rows)
    its_axes = [None if x is None else 1 for x in (o, tangents.o, do, tangents.do)]
    axes = *its_axes, 0, None if tangents.dlse is None else 0
    delta = jax.vmap(jax.vmap(of_head, in_axes=axes), in_axes=tuple(None if n is None else 0 for n in axes))
    return tile.RowTangents(tangents.lse, delta(o, tangents.o, do, tangents.do, norm, tangents.dlse))


def unseen(q: Q, v: V, score: Score, dtype) -> tuple[O, Norm]:
    """(o, norm) of queries that have seen no keys but, if there is one, their sink; o has `dtype`."""
    batch, q_len, heads, _ = q.shape
    start = lambda sink: tile.start(q_len, (), numerics.accumulator(q.dtype), score.replace(sinks=sink))
    _, norm = tile.finish(jax.vmap(start, axis_size=heads)(score.sinks), score, Arithmetic())
    norm = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, heads, q_len)), norm)
    return jnp.zeros((batch, q_len, heads, v.shape[-1]), dtype), norm


def _scattered(lookups, ds: tuple[Array, ...], score: Score) -> tuple[Array, ...]:
    """What the cotangents of what score_fn read add to the gradient of each floating-point array."""
    totals = {n: jnp.zeros(x.shape, ds[0].dtype) for n, x in enumerate(score.args) if score.differentiable_args[n]}
    for (arg, index, _), x in zip(lookups, ds, strict=True):
        shape = (1,) * (x.ndim - jnp.ndim(index)) + jnp.shape(index)
        x = jnp.sum(x, axis=[axis for axis, size in enumerate(shape) if size == 1], keepdims=True)
        totals[arg] = totals[arg].at[jnp.reshape(index, shape)].add(x)
    return tuple(totals.values())


@functools.partial(jax.jit, static_argnames=("blocks", "precision"))
def online_attention(
    q: Q, k: K, v: V, score: Score, *, blocks: BlockSizes = DEFAULTS, precision: lax.PrecisionLike = None
) -> tuple[O, PerQuery]:
    """(o, lse) by online softmax over tiles of keys, with the tiled backward (Dao et al. 2022, algorithms 1 and 4).

    Shapes as in jflash.attention, batch included; Score.of() makes a score.
    """
    return attend(Online(blocks, precision), q, k, v, score)
