"""Attention by online softmax over tiles of keys, in plain JAX: what runs where there are no kernels.

The same tile.py as in the kernels, with lax loops for the grid. Every tile covers all batch elements and all heads at
once, because a CPU's matrix product wants large operands; the query heads that share a kv head are rows of one tile.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash import numerics, ranges, tile
from jflash.blocks import DEFAULTS, BlockSizes
from jflash.numerics import Arithmetic
from jflash.ranges import Span
from jflash.score import ONE_FOR_EACH, PAIRWISE, Pairs, Score
from jflash.shapes import K, O, PerQuery, Q, V
from jflash.vjp import attend

TILE_ELEMENTS = 2**20  # of one tile of logits over all batch elements and heads: 4 MiB of float32, a second-level cache


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

    def forward(self, q: Q, k: K, v: V, score: Score) -> tuple[O, PerQuery]:
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
            (o,), lse = jax.vmap(jax.vmap(functools.partial(tile.finish, score=score)))(state)
            return self._result(o, q.dtype), lse

        o, lse = lax.map(row_of_tiles, (jnp.arange(layout.q_count, dtype=jnp.int32), layout.cut_queries(q)))
        return layout.join_queries(o), layout.join_rows(lse)

    def backward(self, q: Q, k: K, v: V, score: Score, o: O, lse: PerQuery, do: O, dlse: PerQuery) -> tuple[Q, K, V, Score]:
        """(dq, dk, dv, dscore). One loop over the tiles does for all of them, five products a tile."""
        layout = Layout.of(q, v, self.blocks.block_q_dkv, self.blocks.block_kv_dkv)
        dtype, arith = numerics.accumulator(q.dtype), Arithmetic(self.precision)
        lse2, delta = row_delta(o, do, lse, dlse)
        dscore = score.only()
        if score.sinks is not None:
            dscore = dscore.replace(sinks=tile.sinks_cotangent(score.sinks, lse, delta))
        whole_score = score.replace(sinks=None)
        score = layout.cut_score(ranges.with_q_visits(whole_score, layout.block_q, layout.block_kv))
        q_tiles, do_tiles = layout.cut_queries(q), layout.cut_queries(do)
        # Copies with the queries across: XLA's CPU compiler multiplies qᵀ·ds twice as fast as dsᵀ·q, so dk and dv are summed
        # with the keys across.
        q_across_tiles, do_across_tiles = q_tiles.swapaxes(-1, -2), do_tiles.swapaxes(-1, -2)
        lse2_tiles, delta_tiles = layout.cut_rows(lse2, jnp.inf), layout.cut_rows(delta, 0)  # p = 0 beyond the end

        def visit(i, grads, k, v, j, masked):
            dq_tiles, dk, dv, dbias, dargs = grads

            def one(q, k, v, do, q_across, do_across, lse2, delta, score, at):
                visible = score.visible(at) if masked else None
                queries = q, do, q_across.T, do_across.T
                (q, do, q_down, do_down), (k, v) = layout.hide(visible, at, queries, (k, v))
                qk, dp = arith.inner((q,), (k,)), arith.inner((do,), (v,))
                p, ds = tile.backward(qk, dp, lse2[:, None], delta[:, None], score, at, visible, arith)
                (dq,) = arith.combine(ds.qk, (k,))
                dk = arith.dot(q_down.T, ds.qk.astype(q.dtype), (1, 0))
                dv = arith.dot(do_down.T, p.astype(do.dtype), (1, 0))
                return (dq, dk, dv), ds.bias, _scattered(score.lookups(qk, at), ds.values, score)

            rows = (x[i] for x in (do_tiles, q_across_tiles, do_across_tiles, lse2_tiles, delta_tiles))
            more, ds, more_args = layout.for_each(one, score, i, j)(q_tiles[i], k, v, *rows)
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


def row_delta(o: O, do: O, lse: PerQuery, dlse: PerQuery) -> tuple[PerQuery, PerQuery]:
    """(lse2, delta), see tile.delta."""
    of_head = lambda o, do, lse, dlse: tile.delta((o,), (do,), lse, dlse)
    return jax.vmap(jax.vmap(of_head, in_axes=(1, 1, 0, 0)))(o, do, lse, dlse)


def _scattered(lookups, ds: tuple[Array, ...], score: Score) -> tuple[Array, ...]:
    """What the cotangents of what score_fn read add to the gradient of each floating-point array."""
    totals = {n: jnp.zeros(x.shape, ds[0].dtype) for n, x in enumerate(score.args) if score.differentiable_args[n]}
    for (arg, index, _), x in zip(lookups, ds, strict=True):
        shape = (1,) * (x.ndim - jnp.ndim(index)) + jnp.shape(index)
        x = jnp.sum(x, axis=[axis for axis, size in enumerate(shape) if size == 1], keepdims=True)
        totals[arg] = totals[arg].at[jnp.reshape(index, shape)].add(x)
    return tuple(totals.values())


class Layout(NamedTuple):
    """How arrays are cut into tiles: `[tiles, batch, kv_heads, block * group, width]`, the ends padded with zeros.

    The rows of a tile are its queries, at each of which the heads of a group lie side by side.
    """

    batch: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    kv_heads: int
    group: int

    @classmethod
    def of(cls, q: Array, v: Array, block_q: int | None, block_kv: int | None) -> Layout:
        batch, q_len, heads, _ = q.shape
        _, kv_len, kv_heads, _ = v.shape
        # Not known where jax.export leaves the batch open: the smallest tile then, whose memory suits any batch.
        planes = batch * heads if numerics.known(batch * heads) else TILE_ELEMENTS
        block = 1 << max(6, min(9, int(math.log2(TILE_ELEMENTS / planes) / 2)))
        block_q, block_kv = block_q or _even(q_len, block), block_kv or _even(kv_len, block)
        return cls(batch, q_len, kv_len, block_q, block_kv, kv_heads, heads // kv_heads)

    q_count = property(lambda self: -(-self.q_len // self.block_q))
    kv_count = property(lambda self: -(-self.kv_len // self.block_kv))
    row_count = property(lambda self: self.block_q * self.group)

    def row_span(self, i) -> Span:
        return Span(i * self.block_q, self.block_q)

    def col_span(self, j) -> Span:
        return Span(j * self.block_kv, self.block_kv)

    # ------------------------------------------------------------------------------------------------- the score

    def cut_score(self, score: Score) -> Score:
        """`score` with leaves that whole tiles can be cut from."""
        rows, cols = self.q_count * self.block_q, self.kv_count * self.block_kv

        def cut(name, x):
            if name == "q_segments":
                return _pad(x, rows, 0)
            if name == "kv_segments":
                return _pad(x, cols, 0)
            if name in PAIRWISE:
                x = x if x.shape[2] == 1 else _pad(x, rows, 0, axis=2)
                return x if x.shape[3] == 1 else _pad(x, cols, 0, axis=3)
            return x

        return score.map_leaves(cut)

    def start(self, score: Score, v_dim: int, dtype) -> tile.Softmax:
        """The softmax of a row of tiles that has seen no keys yet, [batch, kv_heads, rows, ...]."""
        sinks = None if score.sinks is None else self._one_for_each_row(score.sinks)
        one = lambda sinks: tile.start(self.row_count, (v_dim,), dtype, score.replace(sinks=sinks))
        heads = jax.vmap(one, axis_size=self.kv_heads)(sinks)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.batch, *leaf.shape)), heads)

    def for_each(self, fn: Callable, score: Score, i, j) -> Callable:
        """fn(*arrays, score, at), of one batch element, one kv head and tile (i, j), for arrays of all of them."""
        own = self._tile_of(score, i, j)

        def one(b, c, score, *arrays):
            h = c if self.group == 1 else (c * self.group + jnp.tile(jnp.arange(self.group), self.block_q))[:, None]
            rows = jnp.repeat(self.row_span(i).indices(), self.group)
            return fn(*arrays, score, Pairs(b, h, rows[:, None], self.col_span(j).indices()[None, :]))

        of_head = lambda b, c, score, *arrays: one(b, c, score.replace(args=own.args, first=own.first), *arrays)
        of_batch = lambda b, *xs: jax.vmap(functools.partial(of_head, b))(jnp.arange(self.kv_heads, dtype=jnp.int32), *xs)
        leaves = own.replace(args=(), first=None)
        return lambda *arrays: jax.vmap(of_batch)(jnp.arange(self.batch, dtype=jnp.int32), leaves, *arrays)

    def _tile_of(self, score: Score, i, j) -> Score:
        """The Score of tile (i, j), its leaves [batch, kv_heads] and what broadcasts to [rows, cols]; args as they are."""
        all_heads = lambda x: jnp.broadcast_to(x[:, None], (self.batch, self.kv_heads, *x.shape[1:]))
        slice_of = lambda x, axis, t, block: lax.dynamic_slice_in_dim(x, t * block, block, axis)

        def read(name, x):
            if name in ONE_FOR_EACH:
                return all_heads(x)
            if name == "q_segments":
                return all_heads(jnp.repeat(slice_of(x, 1, i, self.block_q), self.group, axis=1)[..., None])
            if name == "kv_segments":
                return all_heads(slice_of(x, 1, j, self.block_kv)[:, None, :])
            if name in PAIRWISE:
                x = x if x.shape[2] == 1 else slice_of(x, 2, i, self.block_q)
                x = x if x.shape[3] == 1 else slice_of(x, 3, j, self.block_kv)
                x = jnp.broadcast_to(x, (self.batch, self.kv_heads * self.group, self.block_q, x.shape[3]))
                x = x.reshape(self.batch, self.kv_heads, self.group, self.block_q, -1).swapaxes(2, 3)
                return x.reshape(self.batch, self.kv_heads, self.row_count, -1)
            if name == "dropout_keys":
                words = x[..., 0], x[..., 1]
                return words if self.group == 1 else tuple(jax.vmap(self._one_for_each_row)(w)[..., None] for w in words)
            return x if name in ("args", "first") else None

        return score.map_leaves(read)

    def _one_for_each_row(self, x: Array) -> Array:
        """[heads] -> [kv_heads, rows]"""
        return jnp.tile(x.reshape(self.kv_heads, self.group), (1, self.block_q))

    def add_pairs(self, total: Array, x: Array, i, j) -> Array:
        """total, shaped like the bias, plus x [batch, kv_heads, rows, cols] at tile (i, j), summed where it is broadcast."""
        x = x.reshape(self.batch, self.kv_heads, self.block_q, self.group, self.block_kv).swapaxes(2, 3)
        x = x.reshape(self.batch, -1, self.block_q, self.block_kv)
        x = jnp.sum(x, axis=[axis for axis, size in enumerate(total.shape) if size == 1], keepdims=True)
        at = 0, 0, i * self.block_q if total.shape[2] > 1 else 0, j * self.block_kv if total.shape[3] > 1 else 0
        at = [jnp.int32(start) for start in at]
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, x.shape) + x, at)

    def join_pairs(self, x: Array, like: Array) -> Array:
        """What add_pairs has summed, without the padding."""
        return x[:, :, : like.shape[2], : like.shape[3]].astype(like.dtype)

    def hide(self, visible: Array | None, at: Pairs, queries, keys):
        """The rows and columns of one tile, zero where no pair of the tile is visible: a NaN there reaches nobody."""
        if visible is None:
            return queries, keys
        seeing, seen = visible.any(axis=1), (visible & (at.i < self.q_len)).any(axis=0)  # a padded row sees nothing
        keep = lambda seen, xs: tuple(jnp.where(seen[:, None], x, 0) for x in xs)
        return keep(seeing, queries), keep(seen, keys)

    # ------------------------------------------------------------------------------------------------- the arrays

    def cut_keys(self, x: Array) -> Array:
        """[batch, kv_len, kv_heads, width] -> [tiles, batch, kv_heads, block_kv, width]"""
        x = _pad(x, self.kv_count * self.block_kv, 0)
        return x.reshape(x.shape[0], self.kv_count, self.block_kv, *x.shape[2:]).transpose(1, 0, 3, 2, 4)

    def join_keys(self, x: Array) -> Array:
        tiles, batch, kv_heads, block, width = x.shape
        return x.transpose(1, 0, 3, 2, 4).reshape(batch, tiles * block, kv_heads, width)[:, : self.kv_len]

    def cut_queries(self, x: Array, value: float = 0) -> Array:
        """[batch, q_len, heads, width] -> [tiles, batch, kv_heads, block_q * group, width]"""
        batch, _, heads, width = x.shape
        x = _pad(x, self.q_count * self.block_q, value)
        x = x.reshape(batch, self.q_count, self.block_q, heads // self.group, self.group, width)
        return x.transpose(1, 0, 3, 2, 4, 5).reshape(self.q_count, batch, -1, self.row_count, width)

    def join_queries(self, x: Array) -> Array:
        tiles, batch, kv_heads, _, width = x.shape
        x = x.reshape(tiles, batch, kv_heads, self.block_q, self.group, width).transpose(1, 0, 3, 2, 4, 5)
        return x.reshape(batch, tiles * self.block_q, kv_heads * self.group, width)[:, : self.q_len]

    def cut_rows(self, x: Array, value: float) -> Array:
        """[batch, heads, q_len] -> [tiles, batch, kv_heads, block_q * group], the end padded with `value`"""
        return self.cut_queries(x.swapaxes(1, 2)[..., None], value)[..., 0]

    def join_rows(self, x: Array) -> Array:
        return self.join_queries(x[..., None])[..., 0].swapaxes(1, 2)


def _even(length: int, block: int) -> int:
    """The block size, at most `block`, that cuts `length` into as few tiles with the least left over."""
    return -(-length // -(-length // block))


def _pad(x: Array, length: int, value: float, axis: int = 1) -> Array:
    """An axis of x filled up to `length`."""
    short = length - x.shape[axis]
    widths = [(0, short if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if short else x


@functools.partial(jax.jit, static_argnames=("blocks", "precision"))
def online_attention(
    q: Q, k: K, v: V, score: Score, *, blocks: BlockSizes = DEFAULTS, precision: lax.PrecisionLike = None
) -> tuple[O, PerQuery]:
    """(o, lse) by online softmax over tiles of keys, with the tiled backward (Dao et al. 2022, algorithms 1 and 4).

    Shapes as in jflash.attention, batch included; Score.of() makes a score.
    """
    return attend(Online(blocks, precision), q, k, v, score)
