"""Attention by online softmax over tiles of keys, in plain JAX: what runs where there are no kernels.

The same tile.py as in the kernels, with lax loops for the grid. Every tile covers all batch elements and all heads at
once, because a CPU's matrix product wants large operands; the query heads that share a kv head are rows of one tile.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash import numerics, tile
from jflash.launch.blocks import DEFAULTS, BlockSizes
from jflash.numerics import Arithmetic
from jflash.reference.layout import Layout
from jflash.score import ranges
from jflash.score.score import Score
from jflash.shapes import K, O, PerQuery, Q, V
from jflash.tile import Norm
from jflash.vjp import attend


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
        score = layout.cut_score(ranges.with_kv_visits(score, layout.block_q, layout.block_kv))
        k_tiles, v_tiles = layout.cut_keys(k), layout.cut_keys(v)
        dtype, arith = numerics.accumulator(q.dtype), Arithmetic(self.precision)

        def visit(j, state, q, i, masked):
            def one(state, q, k, v, score, at):
                visible = score.visible(at) if masked else None
                _, (k, v) = layout.hide(visible, at, (), (k, v))
                return tile.forward(state, (q,), (k,), (v,), score, at, visible, arith)

            return layout.for_each(one, score, i, j)(state, q, k_tiles[j], v_tiles[j])

        def row_of_tiles(x):
            i, q = x
            state = layout.start(score, v.shape[-1], dtype)
            tiles = ranges.for_all(lambda score: ranges.kv_tiles(score, layout.row_span(i), layout.block_kv), score)
            for lo, hi, masked in tiles.segments():
                state = lax.fori_loop(lo, hi, functools.partial(visit, q=q, i=i, masked=masked), state)
            (o,), norm = jax.vmap(jax.vmap(functools.partial(tile.finish, score=score, arith=arith)))(state)
            return self._result(o, q.dtype), norm

        o, norm = lax.map(row_of_tiles, (jnp.arange(layout.q_count, dtype=jnp.int32), layout.cut_queries(q)))
        return layout.join_queries(o), jax.tree.map(layout.join_rows, norm)

    def backward(self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery) -> tuple[Q, K, V, Score]:
        """(dq, dk, dv, dscore). One loop over the tiles does for all of them, five products a tile."""
        layout = Layout.of(q, v, self.blocks.block_q_dkv, self.blocks.block_kv_dkv)
        dtype, arith = numerics.accumulator(q.dtype), Arithmetic(self.precision)
        rows = rows_of(o, do, norm, dlse, score)
        dscore = score.only()
        if score.sinks is not None:
            dscore = dscore.replace(sinks=tile.sinks_cotangent(norm, rows.delta, score))
        whole_score = score.replace(sinks=None)
        score = layout.cut_score(ranges.with_q_visits(whole_score, layout.block_q, layout.block_kv))
        q_tiles, do_tiles = layout.cut_queries(q), layout.cut_queries(do)
        # Copies with the queries across: XLA's CPU compiler multiplies qᵀ·ds twice as fast as dsᵀ·q, so dk and dv are summed
        # with the keys across.
        q_across_tiles, do_across_tiles = q_tiles.swapaxes(-1, -2), do_tiles.swapaxes(-1, -2)
        row_tiles = tile.Rows(*map(layout.cut_rows, rows, (0, jnp.inf, 0)))  # p = 0 beyond the end

        def visit(i, grads, k, v, j, masked):
            dq_tiles, dk, dv, dbias, dargs = grads

            def one(q, k, v, do, q_across, do_across, rows, score, at):
                visible = score.visible(at) if masked else None
                queries = q, do, q_across.T, do_across.T
                (q, do, q_down, do_down), (k, v) = layout.hide(visible, at, queries, (k, v))
                qk, dp = arith.inner((q,), (k,)), arith.inner((do,), (v,))
                p, ds = tile.backward(qk, dp, rows.map(lambda x: x[:, None]), score, at, visible, arith)
                (dq,) = arith.combine(ds.qk, (k,))
                dk = arith.dot(q_down.T, ds.qk.astype(q.dtype), (1, 0))
                dv = arith.dot(do_down.T, p.astype(do.dtype), (1, 0))
                return (dq, dk, dv), ds.bias, _scattered(score.lookups(qk, at), ds.values, score)

            queries = do_tiles[i], q_across_tiles[i], do_across_tiles[i]
            its_rows = row_tiles.map(lambda x: x[i])
            more, ds, more_args = layout.for_each(one, score, i, j)(q_tiles[i], k, v, *queries, its_rows)
            if dbias is not None:
                dbias = layout.add_pairs(dbias, ds, i, j)
            dargs = jax.tree.map(lambda total, x: total + jnp.sum(x, axis=(0, 1)), dargs, more_args)
            return dq_tiles.at[i].add(more[0]), dk + more[1], dv + more[2], dbias, dargs

        def column_of_tiles(totals, x):
            dq_tiles, dbias, dargs = totals
            j, k, v = x
            zeros_across = lambda x: zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]))
            grads = dq_tiles, zeros_across(k), zeros_across(v), dbias, dargs
            tiles = ranges.for_all(lambda score: ranges.q_tiles(score, layout.col_span(j), layout.block_q), score)
            for lo, hi, masked in tiles.segments():
                grads = lax.fori_loop(lo, hi, functools.partial(visit, k=k, v=v, j=j, masked=masked), grads)
            dq_tiles, dk, dv, dbias, dargs = grads
            dk, dv = dk.swapaxes(-1, -2), dv.swapaxes(-1, -2)
            return (dq_tiles, dbias, dargs), (self._result(dk * score.unit, k.dtype), self._result(dv, v.dtype))

        zeros = lambda shape: jnp.zeros(shape, dtype)
        floating = [n for n, yes in enumerate(score.differentiable_args) if yes]
        dbias = None if score.bias is None else zeros(score.bias.shape)
        dargs = tuple(zeros(score.args[n].shape) for n in floating)
        columns = jnp.arange(layout.kv_count, dtype=jnp.int32), layout.cut_keys(k), layout.cut_keys(v)
        totals = zeros(q_tiles.shape), dbias, dargs
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
