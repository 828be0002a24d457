"""Which keys some query sees, and which queries see some key, where bounds do not tell: what other kernels may load.

What no query sees may hold anything, and a NaN there would pass through a product with p = 0. Whether it is seen takes a
look at its pairs, but only at those of tiles that are visited and have a mask, without their products.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jflash.kernels import memory
from jflash.kernels.launch import Launcher
from jflash.kernels.memory import Place
from jflash.launch.blocks import Launch
from jflash.score import ranges
from jflash.score.ranges import Span
from jflash.score.score import OF_VISIBILITY, Score
from jflash.score.visits import Cut, with_kv_visits, with_q_visits
from jflash.shapes import K, Q

BLOCK = 64  # small: there is little to do in a tile, and the fewer pairs it has the more often none of them need a look


def with_reach(score: Score, q: Q, k: K, interpret: bool, queries: bool = True) -> Score:
    """`score` with key_seen, int8 [batch, kv_heads, kv_len], and, if `queries`, query_sees, int8 [batch, heads, q_len]."""
    if score.banded:
        return score
    launcher = Launcher(Launch(BLOCK, BLOCK, num_warps=4, num_stages=1), interpret=interpret)
    cut = Cut(q.shape[0], q.shape[2], BLOCK, BLOCK)
    whole = lambda x, of: jnp.broadcast_to(x, (of.shape[0], of.shape[2], of.shape[1]))
    by_keys, by_queries = with_q_visits(score, cut, k.shape[2]), with_kv_visits(score, cut)
    group = 1 if by_queries.visits.shape[1] == 1 else q.shape[2] // k.shape[2]  # 1 where all query heads see the same
    key_seen = whole(_reached(by_keys, group, launcher, k.shape[1], keys=True), k)
    if not queries:
        return score.replace(key_seen=key_seen)
    query_sees = _reached(by_queries, 1, launcher, q.shape[1], keys=False)
    return score.replace(key_seen=key_seen, query_sees=whole(query_sees, q))


def _reached(score: Score, group: int, launcher: Launcher, length: int, keys: bool):
    """int8 [batch or 1, heads or 1, length]: one program a tile, of each batch element and head that differ."""
    batch, heads, tiles, _ = score.visits.shape
    score = score.only(*OF_VISIBILITY)
    side_by_side = group if group > 1 else None
    head = lambda t, h, b: (b, h)
    return launcher.call(
        functools.partial(_kernel, group=group, keys=keys),
        grid=(tiles, heads, batch),
        in_specs=[memory.score_spec(score, side_by_side, head, head)],
        out_specs=memory.vector_spec(length, None, head),
        out_shape=jax.ShapeDtypeStruct((batch, heads, length), jnp.int8),
        name="jflash_key_seen" if keys else "jflash_query_sees",
    )(score)


def _kernel(score_ref: Score, reached_ref, *, group: int, keys: bool, launcher: Launcher):
    t, head, batch = (pl.program_id(n) for n in range(3))
    score = memory.score_at(score_ref, Place(batch, head))
    own = Span(t * BLOCK, BLOCK)
    tiles = (ranges.q_tiles if keys else ranges.kv_tiles)(score, own, BLOCK)

    def visit(other, reached, masked):
        if not masked:
            return jnp.ones_like(reached)
        rows, cols = (Span(other * BLOCK, BLOCK), own) if keys else (own, Span(other * BLOCK, BLOCK))
        for n in range(group):
            place = Place(batch, head * group + n, head=None if group == 1 else jnp.int32(n))
            tile_score, at = memory.tile_of(score, rows, cols, place)
            visible = jnp.broadcast_to(tile_score.visible(at), (BLOCK, BLOCK))
            reached = jnp.maximum(reached, jnp.max(visible.astype(jnp.int32), axis=0 if keys else 1))
        return reached

    reached = ranges.over(tiles, visit, jnp.zeros((BLOCK,), jnp.int32))
    length = score.kv_len if keys else score.q_len
    plgpu.store(reached_ref.at[pl.ds(own.start, BLOCK)], reached.astype(jnp.int8), mask=memory.inside(own, length))
