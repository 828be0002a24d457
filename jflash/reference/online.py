"""Attention by online softmax over tiles of keys, in plain JAX: what runs where there are no kernels.

The same tile.py as in the kernels, with lax loops for the grid. Every tile covers all batch elements and all heads at
once, because a CPU's matrix product wants large operands; the query heads that share a kv head are rows of one tile.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash import numerics, ranges, tile
from jflash.blocks import DEFAULTS, BlockSizes
from jflash.numerics import Arithmetic
from jflash.ranges import Span
from jflash.score import Score
from jflash.vjp import attend

TILE_ELEMENTS = 2**20  # of one tile of logits over all batch elements and heads: 4 MiB of float32, a second-level cache


@dataclasses.dataclass(frozen=True)
class Online:
    """The engine of implementation="xla"."""

    blocks: BlockSizes = DEFAULTS
    precision: lax.PrecisionLike = None

    def forward(self, q: Array, k: Array, v: Array, score: Score) -> tuple[Array, Array]:
        layout = Layout.of(q, v, self.blocks.block_q, self.blocks.block_kv)
        k_tiles, v_tiles = layout.cut_keys(k), layout.cut_keys(v)
        dtype, arith = numerics.accumulator(q.dtype), Arithmetic(self.precision)

        def visit(j, state, q, i, masked):
            @jax.vmap  # batch
            @functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None))  # kv heads
            def one(state, q, k, v, score):
                _, (k, v) = layout.hide(score, i, j, (), (k, v)) if masked else ((), (k, v))
                rows, cols = layout.rows(i)[:, None], layout.cols(j)[None, :]
                return tile.forward(state, (q,), (k,), (v,), score, rows, cols, masked, arith)

            return one(state, q, k_tiles[j], v_tiles[j], score)

        def row_of_tiles(x):
            i, q = x
            state = tile.start(layout.row_count, (v.shape[-1],), dtype)
            state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*q.shape[:2], *leaf.shape)), state)
            tiles = ranges.for_all(lambda score: ranges.kv_tiles(score, layout.row_span(i), layout.block_kv), score)
            for lo, hi, masked in tiles.segments():
                state = lax.fori_loop(lo, hi, functools.partial(visit, q=q, i=i, masked=masked), state)
            (o,), lse = jax.vmap(jax.vmap(functools.partial(tile.finish, score=score)))(state)
            return o.astype(q.dtype), lse

        o, lse = lax.map(row_of_tiles, (jnp.arange(layout.q_count, dtype=jnp.int32), layout.cut_queries(q)))
        return layout.join_queries(o), layout.join_rows(lse)

    def backward(
        self, q: Array, k: Array, v: Array, score: Score, o: Array, lse: Array, do: Array, dlse: Array
    ) -> tuple[Array, Array, Array]:
        """(dq, dk, dv). One loop over the tiles does for all three, five products a tile."""
        layout = Layout.of(q, v, self.blocks.block_q_dkv, self.blocks.block_kv_dkv)
        dtype, arith = numerics.accumulator(q.dtype), Arithmetic(self.precision)
        row_delta = jax.vmap(jax.vmap(lambda o, do, lse, dlse: tile.delta((o,), (do,), lse, dlse), in_axes=(1, 1, 0, 0)))
        lse2, delta = row_delta(o, do, lse, dlse)
        q_tiles, do_tiles = layout.cut_queries(q), layout.cut_queries(do)
        lse2_tiles, delta_tiles = layout.cut_rows(lse2, jnp.inf), layout.cut_rows(delta, 0)  # p = 0 beyond the end

        def visit(i, grads, k, v, j, masked):
            dq_tiles, dk, dv = grads

            @jax.vmap  # batch
            @functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, 0, 0, None))  # kv heads
            def one(q, k, v, do, lse2, delta, score):
                (q, do), (k, v) = layout.hide(score, i, j, (q, do), (k, v)) if masked else ((q, do), (k, v))
                rows, cols = layout.rows(i)[:, None], layout.cols(j)[None, :]
                qk, dp = arith.inner((q,), (k,)), arith.inner((do,), (v,))
                p, dqk = tile.backward(qk, dp, lse2[:, None], delta[:, None], score, rows, cols, masked, arith)
                return arith.combine(dqk, (k,)) + arith.combine(dqk, (q,), axis=0) + arith.combine(p, (do,), axis=0)

            more_dq, more_dk, more_dv = one(q_tiles[i], k, v, do_tiles[i], lse2_tiles[i], delta_tiles[i], score)
            return dq_tiles.at[i].add(more_dq), dk + more_dk, dv + more_dv

        def column_of_tiles(dq_tiles, x):
            j, k, v = x
            grads = dq_tiles, jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
            tiles = ranges.for_all(lambda score: ranges.q_tiles(score, layout.col_span(j), layout.block_q), score)
            for lo, hi, masked in tiles.segments():
                grads = lax.fori_loop(lo, hi, functools.partial(visit, k=k, v=v, j=j, masked=masked), grads)
            dq_tiles, dk, dv = grads
            return dq_tiles, ((dk * score.unit).astype(k.dtype), dv.astype(v.dtype))

        columns = jnp.arange(layout.kv_count, dtype=jnp.int32), layout.cut_keys(k), layout.cut_keys(v)
        dq_tiles, (dk, dv) = lax.scan(column_of_tiles, jnp.zeros(q_tiles.shape, dtype), columns)
        dq = layout.join_queries((dq_tiles * score.unit).astype(q.dtype))
        return dq, layout.join_keys(dk), layout.join_keys(dv)


class Layout(NamedTuple):
    """How arrays are cut into tiles: `[tiles, batch, kv_heads, block * group, width]`, the ends padded with zeros."""

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    group: int

    @classmethod
    def of(cls, q: Array, v: Array, block_q: int | None, block_kv: int | None) -> Layout:
        batch, q_len, heads, _ = q.shape
        _, kv_len, kv_heads, _ = v.shape
        block = 1 << max(6, min(9, int(math.log2(TILE_ELEMENTS / (batch * heads)) / 2)))
        return cls(q_len, kv_len, block_q or _even(q_len, block), block_kv or _even(kv_len, block), heads // kv_heads)

    q_count = property(lambda self: -(-self.q_len // self.block_q))
    kv_count = property(lambda self: -(-self.kv_len // self.block_kv))
    row_count = property(lambda self: self.block_q * self.group)

    def row_span(self, i) -> Span:
        return Span(i * self.block_q, self.block_q)

    def col_span(self, j) -> Span:
        return Span(j * self.block_kv, self.block_kv)

    def rows(self, i) -> Array:
        """The position of each row of a tile: the heads of a group lie side by side at one position."""
        return jnp.repeat(self.row_span(i).indices(), self.group)

    def cols(self, j) -> Array:
        return self.col_span(j).indices()

    def hide(self, score: Score, i, j, queries, keys):
        """The rows and columns of one tile, zero where no pair of the tile is visible: a NaN there reaches nobody."""
        seeing = jnp.repeat(ranges.seeing_queries(score, self.col_span(j), self.row_span(i).indices()), self.group)
        seen = ranges.seen_keys(score, self.row_span(i), self.cols(j))
        keep = lambda seen, xs: tuple(jnp.where(seen[:, None], x, 0) for x in xs)
        return keep(seeing, queries), keep(seen, keys)

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


def _pad(x: Array, length: int, value: float) -> Array:
    """Axis 1 of x filled up to `length`."""
    short = length - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, short), *[(0, 0)] * (x.ndim - 2)], constant_values=value) if short else x


@functools.partial(jax.jit, static_argnames=("blocks", "precision"))
def online_attention(
    q: Array, k: Array, v: Array, score: Score, *, blocks: BlockSizes = DEFAULTS, precision=None
) -> tuple[Array, Array]:
    """(o, lse) by online softmax over tiles of keys, with the tiled backward (Dao et al. 2022, algorithms 1 and 4).

    Shapes as in jflash.attention, batch included; Score.of() makes a score.
    """
    return attend(Online(blocks, precision), q, k, v, score)
