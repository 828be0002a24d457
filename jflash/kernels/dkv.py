"""The dK/dV kernel: one program a kv tile of one kv head, with a loop over its query heads and the q tiles that see it.

Where head_dim is so large that the sums of dk and of dv do not fit into registers together, dk and dv are launched apart:
five products a tile for four, which is less than a kernel loses that spills, or whose tiles are too small for wgmma.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jflash.kernels import memory
from jflash.kernels.inputs import Inputs, Loader, Widths, terms
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Matrix, Place
from jflash.score import ranges
from jflash.score.ranges import Span

PARTS = {"dkv": ("dk", "dv"), "dk": ("dk",), "dv": ("dv",)}  # what the kernels of these names compute


def dkv(inputs: Inputs, launcher: Launcher, kernel: str = "dkv") -> dict[str, Array]:
    """{"dk": dk, "dv": dv}, shaped like k and v, or one of them; their tangents, where the inputs move.

    `kernel` is one of PARTS. The heads of a group are summed in the float32 accumulator.
    """
    q, k, v = inputs[:3]
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads, _ = v.shape[1:]
    group = heads // kv_heads
    side_by_side = group if group > 1 else None
    kv_head = lambda j, h, b: (b, h)
    keys = lambda x: memory.matrix_spec(x, None, kv_head)
    specs = inputs.map(
        lambda x: memory.matrix_spec(x, side_by_side, kv_head),
        keys,
        lambda _: memory.vector_spec(q_len, side_by_side, kv_head),
        lambda score: memory.score_spec(score, side_by_side, kv_head, kv_head),
    )
    result, dtype = {"dk": k, "dv": v}, launcher.result_dtype(k.dtype)
    grads = launcher.call(
        functools.partial(_kernel, widths=inputs.widths, group=group),
        grid=(pl.cdiv(kv_len, launcher.block_kv), kv_heads, batch),
        in_specs=[specs],
        out_specs=[{part: keys(result[part]) for part in PARTS[kernel]}],
        out_shape=[{part: jax.ShapeDtypeStruct(result[part].shape, dtype) for part in PARTS[kernel]}],
        name=f"jflash_{kernel}{inputs.suffix}",
    )(inputs)
    return grads[0]


def _kernel(inputs: Inputs, grad_refs: dict[str, Any], *, widths: Widths, group: int, launcher: Launcher):
    batch, kv_head = pl.program_id(2), pl.program_id(1)
    load, arith = Loader(inputs, widths), launcher.arithmetic
    scores = score, *_ = load.scores(Place(batch, kv_head))
    cols = Span(pl.program_id(0) * launcher.block_kv, launcher.block_kv)
    keys = load.keys(cols, memory.seen_keys(score, Span(0, score.q_len), cols))
    heads_of_group = jnp.int32(group)

    def visit(n, grads, part):
        n = jnp.asarray(n, jnp.int32)  # an int64 where both bounds are Python ints, in 64-bit mode
        n, head = (n, None) if group == 1 else (lax.div(n, heads_of_group), lax.rem(n, heads_of_group))
        rows, masked = Span(part.tile(n) * launcher.block_q, launcher.block_q), part.masked
        # Keys run down and queries across: p and dqk then enter their products from registers, as they are.
        place = Place(batch, kv_head * group + (0 if head is None else head), head=head)
        tile_scores, at = memory.tiles_of(scores, rows, cols, place, across=True)
        visible = tile_scores[0].visible(at) if masked else None
        seeing = memory.seeing_queries(score, cols, rows, head=head) if masked else None
        queries, known = load.queries(rows, seeing, head=head), load.rows(rows, seeing, axis=0, head=head)
        for c, x in terms(queries, keys, known, tile_scores, at, visible, arith, across=True):
            factors = {"dk": (c.operands.qk, x.q), "dv": (c.p, x.do)}  # what only the other one needs, the compiler leaves out
            grads = {part: arith.add_product(grad, *factors[part]) for part, grad in grads.items()}
        return grads

    of_part = {"dk": widths.head_dim, "dv": widths.v_dim}
    zeros = lambda width: tuple(jnp.zeros((cols.size, chunk), jnp.float32) for chunk in memory.chunks(width, inputs.q.dtype))
    grads = {part: zeros(of_part[part]) for part in grad_refs}
    # One loop over q tiles and, within each, the heads of the group: a loop around another would hold more in registers.
    for part in ranges.q_tiles(score, cols, launcher.block_q).segments():
        grads = lax.fori_loop(part.lo * group, part.hi * group, functools.partial(visit, part=part), grads)
    cols = launcher.again(cols)
    there = memory.inside(cols, score.kv_len)
    units = {"dk": score.unit, "dv": 1}
    for part, ref in grad_refs.items():
        Matrix(ref, of_part[part], like=inputs.k.dtype).store(cols, there, tuple(x * units[part] for x in grads[part]))
