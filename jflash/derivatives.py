"""How attention and its derivatives are joined: the saved norm is all that they need of the forward's softmax.

Four functions of an engine, each one pass over the tiles, make up every derivative of first and second order. With x all
inputs that have tangents, J the Jacobian of (o, lse), and H(do, dlse) the Hessian of <do, o> + <dlse, lse>, both by x:

    forward            o, norm
    tangent            J · xt                              jax.jvp
    backward           Jᵀ · (do, dlse)                     jax.grad: the transposed tangent
    backward_tangent   H(do, dlse) · xt + Jᵀ · (dot, dlset)   jax.jvp of jax.grad; since H is symmetric, also jax.grad of
                                                           jax.grad and jax.grad of jax.jvp

What is left out is the second derivative of o itself, forward over forward, and all of third order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.ad_checkpoint import checkpoint_name

from jflash import varying
from jflash.linear import Function, Map, call, linear, missing
from jflash.score.score import WITH_GRADIENTS, Score
from jflash.shapes import K, O, PerQuery, Q, V
from jflash.tile import Norm


class Tangents(NamedTuple):
    """The tangents of what a derivative is computed from; None where one is zero."""

    q: Any
    k: Any
    v: Any
    score: Score  # of its floating-point leaves
    o: Any = None
    lse: Any = None
    do: Any = None
    dlse: Any = None


@runtime_checkable  # for the tests, see shapes.py
class Engine(Protocol):
    """Something that computes attention and its derivatives. Hashable: it is a static argument."""

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

    def tangent(self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, tangents: Tangents, /) -> tuple[O, PerQuery]:
        """The tangents of (o, lse) from those of q, k, v and the score."""
        ...

    def backward_tangent(
        self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery, tangents: Tangents, /
    ) -> tuple[Q | None, K | None, V | None, Score]:
        """The tangents of what backward() gives. Those of o and lse follow from those of q, k, v and the score."""
        ...


def attend(engine: Engine, q: Q, k: K, v: V, score: Score) -> tuple[O, PerQuery]:
    """(o, lse), both differentiable in q, k, v and the floating-point leaves of the score."""
    return attend_jitted(engine, *varying.alike(q, k, v, score))


@functools.partial(jax.jit, static_argnums=0)  # so that a call outside of jit compiles once, not operation by operation
def attend_jitted(engine: Engine, q: Q, k: K, v: V, score: Score) -> tuple[O, PerQuery]:
    o, norm = call(_Forward(engine), q, k, v, score)
    return o, norm.lse(score.unit)


@dataclasses.dataclass(frozen=True)
class _Forward(Function):
    """(o, norm) of (q, k, v, score)."""

    engine: Engine

    def like(self, residuals):
        q, *_ = residuals
        return q, Norm(q, q)

    def apply(self, residuals, tangents=()):
        return self.engine.forward(*residuals)

    def named(self, results):
        return named_for_checkpoint(*results)

    def derivative(self, residuals, tangents, results):
        return _Tangent(self.engine), (*residuals, *results)


@dataclasses.dataclass(frozen=True)
class _Backward(Function):
    """The gradients of q, k, v and the score, None where nobody asks for one.

    Residuals: (q, k, v, score, o, norm, do, dlse), in which o and norm are those of the first four.
    """

    engine: Engine
    unasked: tuple[str, ...]  # see Score.unasked

    def like(self, residuals):
        q, k, v, score, *_ = residuals
        return _asked_for(self.unasked, (q, k, v, score.replace(args=score.floating_args)))

    def apply(self, residuals, tangents=()):
        q, k, v, score, *known = residuals
        return _asked_for(self.unasked, self.engine.backward(q, k, v, score.replace(unasked=self.unasked), *known))

    def derivative(self, residuals, tangents, results):
        return _BackwardTangent(self.engine, self.unasked), residuals


@dataclasses.dataclass(frozen=True)
class _Tangent(Map):
    """J, from the tangents of (q, k, v, score) to those of o and norm. Residuals: (q, k, v, score, o, norm).

    Where a row is measured from is nobody's business: all of lse's tangent is that of norm.log_l.
    """

    engine: Engine

    def like(self, residuals):
        *_, o, norm = residuals
        return o, Norm(None, norm.log_l)

    def apply(self, residuals, tangents):
        q, k, v, score, o, norm = residuals
        ot, lset = self.engine.tangent(q, k, v, score, o, norm, Tangents(*tangents))
        return ot, Norm(None, lset)

    def transpose(self, residuals, cotangents, asked):
        q, k, v, score, o, norm = residuals
        do, of_norm = cotangents
        return call(_Backward(self.engine, _unasked(asked)), q, k, v, score, o, norm, do, of_norm.log_l)

    def derivative(self, residuals, tangents, results):
        return _Curvature(self.engine), (residuals, tangents, results)


@dataclasses.dataclass(frozen=True)
class _BackwardTangent(Map):
    """From the tangents of _Backward's residuals, which are its own, to those of the gradients.

    Those of o and norm come along for what they save; they follow from the others, so transposed nothing goes to them.
    """

    engine: Engine
    unasked: tuple[str, ...]

    def like(self, residuals):
        return _Backward(self.engine, self.unasked).like(residuals)

    def apply(self, residuals, tangents):
        q, k, v, score, o, norm, do, dlse = residuals
        *xt, ot, norm_t, dot, dlset = tangents
        score = score.replace(unasked=self.unasked)
        moving = Tangents(*xt, o=ot, lse=norm_t.log_l, do=dot, dlse=dlset)
        return _asked_for(self.unasked, self.engine.backward_tangent(q, k, v, score, o, norm, do, dlse, moving))

    def transpose(self, residuals, cotangents, asked):
        ot, norm_t = linear(_Tangent(self.engine), residuals[:6], cotangents)
        gradients = None, None, None, residuals[3].only()
        if jax.tree.leaves(asked[:4]):
            again = _BackwardTangent(self.engine, _unasked(asked))
            gradients = linear(again, residuals, (*cotangents, ot, norm_t, None, None))
        return *gradients, None, Norm(None, None), ot, norm_t.log_l

    def derivative(self, residuals, tangents, results):
        return _Refused("third derivatives", self), residuals


@dataclasses.dataclass(frozen=True)
class _Curvature(Map):
    """The second derivative of o and norm by x, in two directions: xt, and that of the residuals' tangents.

    Residuals: (_Tangent's residuals, xt, _Tangent's results). There is no kernel for it, but for its product with cotangents.
    """

    engine: Engine

    def like(self, residuals):
        return _Tangent(self.engine).like(residuals[0])

    def apply(self, residuals, tangents):
        return missing(_message("forward mode over forward mode (jax.jvp of jax.jvp)"), self.like(residuals))

    def transpose(self, residuals, cotangents, asked):
        (q, k, v, score, o, norm), xt, (ot, norm_t) = residuals
        do, of_norm = cotangents
        residuals = q, k, v, score, o, norm, do, of_norm.log_l
        gradients = linear(_BackwardTangent(self.engine, _unasked(asked)), residuals, (*xt, ot, norm_t, None, None))
        return *gradients, None, Norm(None, None)

    def derivative(self, residuals, tangents, results):
        return _Refused("third derivatives", self), residuals


@dataclasses.dataclass(frozen=True)
class _Refused(Map):
    """A derivative that is not there. That it is mentioned is no error, for much of what is mentioned nobody computes."""

    what: str
    of: Map

    def like(self, residuals):
        return self.of.like(residuals)

    def apply(self, residuals, tangents):
        return missing(_message(self.what), self.like(residuals))

    def transpose(self, residuals, cotangents, asked):
        raise TypeError(_message(self.what))

    def derivative(self, residuals, tangents, results):
        return self, residuals


def _message(what: str) -> str:
    return f'jflash.attention does not have {what}: give implementation="naive", which has every derivative'


def named_for_checkpoint(o: O, norm: Norm) -> tuple[O, Norm]:
    """Named, so that a jax.checkpoint policy can keep them: save_only_these_names("jflash_o", "jflash_lse")."""
    return checkpoint_name(o, "jflash_o"), checkpoint_name(norm, "jflash_lse")


def _unasked(asked: Any) -> tuple[str, ...]:
    """What of (q, k, v, score, ...) is not in the tree `asked`, as Score.unasked."""
    q, k, v, dscore, *_ = asked
    of = {"q": q, "k": k, "v": v} | {name: getattr(dscore, name) for name in WITH_GRADIENTS}
    return tuple(name for name, x in of.items() if not jax.tree.leaves(x))


def _asked_for(unasked: tuple[str, ...], gradients: tuple) -> tuple:
    """(dq, dk, dv, dscore) without those that nobody asks for."""
    q, k, v, dscore = gradients
    dq, dk, dv = (None if name in unasked else x for name, x in zip("qkv", (q, k, v), strict=True))
    return dq, dk, dv, dscore.replace(unasked=()).only(*(name for name in WITH_GRADIENTS if name not in unasked))
