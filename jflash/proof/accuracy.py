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


def program(case: Case, arrays: tuple[np.ndarray, ...], dtype: str | None = None, **how):
    """(compiled, arguments, parameters): forward and backward of attention() on a case, and what to call it with.

    `how`: implementation and the like; dtype: the case's unless given.
    """
    dtype = dtype or case.dtype
    arguments = *(jnp.asarray(x, dtype) for x in arrays[:4]), jnp.asarray(arrays[4], jnp.promote_types(dtype, jnp.float32))
    parameters = jax.tree.map(lambda x: jnp.asarray(x, dtype), case.parameters())
    fn = functools.partial(attention, **case.options(), return_lse=True, **how)
    return jax.jit(functools.partial(outputs, fn)).lower(*arguments, **parameters).compile(), arguments, parameters


def run(case: Case, arrays: tuple[np.ndarray, ...], dtype: str | None = None, **how) -> Outputs:
    """The outputs of attention() on a case; arguments as in program()."""
    compiled, arguments, parameters = program(case, arrays, dtype, **how)
    return compiled(*arguments, **parameters)


def exact(case: Case, arrays: tuple[np.ndarray, ...]) -> Outputs:
    """The outputs of dense attention in float64, as numpy arrays."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, run(case, arrays, dtype="float64", implementation="naive"))


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
    q, k, _, do, dlse = arrays
    accumulated = float(jnp.finfo(jnp.promote_types(case.dtype, jnp.float32)).eps)
    logit = _largest(x64.lse)
    delta = _largest(np.sqrt(np.sum((x64.o * do) ** 2, axis=-1) + dlse.swapaxes(1, 2) ** 2))
    scale = abs(case.scale if case.scale is not None else case.head_dim**-0.5)
    # p sums to one over a row, so what a row adds to an entry of dscore is off by no more than its delta is; rows are
    # independent of each other, so many of them are off by the root of their number.
    rows = x64.lse.size
    of_score = lambda exact: delta * math.sqrt(max(1, rows / exact.size))
    cancelled = {"o": 0, "lse": 0, "dv": 0, "dq": scale * delta * _largest(k), "dk": scale * delta * _largest(q)}
    judged = []
    for (name, x), (_, x_naive), (_, exact) in zip(got.items(), naive.items(), x64.items(), strict=True):
        half = float(jnp.finfo(x.dtype).eps) / 2
        at_risk = cancelled[name] if name in cancelled else of_score(exact)
        floor = (half + accumulated * max(4, logit)) * _largest(exact) + (half + accumulated) * at_risk
        judged.append(Verdict(name, distance(x, exact), 2 * distance(x_naive, exact) + floor))
    return judged


def _largest(x: np.ndarray) -> float:
    """The largest finite magnitude in x."""
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))
