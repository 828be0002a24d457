"""How forward and backward are joined: the saved log-sum-exp is all that the backward needs of the forward's softmax."""

from __future__ import annotations

import functools
from typing import Protocol

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jflash import derivatives
from jflash.score import Score


class Engine(Protocol):
    """Something that computes attention and its gradient. Hashable: it is a static argument of custom_vjp."""

    def forward(self, q: Array, k: Array, v: Array, score: Score, /) -> tuple[Array, Array]:
        """(o, lse)"""
        ...

    def backward(
        self, q: Array, k: Array, v: Array, score: Score, o: Array, lse: Array, do: Array, dlse: Array, /
    ) -> tuple[Array, Array, Array, Score]:
        """(dq, dk, dv, dscore): dscore holds the gradients of the Score's floating-point leaves, and no others."""
        ...


def attend(engine: Engine, q: Array, k: Array, v: Array, score: Score) -> tuple[Array, Array]:
    """(o, lse), both differentiable in q, k, v and the floating-point leaves of the score: in reverse mode, once."""
    q, k, v, score = derivatives.reverse_mode_only(varying_alike((q, k, v, score)))
    return _attend_jitted(engine, q, k, v, score)


def varying_alike(arrays):
    """Inside jax.shard_map, what is the same on some devices as if it were not: its gradient is then summed over them."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)]
    missing = lambda x: frozenset().union(*axes) - jax.typeof(x).manual_axis_type.varying
    return jax.tree.map(lambda x: lax.pcast(x, tuple(missing(x)), to="varying") if missing(x) else x, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(engine: Engine, q: Array, k: Array, v: Array, score: Score) -> tuple[Array, Array]:
    return derivatives.once(engine.forward)(q, k, v, score)


def _forward(engine: Engine, q: Array, k: Array, v: Array, score: Score):
    o, lse = derivatives.once(engine.forward)(q, k, v, score)
    # Named, so that a jax.checkpoint policy can keep them: save_only_these_names("jflash_o", "jflash_lse").
    o, lse = checkpoint_name(o, "jflash_o"), checkpoint_name(lse, "jflash_lse")
    return (o, lse), (q, k, v, score, o, lse)


def _backward(engine: Engine, residuals, cotangents):
    return derivatives.once(engine.backward)(*residuals, *cotangents)


_attend.defvjp(_forward, _backward)
_attend_jitted = jax.jit(_attend, static_argnums=0)  # so that a call outside of jit compiles once, not operation by operation
