"""The dQ kernel: one program a q tile of one head, with a loop over the kv tiles that it sees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jflash import numerics, tile
from jflash.kernels import memory
from jflash.kernels.inputs import Inputs
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Matrix, Place
from jflash.score import ranges
from jflash.score.ranges import Span
from jflash.shapes import Q


def dq(inputs: Inputs, launcher: Launcher) -> Q:
    """dq, shaped like q."""
    q, k, v = inputs[:3]
    batch, q_len, heads, head_dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    group = heads // kv_heads
    q_head = lambda i, h, b: (b, h)
    kv_head = lambda i, h, b: (b, h // group)
    queries = memory.matrix_spec(q, None, q_head)
    specs = Inputs(
        queries,
        memory.matrix_spec(k, None, kv_head),
        memory.matrix_spec(v, None, kv_head),
        memory.matrix_spec(inputs.do, None, q_head),
        inputs.rows.map(lambda _: memory.vector_spec(q_len, None, q_head)),
        memory.score_spec(inputs.score, None, q_head, kv_head),
    )
    (dq,) = launcher.call(
        functools.partial(_kernel, head_dim=head_dim, v_dim=v_dim),
        grid=(pl.cdiv(q_len, launcher.block_q), heads, batch),
        in_specs=[specs],
        out_specs=[queries],
        out_shape=[jax.ShapeDtypeStruct(q.shape, launcher.result_dtype(q.dtype))],
        name="jflash_dq",
    )(inputs)
    return dq


def _kernel(inputs: Inputs, dq_ref, *, head_dim: int, v_dim: int, launcher: Launcher):
    place = Place(b=pl.program_id(2), h=pl.program_id(1))
    score, arith = memory.score_at(inputs.score, place), launcher.arithmetic
    # As in the forward: the longest rows of a causal mask start first.
    rows = Span((pl.num_programs(0) - 1 - pl.program_id(0)) * launcher.block_q, launcher.block_q)
    there = memory.inside(rows, score.q_len)
    seeing = memory.seeing_queries(score, Span(0, score.kv_len), rows)
    q, do = Matrix(inputs.q, head_dim).load(rows, seeing), Matrix(inputs.do, v_dim).load(rows, seeing)
    known_of_rows = inputs.load_rows(rows, there, axis=1)

    def visit(j, dq, masked):
        cols = Span(j * launcher.block_kv, launcher.block_kv)
        tile_score, at = memory.tile_of(score, rows, cols, place)
        visible = tile_score.visible(at) if masked else None
        seen = memory.seen_keys(score, rows, cols) if masked else None
        k, v = Matrix(inputs.k, head_dim).load(cols, seen), Matrix(inputs.v, v_dim).load(cols, seen)
        qk, dp = arith.inner(q, k), arith.inner(do, v)
        _, operands = tile.backward(qk, dp, known_of_rows, tile_score, at, visible, arith)
        return numerics.add(dq, arith.combine(operands.qk, k))

    dq = tuple(jnp.zeros((rows.size, chunk), jnp.float32) for chunk in memory.chunks(head_dim, inputs.q.dtype))
    for lo, hi, masked in ranges.kv_tiles(score, rows, launcher.block_kv).segments():
        dq = lax.fori_loop(lo, hi, functools.partial(visit, masked=masked), dq)
    rows = launcher.again(rows)
    there = memory.inside(rows, score.q_len)
    Matrix(dq_ref, head_dim, like=inputs.q.dtype).store(rows, there, tuple(x * score.unit for x in dq))
