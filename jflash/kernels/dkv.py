"""The dK/dV kernel: one program a kv tile of one kv head, with a loop over its query heads and the q tiles that see it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jflash import numerics, ranges, tile
from jflash.kernels import memory
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Matrix, Place, Vector
from jflash.ranges import Span
from jflash.score import Score


def dkv(
    q: Array, k: Array, v: Array, do: Array, lse2: Array, delta: Array, score: Score, launcher: Launcher
) -> tuple[Array, Array]:
    """(dk, dv), shaped like k and v. The heads of a group are summed in the float32 accumulator."""
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads, v_dim = v.shape[1:]
    group = heads // kv_heads
    side_by_side = group if group > 1 else None
    kv_head = lambda j, h, b: (b, h)
    keys = memory.matrix_spec(k, None, kv_head)
    values = memory.matrix_spec(v, None, kv_head)
    return launcher.call(
        functools.partial(_kernel, head_dim=head_dim, v_dim=v_dim, group=group),
        grid=(pl.cdiv(kv_len, launcher.block_kv), kv_heads, batch),
        in_specs=[
            memory.matrix_spec(q, side_by_side, kv_head),
            keys,
            values,
            memory.matrix_spec(do, side_by_side, kv_head),
            memory.vector_spec(q_len, side_by_side, kv_head),
            memory.vector_spec(q_len, side_by_side, kv_head),
            memory.score_spec(score, side_by_side, kv_head, kv_head),
        ],
        out_specs=[keys, values],
        out_shape=[jax.ShapeDtypeStruct(x.shape, launcher.result_dtype(x.dtype)) for x in (k, v)],
        name="jflash_dkv",
    )(q, k, v, do, lse2, delta, score)


def _kernel(
    q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, score_ref, dk_ref, dv_ref, *,
    head_dim: int, v_dim: int, group: int, launcher: Launcher,
):  # fmt: skip
    batch, kv_head = pl.program_id(2), pl.program_id(1)
    score, arith = memory.score_at(score_ref, Place(batch, kv_head)), launcher.arithmetic
    cols = Span(pl.program_id(0) * launcher.block_kv, launcher.block_kv)
    there = memory.inside(cols, score.kv_len)
    seen = memory.seen_keys(score, Span(0, score.q_len), cols)
    k, v = Matrix(k_ref, head_dim).load(cols, seen), Matrix(v_ref, v_dim).load(cols, seen)

    def visit(i, grads, head, masked):
        dk, dv = grads
        rows = Span(i * launcher.block_q, launcher.block_q)
        # Keys run down and queries across: p and dqk then enter their products from registers, as they are.
        place = Place(batch, kv_head * group + (0 if head is None else head), head=head)
        tile_score, at = memory.tile_of(score, rows, cols, place, across=True)
        visible = tile_score.visible(at) if masked else None
        seeing = memory.seeing_queries(score, cols, rows, head=head) if masked else None
        q, do = Matrix(q_ref, head_dim, head=head).load(rows, seeing), Matrix(do_ref, v_dim, head=head).load(rows, seeing)
        lse2 = Vector(lse2_ref, head=head).load(rows, seeing, jnp.inf)  # p = 0 in a row that is not there
        delta = Vector(delta_ref, head=head).load(rows, seeing, 0)
        qk, dp = arith.inner(k, q), arith.inner(v, do)
        p, operands = tile.backward(qk, dp, lse2[None, :], delta[None, :], tile_score, at, visible, arith)
        return numerics.add(dk, arith.combine(operands.qk, q)), numerics.add(dv, arith.combine(p, do))

    def visit_head(head, grads):
        for lo, hi, masked in ranges.q_tiles(score, cols, launcher.block_q).segments():
            grads = lax.fori_loop(lo, hi, functools.partial(visit, head=head, masked=masked), grads)
        return grads

    zeros = lambda width: tuple(jnp.zeros((cols.size, chunk), jnp.float32) for chunk in memory.chunks(width, q_ref.dtype))
    grads = (zeros(head_dim), zeros(v_dim))
    dk, dv = visit_head(None, grads) if group == 1 else lax.fori_loop(0, group, visit_head, grads)
    Matrix(dk_ref, head_dim, like=q_ref.dtype).store(cols, there, tuple(x * score.unit for x in dk))
    Matrix(dv_ref, v_dim, like=q_ref.dtype).store(cols, there, dv)
