"""Ring attention: exact attention over sequences that are split across devices, on JAX's own collectives.

Each device keeps its queries. Keys and values travel round the ring, one device further at each step, and what a device
makes of each visit is merged by its log-sum-exp. In the backward they travel again, and what each device adds to their
gradients travels with them. While one step is computed, the keys of the next are on their way.
Sources: Liu et al. 2023 (Ring Attention, arXiv:2310.01889); zigzag order: see zigzag.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jflash import numerics, tile, varying
from jflash.derivatives import Engine, named_for_checkpoint
from jflash.merge import merged
from jflash.numerics import accumulator
from jflash.reference.online import rows_of, unseen
from jflash.score import visits
from jflash.score.score import Score
from jflash.shapes import K, O, PerQuery, Q, V
from jflash.tile import Norm


class Keys(NamedTuple):
    """One chunk of keys: what travels."""

    k: K
    v: V
    segments: Array | None


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices of a ring, how the sequence is dealt out to them, and what computes attention on each."""

    axis: Hashable
    size: int
    chunks: int
    engine: Engine

    def cut(self, x: Array | None, axis: int = 1) -> list[Any]:
        """The chunks of an array of this device's tokens."""
        return [None] * self.chunks if x is None else jnp.split(x, self.chunks, axis)

    def cut_keys(self, k: K, v: V, score: Score) -> tuple[Keys, ...]:
        return tuple(map(Keys, self.cut(k), self.cut(v), self.cut(score.kv_segments)))

    def shift(self, tree: Any, by: int = 1) -> Any:
        """All arrays of the tree, sent `by` devices further."""
        if by % self.size == 0:
            return tree
        return lax.ppermute(tree, self.axis, [(device, (device + by) % self.size) for device in range(self.size)])

    def offset(self, score: Score, a: int, b: int, device: Any, source: Any) -> Any:
        """Where chunk a of a device's queries begins, from the beginning of chunk b of the keys of device `source`."""
        number = lambda chunk, device: device if chunk == 0 else 2 * self.size - 1 - device  # see zigzag()
        return (number(a, device) * score.q_len - number(b, source) * score.kv_len) // self.chunks

    def plan(self, score: Score) -> tuple[int, list[tuple[int, int]]]:
        """(steps, pairs): for how many steps somebody sees the keys that travel, and the (a, b) that ever see each other."""
        device, step = np.arange(self.size), np.arange(self.size)[:, None]
        steps, pairs = 1, []
        for a, b in itertools.product(range(self.chunks), repeat=2):
            offsets = self.offset(score, a, b, device, (device - step) % self.size)
            part = self._part(score)
            seen = [x for x in np.unique(offsets) if visits.anything_visible(part.replace(static_offset=int(x)))]
            if seen:
                pairs.append((a, b))
                steps = max(steps, 1 + int(np.flatnonzero(np.isin(offsets, seen).any(axis=1))[-1]))
        return steps, pairs

    def visits(self, score: Score, keys: tuple[Keys, ...], step: Any) -> Iterator[tuple[int, int, Score]]:
        """(a, b, what of the score holds between them) of each chunk a of queries and visiting chunk b that may meet."""
        device = lax.axis_index(self.axis)
        source = (device - jnp.asarray(step, jnp.int32)) % self.size
        batch = keys[0].k.shape[0]
        for a, b in self.plan(score)[1]:
            part = self._part(score).replace(q_segments=self.cut(score.q_segments)[a], kv_segments=keys[b].segments)
            if part.left is not None or part.right is not None:
                part = part.replace(q_offset=jnp.broadcast_to(self.offset(score, a, b, device, source), (batch,)))
            yield a, b, part

    def _part(self, score: Score) -> Score:
        """The options of `score` for one chunk of queries and one of keys, without arrays."""
        return score.only().replace(q_len=score.q_len // self.chunks, kv_len=score.kv_len // self.chunks)


@functools.partial(jax.jit, static_argnums=0)
def attend(ring: Ring, q: Q, k: K, v: V, score: Score) -> tuple[O, PerQuery]:
    """(o, lse) of this device's queries, both differentiable in q, k, v and the sinks.

    Shapes as in ring_attention, batch included; all arrays vary over the ring.
    """
    return _ring(ring, q, k, v, score)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, q: Q, k: K, v: V, score: Score) -> tuple[O, PerQuery]:
    o, norm = _travel(ring, q, k, v, score)
    return o, norm.lse(score.unit)


