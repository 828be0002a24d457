"""How forward and backward are joined: the saved log-sum-exp is all that the backward needs of the forward's softmax."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jflash import derivatives, varying
from jflash.score import Score


class Engine(Protocol):
    """Something that computes attention and its gradient. Hashable: it is a static argument of custom_vjp."""

    def for_parts(self) -> Engine:
        """The same engine, but o, dq, dk and dv stay in the dtype that they are summed in, float32 (float64 for float64).

        For one who sums them over several calls, each with a part of the keys: that rounds once, at the end.
        """
        ...

    def result_dtype(self, dtype: Any) -> Any:
        """The dtype of o, dq, dk and dv where q has `dtype`."""
        ...

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
    q, k, v, score = derivatives.reverse_mode_only(varying.alike(q, k, v, score))
    return attend_jitted(engine, q, k, v, score)


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
attend_jitted = jax.jit(_attend, static_argnums=0)  # so that a call outside of jit compiles once, not operation by operation
