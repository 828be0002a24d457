"""How right an answer is: the distance from float64, and how much of it a dtype excuses. The one rule of all tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jflash.attention import attention
from jflash.cases import Case


class Outputs(NamedTuple):
    """What one call of attention() and its transpose give."""

    o: Any  # arrays, of JAX or of numpy
    lse: Any
    dq: Any
    dk: Any
    dv: Any


class Verdict(NamedTuple):
    """One output's largest distance from float64, and the largest that is right."""

    name: str
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance


def outputs(fn: Callable, q: Array, k: Array, v: Array, do: Array, dlse: Array) -> Outputs:
    """fn(q, k, v) -> (o, lse) and the gradients that the cotangents do and dlse give."""
    (o, lse), pull = jax.vjp(fn, q, k, v)
    return Outputs(o, lse, *pull((do, dlse)))


def program(case: Case, arrays: tuple[np.ndarray, ...], dtype: str | None = None, **how):
    """(compiled, arguments): forward and backward of attention() on a case, and what to call it with.

    `how`: implementation and the like; dtype: the case's unless given.
    """
    dtype = dtype or case.dtype
    arguments = *(jnp.asarray(x, dtype) for x in arrays[:4]), jnp.asarray(arrays[4], jnp.promote_types(dtype, jnp.float32))
    fn = functools.partial(attention, **case.options(), return_lse=True, **how)
    return jax.jit(functools.partial(outputs, fn)).lower(*arguments).compile(), arguments


def run(case: Case, arrays: tuple[np.ndarray, ...], dtype: str | None = None, **how) -> Outputs:
    """The outputs of attention() on a case; arguments as in program()."""
    compiled, arguments = program(case, arrays, dtype, **how)
    return compiled(*arguments)


def exact(case: Case, arrays: tuple[np.ndarray, ...]) -> Outputs:
    """The outputs of dense attention in float64, as numpy arrays."""
    with jax.enable_x64(True):
        return Outputs(*map(np.asarray, run(case, arrays, dtype="float64", implementation="naive")))


def distance(x: ArrayLike, x64: np.ndarray) -> float:
    """max |x - x64|; two equal infinities are 0 apart, and a NaN is infinitely far from everything."""
    got = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where(got == x64, 0.0, np.abs(got - x64))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0))


def verdicts(case: Case, arrays: tuple[np.ndarray, ...], got: Outputs, naive: Outputs, x64: Outputs) -> list[Verdict]:
    """max|x - x64| <= 2 max|naive - x64| + floor, where `naive` is dense attention in the dtype of `got`.

    Naive may be right by luck where another order of the same sums is not (rows of one key, or one large logit a row),
    so the floor is what rounding alone may do: half a unit in the last place of the largest value for the result's
    dtype; what the rounding of a logit does to its exponential, in float32, or four times float32's own where logits
    are small; and in dq and dk, where dp - delta cancels, the rounding of o in delta and that of the two sums.
    """
    q, k, _, do, dlse = arrays
    accumulated = float(jnp.finfo(jnp.promote_types(case.dtype, jnp.float32)).eps)
    logit = _largest(x64.lse)
    delta = _largest(np.sqrt(np.sum((x64.o * do) ** 2, axis=-1) + dlse.swapaxes(1, 2) ** 2))
    scale = abs(case.scale if case.scale is not None else case.head_dim**-0.5)
    cancelled = {"dq": scale * delta * _largest(k), "dk": scale * delta * _largest(q)}
    judged = []
    for name, x, x_naive, exact in zip(Outputs._fields, got, naive, x64, strict=True):
        half = float(jnp.finfo(x.dtype).eps) / 2
        floor = (half + accumulated * max(4, logit)) * _largest(exact) + (half + accumulated) * cancelled.get(name, 0)
        judged.append(Verdict(name, distance(x, exact), 2 * distance(x_naive, exact) + floor))
    return judged


def _largest(x: np.ndarray) -> float:
    """The largest finite magnitude in x."""
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))
