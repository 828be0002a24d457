"""How right an answer is: the distance from float64, and how much of it a dtype excuses. The one rule of all tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jflash.attention import attention
from jflash.proof.cases import Case


class Outputs(NamedTuple):
    """What one call of attention() and its transpose give."""

    o: Any  # arrays, of JAX or of numpy
    lse: Any
    dq: Any
    dk: Any
    dv: Any
    dscore: Any = {}  # noqa: RUF012  the gradients of Case.parameters(), by name

    def items(self) -> list[tuple[str, Any]]:
        """(name, array) of each."""
        named = jax.tree_util.tree_leaves_with_path(self.dscore)
        return [*zip(self._fields[:5], self[:5], strict=True), *((jax.tree_util.keystr(path), x) for path, x in named)]


class Verdict(NamedTuple):
    """One output's largest distance from float64, and the largest that is right."""

    name: str
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance


def outputs(fn: Callable, q: Array, k: Array, v: Array, do: Array, dlse: Array, **parameters) -> Outputs:
    """fn(q, k, v, **parameters) -> (o, lse) and the gradients that the cotangents do and dlse give."""
    (o, lse), pull = jax.vjp(lambda q, k, v, parameters: fn(q, k, v, **parameters), q, k, v, parameters)
    return Outputs(o, lse, *pull((do, dlse)))


def outputs_and_tangents(fn: Callable, arguments: tuple, parameters: dict, moving: tuple, moving_parameters: dict):
    """(outputs(fn, *arguments, **parameters), their tangents), by those of all arguments: jax.jvp, for gradients of jax.vjp."""
    all_of = lambda arguments, parameters: outputs(fn, *arguments, **parameters)
    return jax.jvp(all_of, (arguments, parameters), (moving, moving_parameters))


def program(case: Case, arrays: tuple[np.ndarray, ...], dtype: str | None = None, tangents: bool = False, **how):
    """(compiled, arguments): forward and backward of attention() on a case, or also their tangents, and what to call it with.

    `how`: implementation and the like; dtype: the case's unless given.
    """
    dtype = dtype or case.dtype
    fn = functools.partial(attention, **case.options(), return_lse=True, **how)
    arguments, parameters = _of_dtype(dtype, arrays, case.parameters())
    if tangents:
        arguments = (arguments, parameters, *_of_dtype(dtype, case.arrays(seed=1), case.parameters(seed=3, holes=False)))
        return jax.jit(functools.partial(outputs_and_tangents, fn)).lower(*arguments).compile(), arguments
    of_all = lambda arguments, parameters: outputs(fn, *arguments, **parameters)
    return jax.jit(of_all).lower(arguments, parameters).compile(), (arguments, parameters)


def _of_dtype(dtype: str, arrays: tuple[np.ndarray, ...], parameters: dict[str, Any]) -> tuple[tuple, dict]:
    wide = jnp.promote_types(dtype, jnp.float32)
    arguments = *(jnp.asarray(x, dtype) for x in arrays[:4]), jnp.asarray(arrays[4], wide)
    return arguments, jax.tree.map(lambda x: jnp.asarray(x, dtype), parameters)


def run(case: Case, arrays: tuple[np.ndarray, ...], dtype: str | None = None, **how) -> Outputs:
    """The outputs of attention() on a case; arguments as in program(). With tangents=True (outputs, tangents)."""
    compiled, arguments = program(case, arrays, dtype, **how)
    return compiled(*arguments)


def exact(case: Case, arrays: tuple[np.ndarray, ...], tangents: bool = False) -> Outputs:
    """The outputs of dense attention in float64, as numpy arrays; or (outputs, tangents)."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, run(case, arrays, dtype="float64", implementation="naive", tangents=tangents))


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
    are small; and where dp - delta cancels, in all gradients but dv, the rounding of o in delta and that of the two sums,
    once for each row of tiles that is summed where an array serves many.
    """
    of_all, _, relative = _at_risk(case, arrays, x64)
    return _judged(case, got, naive, x64, relative, of_all)