def _travel(ring: Ring, q: Q, k: K, v: V, score: Score) -> tuple[O, Norm]:
    """(o, norm) of this device's queries, after the keys have gone round."""
    axes, dtype = varying.axes(q), accumulator(q.dtype)
    queries, keys = ring.cut(q), ring.cut_keys(k, v, score)
    steps, _ = ring.plan(score)

    def see(step, keys, states):
        for a, b, part in ring.visits(score, keys, step):

            def update(state, a=a, b=b, part=part):
                return merged(state, _forward(ring.engine, queries[a], *keys[b][:2], part), score.unit)

            states = _with(states, a, _where_seen(part, update, states[a]))
        return states

    def send_and_see(step, carry):
        keys, states = carry
        arriving = ring.shift(keys)
        return arriving, see(step, keys, states)

    start = [unseen(chunk, v, score, dtype) for chunk in queries]
    keys, states = _loop(0, steps - 1, send_and_see, (keys, varying.over(axes, tuple(start))))
    o, norm = zip(*see(steps - 1, keys, states), strict=True)
    return jnp.concatenate(o, axis=1).astype(q.dtype), jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=2), *norm)


def _ring_forward(ring: Ring, q: Array, k: Array, v: Array, score: Score):
    o, norm = named_for_checkpoint(*_travel(ring, q, k, v, score))
    return (o, norm.lse(score.unit)), (q, k, v, score, o, norm)


def _ring_backward(ring: Ring, residuals, cotangents):
    """The gradients of this device's q, k, v and sinks.

    With the norm and the o of the whole sequence, the backward of any part of the keys is that part's share of the whole. The
    sums dk and dv follow the keys one step behind: they leave when a step begins, and meet what it adds when it ends.
    """
    q, k, v, score, o, norm = residuals
    do, dlse = cotangents
    axes, dtype = varying.axes(q), accumulator(q.dtype)
    keys = ring.cut_keys(k, v, score)
    queries, rows = zip(*map(ring.cut, (q, o, do)), strict=True), zip(*(ring.cut(x, 2) for x in (*norm, dlse)), strict=True)
    arrays = [(q, o, Norm(*norm), do, dlse) for (q, o, do), (*norm, dlse) in zip(queries, rows, strict=True)]
    steps, _ = ring.plan(score)
    zeros = lambda *xs: varying.over(axes, tuple(jnp.zeros(x.shape, dtype) for x in xs))

    def see(step, keys, dq):
        dkeys = tuple(zeros(chunk.k, chunk.v) for chunk in keys)
        for a, b, part in ring.visits(score, keys, step):

            def update(sums, a=a, b=b, part=part):
                return numerics.add(sums, _backward(ring.engine, arrays[a], *keys[b][:2], part))

            sums = _where_seen(part, update, (dq[a], *dkeys[b]))
            dq, dkeys = _with(dq, a, sums[0]), _with(dkeys, b, sums[1:])
        return dq, dkeys

    def send_and_see(step, carry):
        keys, dq, dkeys = carry
        arriving = ring.shift(keys), ring.shift(dkeys)
        dq, more = see(step, keys, dq)
        return arriving[0], dq, numerics.add(arriving[1], more)

    arriving = ring.shift(keys) if steps > 1 else keys
    carry = arriving, *see(0, keys, tuple(zeros(chunk)[0] for chunk in ring.cut(q)))
    keys, dq, dkeys = _loop(1, steps - 1, send_and_see, carry)
    if steps > 1:
        arriving = ring.shift(dkeys)
        dq, more = see(steps - 1, keys, dq)
        dkeys = numerics.add(arriving, more)
    join = lambda chunks, x: jnp.concatenate(chunks, axis=1).astype(x.dtype)
    dk, dv = ring.shift([join(chunks, x) for chunks, x in zip(zip(*dkeys, strict=True), (k, v), strict=True)], 1 - steps)
    dscore = score.only()
    if score.sinks is not None:
        dscore = dscore.replace(sinks=tile.sinks_cotangent(norm, rows_of(o, do, norm, dlse, score).delta, score))
    return join(dq, q), dk, dv, dscore


_ring.defvjp(_ring_forward, _ring_backward)


# So that what is the same in several places of a program is traced once.
@functools.partial(jax.jit, static_argnums=0)
def _forward(engine: Engine, q: Q, k: K, v: V, part: Score) -> tuple[O, Norm]:
    return engine.forward(q, k, v, part)


@functools.partial(jax.jit, static_argnums=0)
def _backward(engine: Engine, rows: tuple, k: K, v: V, part: Score) -> tuple[Any, ...]:
    q, *rest = rows
    return engine.backward(q, k, v, part, *rest)[:3]


def _loop(lo: int, hi: int, body: Callable, carry: Any) -> Any:
    return lax.fori_loop(lo, hi, body, carry) if lo < hi else carry  # else the body would be compiled all the same


def _where_seen(part: Score, update: Callable, state: Any) -> Any:
    """update(state) where anything may be visible, else the state as it is; decided on each device for itself."""
    visible = visits.anything_visible(part)
    if visible is True:
        return update(state)
    return lax.cond(visible, update, lambda state: state, state)


def _with(xs: tuple, n: int, x: Any) -> tuple:
    """xs with x in place n."""
    return *xs[:n], x, *xs[n + 1 :]
