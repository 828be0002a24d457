"""How forward and backward are joined: the saved log-sum-exp is all that the backward needs of the forward's softmax."""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values

from jflash import derivatives, varying
from jflash.score.score import WITH_GRADIENTS, Score
from jflash.shapes import K, O, PerQuery, Q, V
from jflash.tile import Norm


@runtime_checkable  # for the tests, see shapes.py
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

    def forward(self, q: Q, k: K, v: V, score: Score, /) -> tuple[O, Norm]:
        """(o, norm)"""
        ...

    def backward(
        self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery, /
    ) -> tuple[Q | None, K | None, V | None, Score]:
        """(dq, dk, dv, dscore): dscore holds the gradients of the Score's floating-point leaves, and no others.

        Those of Score.unasked may be None.
        """
        ...


def attend(engine: Engine, q: Q, k: K, v: V, score: Score) -> tuple[O, PerQuery]:
    """(o, lse), both differentiable in q, k, v and the floating-point leaves of the score: in reverse mode, once."""
    q, k, v, score = derivatives.reverse_mode_only(varying.alike(q, k, v, score))
    return attend_jitted(engine, q, k, v, score)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(engine: Engine, q: Q, k: K, v: V, score: Score) -> tuple[O, PerQuery]:
    o, norm = derivatives.once(engine.forward)(q, k, v, score)
    return o, norm.lse(score.unit)


def _forward(engine: Engine, *primals: Any):
    q, k, v, score = custom_vjp_primal_tree_values(primals)
    o, norm = derivatives.once(engine.forward)(q, k, v, score)
    o, norm = named_for_checkpoint(o, norm)
    return (o, norm.lse(score.unit)), (q, k, v, score, o, norm, _asked(*primals))


def _backward(engine: Engine, residuals, cotangents):
    q, k, v, score, o, norm, asked = residuals
    pairs = zip(cotangents, (o, norm.log_l), strict=True)
    do, dlse = (jnp.zeros_like(primal) if isinstance(x, SymbolicZero) else x for x, primal in pairs)
    unasked = tuple(name for name, yes in zip(MAY_BE_ASKED, asked.shape, strict=True) if not yes)
    dq, dk, dv, dscore = derivatives.once(engine.backward)(q, k, v, score.replace(unasked=unasked), o, norm, do, dlse)
    return dq, dk, dv, dscore.replace(unasked=())


def named_for_checkpoint(o: O, norm: Norm) -> tuple[O, Norm]:
    """Named, so that a jax.checkpoint policy can keep them: save_only_these_names("jflash_o", "jflash_lse")."""
    return checkpoint_name(o, "jflash_o"), checkpoint_name(norm, "jflash_lse")


MAY_BE_ASKED = ("q", "k", "v", *WITH_GRADIENTS)


def _asked(q: Any, k: Any, v: Any, score: Score) -> Array:
    """Whose gradients may be asked for, as the shape of an array: 1 or 0 for each of MAY_BE_ASKED.

    It differs from trace to trace of one and the same attention, and JAX gives the backward the tree of the residuals of
    whichever trace was the last (jax#16614). So nothing of it may stand in the tree; but each array keeps its own shape.
    """
    named = {"q": q, "k": k, "v": v} | {name: getattr(score, name) for name in WITH_GRADIENTS}
    leaves = functools.partial(jax.tree.leaves, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    return jnp.zeros([int(any(leaf.perturbed for leaf in leaves(named[name]))) for name in MAY_BE_ASKED], jnp.int8)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)
attend_jitted = jax.jit(_attend, static_argnums=0)  # so that a call outside of jit compiles once, not operation by operation
