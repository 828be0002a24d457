"""The preprocess of the backward: what each row contributes to it, once, before the other kernels read it many times."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import tile
from jflash.kernels import memory
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Matrix, Vector
from jflash.ranges import Span
from jflash.shapes import O, PerQuery


def delta(o: O, do: O, lse: PerQuery, dlse: PerQuery, launcher: Launcher) -> tuple[PerQuery, PerQuery]:
    """(lse2, delta), both float32: see tile.delta."""
    batch, q_len, heads, v_dim = o.shape
    head = lambda i, h, b: (b, h)
    matrix, vector = memory.matrix_spec(o, None, head), memory.vector_spec(q_len, None, head)
    return launcher.call(
        functools.partial(_kernel, q_len=q_len, v_dim=v_dim),
        grid=(pl.cdiv(q_len, launcher.block_q), heads, batch),
        in_specs=[matrix, matrix, vector, vector],
        out_specs=[vector, vector],
        out_shape=[jax.ShapeDtypeStruct(lse.shape, jnp.float32)] * 2,
        name="jflash_delta",
    )(o, do, lse, dlse)


def _kernel(o_ref, do_ref, lse_ref, dlse_ref, lse2_ref, delta_ref, *, q_len: int, v_dim: int, launcher: Launcher):
    rows = Span(pl.program_id(0) * launcher.block_q, launcher.block_q)
    there = memory.inside(rows, q_len)
    o, do = Matrix(o_ref, v_dim).load(rows, there), Matrix(do_ref, v_dim).load(rows, there)
    lse, dlse = Vector(lse_ref).load(rows, there, 0), Vector(dlse_ref).load(rows, there, 0)
    lse2, delta = tile.delta(o, do, lse, dlse)
    Vector(lse2_ref).store(rows, there, lse2)
    Vector(delta_ref).store(rows, there, delta)
