"""The forward kernel: one program a q tile of one head, with a loop over the kv tiles that it sees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import tile
from jflash.kernels import memory
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Matrix, Place, Vector
from jflash.score import ranges
from jflash.score.ranges import Span
from jflash.score.score import Score
from jflash.shapes import K, O, Q, V
from jflash.tile import Norm


def forward(q: Q, k: K, v: V, score: Score, launcher: Launcher) -> tuple[O, Norm]:
    """(o, norm) of q, k, v: norm float32."""
    batch, q_len, heads, head_dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    group = heads // kv_heads
    o = jax.ShapeDtypeStruct((batch, q_len, heads, v_dim), launcher.result_dtype(q.dtype))
    q_head = lambda i, h, b: (b, h)
    kv_head = lambda i, h, b: (b, h // group)
    vector, one_a_row = memory.vector_spec(q_len, None, q_head), jax.ShapeDtypeStruct((batch, heads, q_len), jnp.float32)
    o, norm = launcher.call(
        functools.partial(_kernel, head_dim=head_dim, v_dim=v_dim),
        grid=(pl.cdiv(q_len, launcher.block_q), heads, batch),
        in_specs=[
            memory.matrix_spec(q, None, q_head),
            memory.matrix_spec(k, None, kv_head),
            memory.matrix_spec(v, None, kv_head),
            memory.score_spec(score, None, q_head, kv_head),
        ],
        out_specs=[memory.matrix_spec(o, None, q_head), Norm(vector, vector)],
        out_shape=[o, Norm(one_a_row, one_a_row)],
        name="jflash_forward",
    )(q, k, v, score)
    return o, norm


def _kernel(q_ref, k_ref, v_ref, score_ref, o_ref, norm_refs: Norm, *, head_dim: int, v_dim: int, launcher: Launcher):
    place = Place(b=pl.program_id(2), h=pl.program_id(1))
    score = memory.score_at(score_ref, place)
    # The last q tiles of a causal mask see the most keys: they start first, so that none is left over at the end.
    rows = Span((pl.num_programs(0) - 1 - pl.program_id(0)) * launcher.block_q, launcher.block_q)
    q = Matrix(q_ref, head_dim).load(rows, memory.inside(rows, score.q_len))

    def visit(j, state, masked):
        cols = Span(j * launcher.block_kv, launcher.block_kv)
        tile_score, at = memory.tile_of(score, rows, cols, place)
        visible = tile_score.visible(at) if masked else None
        seen = memory.seen_keys(score, rows, cols) if masked else None
        k, v = Matrix(k_ref, head_dim).load(cols, seen), Matrix(v_ref, v_dim).load(cols, seen)
        return tile.forward(state, q, k, v, tile_score, at, visible, launcher.arithmetic)

    state = tile.start(rows.size, memory.chunks(v_dim, v_ref.dtype), jnp.float32, score)
    state = ranges.over(ranges.kv_tiles(score, rows, launcher.block_kv), visit, state)
    o, norm = tile.finish(state, score, launcher.arithmetic)
    rows = launcher.again(rows)
    there = memory.inside(rows, score.q_len)
    Matrix(o_ref, v_dim, like=v_ref.dtype).store(rows, there, o)
    for ref, values in zip(norm_refs, norm, strict=True):
        Vector(ref).store(rows, there, values)