def tangent_verdicts(case: Case, arrays: tuple[np.ndarray, ...], got: Outputs, naive: Outputs, x64: tuple) -> list[Verdict]:
    """The same of tangents: `got` and `naive` are tangents, `x64` (outputs, tangents).

    The floor is that of verdicts() by the product rule: a sum of what an output's parts may be off by, times how fast the
    others change, where an exponential changes as fast as its logit does.
    """
    outputs, tangents = x64
    moving = case.arrays(seed=1)
    of_all, delta, relative = _at_risk(case, arrays, outputs)
    (q, k, v, do, _), (qt, kt, _, dot, dlset) = arrays, moving
    group = q.shape[2] // k.shape[2]
    pairs = lambda q, k: np.einsum("bihd,bjhd->bhij", q, np.repeat(k, group, axis=2))
    scale = abs(case.scale if case.scale is not None else case.head_dim**-0.5)
    speed = max(scale * _largest(pairs(qt, k) + pairs(q, kt)), _largest(tangents.lse), 1.0)
    of_delta = np.sqrt(np.sum((tangents.o * do + outputs.o * dot) ** 2, axis=-1) + dlset.swapaxes(1, 2) ** 2)
    deltat = speed * delta + _largest(of_delta)
    # What is lost in p * st is lost of v, and what in the tangent of ds of k and q.
    lost = {"o": speed * _largest(v), "lse": speed, "dv": speed * _largest(do) * math.sqrt(group)}
    of_ds = lambda x, xt: scale * (deltat * _largest(x) + delta * _largest(xt))
    lost |= {"dq": of_ds(k, kt), "dk": of_ds(q, qt)}
    of_score = lambda exact: deltat / max(delta, 1e-30) * of_all("", exact)
    risk = lambda name, exact: lost.get(name) if name in lost else of_score(exact)
    return _judged(case, got, naive, tangents, relative, risk)


def _at_risk(case: Case, arrays: tuple[np.ndarray, ...], x64: Outputs) -> tuple[Callable, float, float]:
    """(risk, delta, relative): what cancels in an output, risk(name, exact), and in a row; what rounding a logit does to p."""
    q, k, _, do, dlse = arrays
    logit = _largest(x64.lse)
    delta = _largest(np.sqrt(np.sum((x64.o * do) ** 2, axis=-1) + dlse.swapaxes(1, 2) ** 2))
    scale = abs(case.scale if case.scale is not None else case.head_dim**-0.5)
    # p sums to one over a row, so what a row adds to an entry of dscore is off by no more than its delta is; rows are
    # independent of each other, so many of them are off by the root of their number.
    rows = x64.lse.size
    of_score = lambda exact: delta * math.sqrt(max(1, rows / exact.size))
    cancelled = {"o": 0, "lse": 0, "dv": 0, "dq": scale * delta * _largest(k), "dk": scale * delta * _largest(q)}
    risk = lambda name, exact: cancelled[name] if name in cancelled else of_score(exact)
    return risk, delta, float(jnp.finfo(jnp.promote_types(case.dtype, jnp.float32)).eps) * max(4, logit)


def _judged(case: Case, got: Outputs, naive: Outputs, x64: Outputs, relative: float, risk: Callable) -> list[Verdict]:
    accumulated = float(jnp.finfo(jnp.promote_types(case.dtype, jnp.float32)).eps)
    judged = []
    for (name, x), (_, x_naive), (_, exact) in zip(got.items(), naive.items(), x64.items(), strict=True):
        half = float(jnp.finfo(x.dtype).eps) / 2
        floor = (half + relative) * _largest(exact) + (half + accumulated) * risk(name, exact)
        judged.append(Verdict(name, distance(x, exact), 2 * distance(x_naive, exact) + floor))
    return judged


def _largest(x: np.ndarray) -> float:
    """The largest finite magnitude in x."""
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))
