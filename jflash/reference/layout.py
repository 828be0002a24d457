"""How whole arrays are cut into the tiles of online.py, and joined again: what the kernels' memory.py is for the kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash import numerics, tile
from jflash.score.ranges import Span
from jflash.score.score import ONE_FOR_EACH, PAIRWISE, Pairs, Score
from jflash.score.visits import Cut
from jflash.shapes import Q, V

TILE_ELEMENTS = 2**20  # of one tile of logits over all batch elements and heads: 4 MiB of float32, a second-level cache


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
    def of(cls, q: Q, v: V, block_q: int | None, block_kv: int | None) -> Layout:
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

    cut = property(lambda self: Cut(self.batch, self.kv_heads * self.group, self.block_q, self.block_kv))

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

    def for_each(self, fn: Callable, scores: tuple[Score, ...], i, j) -> Callable:
        """fn(*arrays, *scores, at), of one batch element, one kv head and tile (i, j), for arrays of all of them."""
        own = [self._tile_of(score, i, j) for score in scores]
        tables = [{"args": x.args, "mask_args": x.mask_args, "first": x.first} for x in own]  # of no batch element and no head

        def one(b, c, leaves, *arrays):
            of_group = jnp.tile(lax.iota(jnp.int32, self.group), self.block_q)
            h = c if self.group == 1 else (c * self.group + of_group)[:, None]
            rows = jnp.repeat(self.row_span(i).indices(), self.group)
            its = [score.replace(**more) for score, more in zip(leaves, tables, strict=True)]
            return fn(*arrays, *its, Pairs(b, h, rows[:, None], self.col_span(j).indices()[None, :]))

        of_batch = lambda b, *xs: jax.vmap(functools.partial(one, b))(jnp.arange(self.kv_heads, dtype=jnp.int32), *xs)
        leaves = [score.replace(args=(), mask_args=(), first=None) for score in own]
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
            return x if name in ("args", "mask_args", "first") else None

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

    def hide(self, visible: Array | None, at: Pairs, queries: Any, keys: Any) -> tuple[Any, Any]:
        """Rows and columns of one tile, zero where no pair of the tile is visible: a NaN there reaches nobody."""
        if visible is None:
            return queries, keys
        seeing, seen = visible.any(axis=1), (visible & (at.i < self.q_len)).any(axis=0)  # a padded row sees nothing
        keep = lambda seen, xs: jax.tree.map(lambda x: jnp.where(seen[:, None], x, 0), xs)
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
