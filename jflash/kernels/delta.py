"""The preprocess of the backward: what each row contributes to it, once, before the other kernels read it many times."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import tile
from jflash.derivatives import Tangents
from jflash.kernels import memory
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Matrix, Vector
from jflash.score.ranges import Span
from jflash.score.score import Score
from jflash.shapes import O, PerQuery
from jflash.tile import Norm, Rows, RowTangents


def rows_of(o: O, do: O, norm: Norm, dlse: PerQuery, score: Score, launcher: Launcher) -> Rows:
    """What the backward kernels must know of each row, float32 [batch, heads, q_len].

    Rows of plain logits have no top of their own: the second number costs each pair an instruction, and registers where
    queries run across.
    """
    batch, q_len, heads, v_dim = o.shape
    head = lambda i, h, b: (b, h)
    matrix, vector = memory.matrix_spec(o, None, head), memory.vector_spec(q_len, None, head)
    count = 2 if score.plain else 3
    results = launcher.call(
        functools.partial(_kernel, q_len=q_len, v_dim=v_dim, slope=score.slope, split=not score.plain),
        grid=(pl.cdiv(q_len, launcher.block_q), heads, batch),
        in_specs=[matrix, matrix, vector, vector, vector],
        out_specs=[vector] * count,
        out_shape=[jax.ShapeDtypeStruct(dlse.shape, jnp.float32)] * count,
        name="jflash_delta",
    )(o, do, *norm, dlse)
    return Rows(None, *results) if score.plain else Rows(*results)


def _kernel(o_ref, do_ref, m_ref, log_l_ref, dlse_ref, *row_refs, q_len, v_dim, slope, split, launcher: Launcher):
    rows = Span(pl.program_id(0) * launcher.block_q, launcher.block_q)
    there = memory.inside(rows, q_len)
    o, do = Matrix(o_ref, v_dim).load(rows, there), Matrix(do_ref, v_dim).load(rows, there)
    m, log_l, dlse = (Vector(ref).load(rows, there, 0) for ref in (m_ref, log_l_ref, dlse_ref))
    for ref, values in zip(row_refs, jax.tree.leaves(tile.rows(o, do, Norm(m, log_l), dlse, slope, split)), strict=True):
        Vector(ref).store(rows, there, values)


def row_tangents_of(o: O, do: O, norm: Norm, tangents: Tangents, launcher: Launcher) -> RowTangents:
    """Their tangents, float32 [batch, heads, q_len]."""
    batch, q_len, heads, v_dim = o.shape
    head = lambda i, h, b: (b, h)
    matrix, vector = memory.matrix_spec(o, None, head), memory.vector_spec(q_len, None, head)
    of = lambda spec, *xs: [None if x is None else spec for x in xs]
    (delta,) = launcher.call(
        functools.partial(_tangent_kernel, q_len=q_len, v_dim=v_dim),
        grid=(pl.cdiv(q_len, launcher.block_q), heads, batch),
        in_specs=[*of(matrix, o, tangents.o, do, tangents.do), Norm(vector, vector), *of(vector, tangents.dlse)],
        out_specs=[vector],
        out_shape=[jax.ShapeDtypeStruct(norm.m.shape, jnp.float32)],
        name="jflash_delta_tangent",
    )(o, tangents.o, do, tangents.do, norm, tangents.dlse)
    return RowTangents(tangents.lse, delta)


def _tangent_kernel(o_ref, ot_ref, do_ref, dot_ref, norm_refs, dlset_ref, delta_ref, *, q_len, v_dim, launcher: Launcher):
    rows = Span(pl.program_id(0) * launcher.block_q, launcher.block_q)
    there = memory.inside(rows, q_len)
    matrix: Any = lambda ref: None if ref is None else Matrix(ref, v_dim).load(rows, there)
    norm, dlset = jax.tree.map(lambda ref: Vector(ref).load(rows, there, 0), (norm_refs, dlset_ref))
    o, ot, do, dot = map(matrix, (o_ref, ot_ref, do_ref, dot_ref))
    Vector(delta_ref).store(rows, there, tile.delta_tangent(o, ot, do, dot, norm, dlset))
