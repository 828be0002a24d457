"""The kernel of forward mode: the tangents of o and lse, one program a q tile of one head, with a loop over its kv tiles.

The forward has gone before and left the norm, so that nothing is rescaled and there is one sum as wide as v beside one number
a row: five products a tile, where a kernel that computed o and its tangent together would take six.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import tile
from jflash.kernels import memory
from jflash.kernels.inputs import Inputs, Loader, Widths
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Matrix, Place, Vector
from jflash.score import ranges
from jflash.score.ranges import Span
from jflash.shapes import O, PerQuery
from jflash.tile import Norm, Rows


def tangent(inputs: Inputs, o: O, norm: Norm, start: tuple[PerQuery, PerQuery] | None, launcher: Launcher):
    """(ot, lset) of inputs that move; they need no do and no rows. `start`: tile.sinks_tangent(), where there are sinks."""
    q, _, v = inputs[:3]
    batch, q_len, heads, _ = q.shape
    group = heads // v.shape[2]
    q_head = lambda i, h, b: (b, h)
    kv_head = lambda i, h, b: (b, h // group)
    queries, vector = lambda x: memory.matrix_spec(x, None, q_head), memory.vector_spec(q_len, None, q_head)
    specs = inputs.map(
        queries,
        lambda x: memory.matrix_spec(x, None, kv_head),
        lambda _: vector,
        lambda score: memory.score_spec(score, None, q_head, kv_head),
    )
    of_o, of_lse = (
        jax.ShapeDtypeStruct(o.shape, launcher.result_dtype(q.dtype)),
        jax.ShapeDtypeStruct(norm.m.shape, norm.m.dtype),
    )
    ot, lset = launcher.call(
        functools.partial(_kernel, widths=inputs.widths),
        grid=(pl.cdiv(q_len, launcher.block_q), heads, batch),
        in_specs=[specs, queries(o), Norm(vector, vector), None if start is None else (vector, vector)],
        out_specs=[queries(o), vector],
        out_shape=[of_o, of_lse],
        name="jflash_tangent",
    )(inputs, o, norm, start)
    return ot, lset


def _kernel(inputs: Inputs, o_ref, norm_refs: Norm, start_refs, ot_ref, lset_ref, *, widths: Widths, launcher: Launcher):
    place = Place(b=pl.program_id(2), h=pl.program_id(1))
    load, arith = Loader(inputs, widths), launcher.arithmetic
    scores = score, _ = load.scores(place)
    # As in the forward: the longest rows of a causal mask start first.
    rows = Span((pl.num_programs(0) - 1 - pl.program_id(0)) * launcher.block_q, launcher.block_q)
    there = memory.inside(rows, score.q_len)
    (q, _), (qt, _) = load.queries(rows, memory.seeing_queries(score, Span(0, score.kv_len), rows))
    norm = Norm(*(Vector(ref).load(rows, there, other) for ref, other in zip(norm_refs, (0, jnp.inf), strict=True)))
    known_of_rows = Rows.of(norm, score.slope, split=not score.plain).map(lambda x: x[:, None])

    def visit(j, state, masked):
        cols = Span(j * launcher.block_kv, launcher.block_kv)
        (tile_score, score_t), at = memory.tiles_of(scores, rows, cols, place)
        visible = tile_score.visible(at) if masked else None
        (k, v), (kt, vt) = load.keys(cols, memory.seen_keys(score, rows, cols) if masked else None)
        qk, qkt = arith.inner(q, k), tile.product_tangent(arith.inner, q, qt, k, kt)
        return tile.tangent(state, qk, qkt, v, vt, known_of_rows, tile_score, score_t, at, visible, arith)

    zeros = lambda *shape: jnp.zeros((rows.size, *shape), jnp.float32)
    l, lset = (zeros(), zeros()) if start_refs is None else (Vector(ref).load(rows, there, 0) for ref in start_refs)
    l = l if known_of_rows.top is None else None
    state = tile.Moments(l, lset, tuple(map(zeros, memory.chunks(widths.v_dim, inputs.v.dtype))))
    state = ranges.over(ranges.kv_tiles(score, rows, launcher.block_kv), visit, state)
    rows = launcher.again(rows)
    there = memory.inside(rows, score.q_len)
    ot, lset = tile.finish_tangent(state, Matrix(o_ref, widths.v_dim, like=inputs.v.dtype).load(rows, there))
    Matrix(ot_ref, widths.v_dim, like=inputs.v.dtype).store(rows, there, ot)
    Vector(lset_ref).store(rows, there, lset)
