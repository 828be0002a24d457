"""The gradients of the Score's own arrays, or their tangents: of the bias, and of what score_fn reads.

Both compute the tiles of ds anew and sum them, in a fixed order, into what is no larger than the array itself (bias) or
than one copy of it for each q tile (score_args).
"""

from __future__ import annotations

import functools
from typing import Any

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


def dbias(inputs: Inputs, launcher: Launcher) -> Array:
    """The gradient of the bias, shaped like it.

    One program a tile of it. A dimension that the bias has is cut into tiles; one that it lacks (size 1) is looped over, so
    each program sees all arrays whole.
    """
    bias = inputs.score.bias
    counts = pl.cdiv(bias.shape[2], launcher.block_q), pl.cdiv(bias.shape[3], launcher.block_kv)
    (result,) = launcher.call(
        functools.partial(_dbias_kernel, widths=inputs.widths, counts=counts),
        grid=(counts[0] * counts[1], bias.shape[1], bias.shape[0]),
        in_specs=[inputs.specs],
        out_specs=[pl.BlockSpec(bias.shape, lambda *grid: (0, 0, 0, 0))],
        out_shape=[jax.ShapeDtypeStruct(bias.shape, bias.dtype)],
        name=f"jflash_dbias{inputs.suffix}",
    )(inputs)
    return result


def _dbias_kernel(inputs: Inputs, dbias_ref, *, widths: Widths, counts: tuple[int, int], launcher: Launcher):
    batch, q_len, heads, _ = inputs.q.shape
    t = pl.program_id(0)
    across = jnp.int32(counts[1])
    own = pl.program_id(2), pl.program_id(1), lax.div(t, across), lax.rem(t, across)
    all_of = batch, heads, pl.cdiv(q_len, launcher.block_q)
    ranges_of = [
        (jnp.int32(0), jnp.int32(n)) if size == 1 else (x, x + 1)
        for x, n, size in zip(own, all_of, dbias_ref.shape, strict=False)
    ]
    batches, its_heads, its_q_tiles = ranges_of
    summed = tuple(axis for axis in (0, 1) if dbias_ref.shape[2 + axis] == 1)

    def visit_batch(b, total):
        return lax.fori_loop(*its_heads, functools.partial(visit_head, b), total)

    def visit_head(b, h, total):
        return lax.fori_loop(*its_q_tiles, functools.partial(visit_row, b, h), total)

    def visit_row(b, h, i, total):
        place, rows = Place(b, h, b, h), Span(i * launcher.block_q, launcher.block_q)
        score = memory.score_at(inputs.score, place)
        tiles = ranges.kv_tiles(score, rows, launcher.block_kv)

        def visit(j, total, masked=True):
            cols = Span(j * launcher.block_kv, launcher.block_kv)
            operands, _, _ = _cotangents(inputs, place, rows, cols, widths, launcher)
            ds: Any = operands.bias
            return total + jnp.sum(ds, axis=summed, keepdims=True) if summed else total + ds

        if 1 in summed:
            return ranges.over(tiles, visit, total)
        return lax.fori_loop(0, jnp.minimum(tiles.state(own[3]), 1), lambda _, total: visit(own[3], total), total)

    rows, cols = Span(own[2] * launcher.block_q, launcher.block_q), Span(own[3] * launcher.block_kv, launcher.block_kv)
    rows, cols = (Span(0, 1) if axis in summed else span for axis, span in enumerate((rows, cols)))
    total = lax.fori_loop(*batches, visit_batch, jnp.zeros((rows.size, cols.size), jnp.float32))
    memory.store_pairs(dbias_ref, Place(own[0], own[1], own[0], own[1]), rows, cols, total)


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
