"""The dQ kernel: one program a q tile of one head, with a loop over the kv tiles that it sees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash.kernels import memory
from jflash.kernels.inputs import Inputs, Loader, Widths, terms
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Matrix, Place
from jflash.score import ranges
from jflash.score.ranges import Span
from jflash.shapes import Q


def dq(inputs: Inputs, launcher: Launcher) -> Q:
    """dq, shaped like q; its tangent, where the inputs move."""
    q, _, v = inputs[:3]
    batch, q_len, heads, _ = q.shape
    group = heads // v.shape[2]
    q_head = lambda i, h, b: (b, h)
    kv_head = lambda i, h, b: (b, h // group)
    queries = lambda x: memory.matrix_spec(x, None, q_head)
    specs = inputs.map(
        queries,
        lambda x: memory.matrix_spec(x, None, kv_head),
        lambda _: memory.vector_spec(q_len, None, q_head),
        lambda score: memory.score_spec(score, None, q_head, kv_head),
    )
    (dq,) = launcher.call(
        functools.partial(_kernel, widths=inputs.widths),
        grid=(pl.cdiv(q_len, launcher.block_q), heads, batch),
        in_specs=[specs],
        out_specs=[queries(q)],
        out_shape=[jax.ShapeDtypeStruct(q.shape, launcher.result_dtype(q.dtype))],
        name=f"jflash_dq{inputs.suffix}",
    )(inputs)
    return dq


def _kernel(inputs: Inputs, dq_ref, *, widths: Widths, launcher: Launcher):
    place = Place(b=pl.program_id(2), h=pl.program_id(1))
    load, arith = Loader(inputs, widths), launcher.arithmetic
    scores = score, *_ = load.scores(place)
    # As in the forward: the longest rows of a causal mask start first.
    rows = Span((pl.num_programs(0) - 1 - pl.program_id(0)) * launcher.block_q, launcher.block_q)
    there = memory.inside(rows, score.q_len)
    queries = load.queries(rows, memory.seeing_queries(score, Span(0, score.kv_len), rows))
    known_of_rows = load.rows(rows, there, axis=1)

    def visit(j, dq, masked):
        cols = Span(j * launcher.block_kv, launcher.block_kv)
        tile_scores, at = memory.tiles_of(scores, rows, cols, place)
        visible = tile_scores[0].visible(at) if masked else None
        keys = load.keys(cols, memory.seen_keys(score, rows, cols) if masked else None)
        for c, x in terms(queries, keys, known_of_rows, tile_scores, at, visible, arith):
            dq = arith.add_product(dq, c.operands.qk, x.k)
        return dq

    dq = tuple(jnp.zeros((rows.size, chunk), jnp.float32) for chunk in memory.chunks(widths.head_dim, inputs.q.dtype))
    dq = ranges.over(ranges.kv_tiles(score, rows, launcher.block_kv), visit, dq)
    rows = launcher.again(rows)
    there = memory.inside(rows, score.q_len)
    Matrix(dq_ref, widths.head_dim, like=inputs.q.dtype).store(rows, there, tuple(x * score.unit for x in dq))
