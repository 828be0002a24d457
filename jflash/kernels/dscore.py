"""The gradients of the Score's own arrays, or their tangents: of the bias, and of what score_fn reads.

Both compute the tiles of ds anew and sum them, in a fixed order, into what is no larger than the array itself, or a copy of it
for each of several programs (bias), or than one copy of it for each q tile (score_args).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jflash.kernels import memory
from jflash.kernels.inputs import Inputs, Loader, Widths, terms
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Place
from jflash.score import ranges
from jflash.score.ranges import Index, Span
from jflash.score.score import Operands, Pairs, Score

# As many as keep the largest GPU at work that is compiled for, with 188 multiprocessors: two for each. It is the same for all
# of them, and so is the order of the sums.
PROGRAMS = 2 * 188


def dbias(inputs: Inputs, launcher: Launcher) -> Array:
    """The gradient of the bias, shaped like it.

    A dimension that the bias has is cut into tiles; one that it lacks (size 1) is summed over. Where its tiles alone are too
    few to fill a GPU, what is summed for each is divided among several programs, as evenly as it goes, and their sums are
    added up in order: less than 2 * PROGRAMS tiles of float32.
    """
    bias, tiles = inputs.score.bias, _BiasTiles.of(inputs, launcher)
    shape = tiles.parts * bias.shape[0], *bias.shape[1:]
    (result,) = launcher.call(
        functools.partial(_dbias_kernel, widths=inputs.widths, tiles=tiles),
        grid=(tiles.rows * tiles.cols * tiles.parts, bias.shape[1], bias.shape[0]),
        in_specs=[inputs.specs],
        out_specs=[pl.BlockSpec(shape, lambda *grid: (0, 0, 0, 0))],
        out_shape=[jax.ShapeDtypeStruct(shape, bias.dtype if tiles.parts == 1 else jnp.float32)],
        name=f"jflash_dbias{inputs.suffix}",
    )(inputs)
    if tiles.parts == 1:
        return result
    return jnp.sum(result.reshape(tiles.parts, *bias.shape), axis=0).astype(bias.dtype)


class _BiasTiles(NamedTuple):
    """How a bias is cut into tiles, and over what a tile's gradient is summed: (batch elements, heads, q tiles)."""

    rows: int
    cols: int
    summed: tuple[int, int, int]  # 1 for those that a tile is of
    share: int  # how much of that one program sums

    @classmethod
    def of(cls, inputs: Inputs, launcher: Launcher) -> _BiasTiles:
        shape = inputs.score.bias.shape
        batch, q_len, heads, _ = inputs.q.shape
        rows, cols = pl.cdiv(shape[2], launcher.block_q), pl.cdiv(shape[3], launcher.block_kv)
        counts = batch, heads, pl.cdiv(q_len, launcher.block_q)
        b, h, i = (n if size == 1 else 1 for n, size in zip(counts, shape, strict=False))
        summed = b, h, i
        parts = min(pl.cdiv(PROGRAMS, rows * cols * shape[0] * shape[1]), math.prod(summed))
        return cls(rows, cols, summed, pl.cdiv(math.prod(summed), parts))

    @property
    def parts(self) -> int:
        """Among how many programs the sum is divided."""
        return pl.cdiv(math.prod(self.summed), self.share)

    def place(self, n: Index, own: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
        """(batch element, head, q tile) of number n of a sum, of the tile that is itself at `own`."""
        _, heads, q_tiles = (jnp.int32(count) for count in self.summed)
        numbers = lax.div(n, heads * q_tiles), lax.rem(lax.div(n, q_tiles), heads), lax.rem(n, q_tiles)
        b, h, i = (x if count == 1 else y for x, y, count in zip(own, numbers, self.summed, strict=True))
        return b, h, i


def _dbias_kernel(inputs: Inputs, dbias_ref, *, widths: Widths, tiles: _BiasTiles, launcher: Launcher):
    t = pl.program_id(0)
    part, t = lax.div(t, jnp.int32(tiles.rows * tiles.cols)), lax.rem(t, jnp.int32(tiles.rows * tiles.cols))
    b, h = pl.program_id(2), pl.program_id(1)
    i, j = lax.div(t, jnp.int32(tiles.cols)), lax.rem(t, jnp.int32(tiles.cols))
    over = tuple(axis for axis in (0, 1) if dbias_ref.shape[2 + axis] == 1)

    def visit_row(n, total):
        b_n, h_n, i_n = tiles.place(n, (b, h, i))
        place, rows = Place(b_n, h_n, b_n, h_n), Span(i_n * launcher.block_q, launcher.block_q)
        score = memory.score_at(inputs.score, place)
        row = ranges.kv_tiles(score, rows, launcher.block_kv)

        def visit(j, total, masked=True):
            cols = Span(j * launcher.block_kv, launcher.block_kv)
            operands, _, _ = _cotangents(inputs, place, rows, cols, widths, launcher)
            ds: Any = operands.bias
            return total + jnp.sum(ds, axis=over, keepdims=True) if over else total + ds

        if 1 in over:
            return ranges.over(row, visit, total)
        return lax.fori_loop(0, jnp.minimum(row.state(j), 1), lambda _, total: visit(j, total), total)

    rows, cols = Span(i * launcher.block_q, launcher.block_q), Span(j * launcher.block_kv, launcher.block_kv)
    rows, cols = (Span(0, 1) if axis in over else span for axis, span in enumerate((rows, cols)))
    first = part * tiles.share
    last = jnp.minimum(first + tiles.share, math.prod(tiles.summed))
    total = lax.fori_loop(first, last, visit_row, jnp.zeros((rows.size, cols.size), jnp.float32))
    batch = part * (dbias_ref.shape[0] // tiles.parts) + b
    memory.store_pairs(dbias_ref, Place(batch, h, batch, h), rows, cols, total)


def dargs(inputs: Inputs, launcher: Launcher) -> tuple[Array | None, ...]:
    """The gradients of score_args, flattened like them; None for one of integers.

    One program a q tile of one head writes its share of each, the shares are summed outside. A look-up by a number costs
    one sum a tile; one by an array of indices as many as lie between the least and the largest index of the tile.
    """
    batch, q_len, heads, _ = inputs.q.shape
    score = inputs.score
    count = pl.cdiv(q_len, launcher.block_q)
    shares = [
        jax.ShapeDtypeStruct((batch, heads, count, pl.next_power_of_2(arg.size)), jnp.float32)
        for arg, floating in zip(score.args, score.differentiable_args, strict=True)
        if floating
    ]
    results = launcher.call(
        functools.partial(_dargs_kernel, widths=inputs.widths),
        grid=(count, heads, batch),
        in_specs=[inputs.specs],
        out_specs=[pl.BlockSpec((None, None, None, x.shape[-1]), lambda i, h, b: (b, h, i, 0)) for x in shares],
        out_shape=shares,
        name=f"jflash_dargs{inputs.suffix}",
    )(inputs)
    totals = (jnp.sum(x, axis=(0, 1, 2)) for x in results)
    return tuple(
        next(totals)[: arg.size].astype(arg.dtype) if floating else None
        for arg, floating in zip(score.args, score.differentiable_args, strict=True)
    )


def _dargs_kernel(inputs: Inputs, *share_refs, widths: Widths, launcher: Launcher):
    place = Place(pl.program_id(2), pl.program_id(1), pl.program_id(2), pl.program_id(1))
    rows = Span(pl.program_id(0) * launcher.block_q, launcher.block_q)
    score = memory.score_at(inputs.score, place)
    share_of = {arg: n for n, arg in enumerate(n for n, floating in enumerate(score.differentiable_args) if floating)}

    def visit(j, shares, masked):
        cols = Span(j * launcher.block_kv, launcher.block_kv)
        operands, tile_score, at = _cotangents(inputs, place, rows, cols, widths, launcher)
        shares = list(shares)
        for (arg, index, _), ds in zip(tile_score.lookups(operands.qk, at), operands.values, strict=True):
            n = share_of[arg]
            shares[n] = shares[n] + _gathered(ds, index, shares[n].size)
        return tuple(shares)

    shares = tuple(jnp.zeros(ref.shape, jnp.float32) for ref in share_refs)
    shares = ranges.over(ranges.kv_tiles(score, rows, launcher.block_kv), visit, shares)
    for ref, share in zip(share_refs, shares, strict=True):
        plgpu.store(ref.at[...], share)


def _gathered(ds: Array, index: Array | int, size: int) -> Array:
    """[size] sums of the ds whose index is 0, 1, ..."""
    slots = lax.iota(jnp.int32, size)
    if jnp.ndim(index) == 0:
        return jnp.where(slots == index, jnp.sum(ds), 0.0)
    index = jnp.broadcast_to(index, ds.shape)

    def add_one(n, sums):
        return sums + jnp.where(slots == n, jnp.sum(jnp.where(index == n, ds, 0.0)), 0.0)

    return lax.fori_loop(jnp.min(index), jnp.max(index) + 1, add_one, jnp.zeros((size,), jnp.float32))


def _cotangents(
    inputs: Inputs, place: Place, rows: Span, cols: Span, widths: Widths, launcher: Launcher
) -> tuple[Operands, Score, Pairs]:
    """The cotangents of one tile's operands, or their tangents, the Score of the tile, and its pairs."""
    load = Loader(inputs, widths)
    heads, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
    own: dict[str, Index | None] = {"batch": place.batch, "head": place.head}
    shared = {"batch": place.batch, "head": lax.div(place.h, jnp.int32(heads // kv_heads))}
    scores = score, *_ = load.scores(place)
    tile_scores, at = memory.tiles_of(scores, rows, cols, place)
    visible = tile_scores[0].visible(at)
    seen = memory.seen_keys(score, rows, cols, shared["batch"], shared["head"])
    seeing = memory.seeing_queries(score, cols, rows, place.batch, place.head)
    queries, keys = load.queries(rows, seeing, **own), load.keys(cols, seen, **shared)
    known_of_rows = load.rows(rows, seeing, axis=1, **own)
    (cotangents, _), *_ = terms(queries, keys, known_of_rows, tile_scores, at, visible, launcher.arithmetic)
    return cotangents.operands, tile_scores[0], at
