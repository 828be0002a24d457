"""Constants and floating-point choices, each with the failure that it prevents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

LOG2E = math.log2(math.e)  # exp(x) = exp2(x * LOG2E): the hardware has exp2 only

# Where a row's largest logit, in base-2 units, passes this, the rounding of m * slope moves every exponent of the
# row by more than 2**6, and the row's probabilities overflow or vanish together (seen in the field with
# q = k = 133120 in bfloat16). See reference_point().
HUGE_EXPONENT = 2.0**30

# Where lse in base 2 is one float32, it is moved up past this size by its own rounding error, so that no probability
# exceeds one. See one_number().
COARSE_LSE = 2.0**26

# Where floats of the size of a row's largest logit, in base-2 units, lie as far apart as this: in float32 past 2**40. See
# top_of().
NOISY_ULP = 2.0**17

LARGEST = float(jnp.finfo(jnp.float32).max)


def accumulator(dtype) -> jnp.dtype:
    """The dtype of softmax and of every sum: float32, or float64 for float64 inputs."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def result_dtype(dtype, partial: bool):
    """The dtype of o and of gradients: that of the operands, or of sums where `partial` says that they are yet to be added."""
    return accumulator(dtype) if partial else dtype


def reference_point(m: Array, slope: float) -> tuple[Array, Array]:
    """(m, slope) of each row with which a logit x has the weight exp2(slope * x - slope * m).

    `m` is the row's largest logit so far, `slope` what a unit of it is in base 2. One multiply-add an element is all
    that the exponent costs. It is right for every finite m: the rounding of slope * m is a factor that a whole row
    shares and that cancels, and where it would overflow (HUGE_EXPONENT), logits are further apart than float32
    exponents reach, so the slope may be any power of two of that size: the product is then exact, and the weight of
    the largest logit is one and that of all smaller ones zero, as it must be. It is one that makes no product larger
    than the logit in natural units, so that the largest float32 of them (finfo.min, as a mask) stays finite. A row that
    has seen nothing (m = -inf) is measured from 0, so that its weights are exp2(-inf) = 0 and not exp2(-inf + inf).
    """
    coarse = 2.0 ** math.floor(math.log2(slope / LOG2E))
    slopes = jnp.where(jnp.abs(m) < HUGE_EXPONENT / slope, slope, coarse).astype(m.dtype)
    return jnp.where(m == -jnp.inf, 0.0, m), slopes


def top_of(m: Array, slope: float) -> Array:
    """From where on a logit of the backward counts as the row's largest, m.

    The backward computes logits anew, and may round them otherwise: by another order of sums, or by a fused multiply-add.
    Past NOISY_ULP that is more than any exponent reaches, and the largest would be lost, so what lies within a few
    units of its last place is the largest.
    """
    limits = jnp.finfo(m.dtype)
    lower = jnp.maximum(m - jnp.abs(m) * (2 * float(limits.eps)), float(limits.min))
    return jnp.where(jnp.abs(m) < NOISY_ULP / float(limits.eps) / slope, m, lower)


def one_number(m: Array, log2l: Array, slope: float) -> Array:
    """lse in base 2, so that exp2(slope * x - lse2) is a probability of the row, never above one, never NaN.

    Of an empty row (log2l = inf) it is inf: its probabilities are then exp2(-inf) = 0. Past COARSE_LSE (logits of 4e7,
    which float32 holds four apart) log2l is lost in the sum, and the rounding errors of lse2 and of the product could
    make a probability infinite: lse2 is moved up by as much, and what the row adds to the gradient may vanish, but stays
    finite. Two numbers lose nothing, but cost an instruction or two a pair and registers: tile.Rows.
    """
    lse2 = m * slope + log2l
    lse2 = jnp.where(jnp.abs(lse2) > COARSE_LSE, lse2 + jnp.abs(lse2) * 2.0**-22, lse2)
    return jnp.where(log2l == jnp.inf, jnp.inf, jnp.maximum(lse2, -LARGEST))


def divide_or_zero(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, and 0 where the denominator is 0: a row that saw no key is 0, not 0/0."""
    return jnp.where(denominator == 0, 0, numerator / jnp.where(denominator == 0, 1, denominator))


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a tile multiplies and exponentiates. Kernels for a GPU replace exp2 by two machine instructions."""

    precision: lax.PrecisionLike = None

    # Whether a product and a difference are one instruction, so that an exponent slope * x - slope * m costs no more than
    # slope * (x - m). See reference_point().
    fused: ClassVar[bool] = False

    def dot(self, a: Array, b: Array, contract: tuple[int, int]) -> Array:
        """The matrix product over one axis of each operand, accumulated in float32 (float64 for float64)."""
        return lax.dot_general(
            a, b, (((contract[0],), (contract[1],)), ((), ())),
            precision=self.precision, preferred_element_type=accumulator(a.dtype),
        )  # fmt: skip

    def inner(self, a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
        """a · bᵀ for operands that are cut into chunks of columns."""
        return sum((self.dot(x, y, (1, 1)) for x, y in zip(a[1:], b[1:], strict=True)), self.dot(a[0], b[0], (1, 1)))

    def combine(self, p: Array, chunks: tuple[Array, ...]) -> tuple[Array, ...]:
        """p · x for each chunk x, p rounded to the chunk's dtype first."""
        return tuple(self.dot(p.astype(x.dtype), x, (1, 0)) for x in chunks)

    def add_product(self, total: tuple[Array, ...], p: Array, chunks: tuple[Array, ...] | None) -> tuple[Array, ...]:
        """total + combine(p, chunks); None stands for zero."""
        return total if chunks is None else add(total, self.combine(p, chunks))

    def exp2(self, x: Array, slope: Array | float, intercept: Array) -> Array:
        """exp2(slope * x - intercept), elementwise with broadcasting."""
        return jnp.exp2(x * slope - intercept)

    def lost(self, m: Array, slope: float) -> Array:
        """What the rounding of slope * m takes from each exponent of a row, see reference_point(): nothing where it is
        taken from slope * x too, and not fused.
        """
        return jnp.zeros_like(m)

    def below(self, x: Array, top: Array) -> Array:
        """x - top, never above 0.

        The minimum also keeps a compiler from fusing a product x and the difference: of the product as it is rounded in
        `top` and of the one that is not, the difference may be larger than any exponent.
        """
        return jnp.minimum(x, top) - top


def add(xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Array, ...]:
    return jax.tree.map(jnp.add, xs, ys)


def jvp(fn: Callable, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """jax.jvp, in which None stands for a tangent of zero and costs nothing; so it does for that of the result."""
    leaves, tree = jax.tree.flatten(primals)
    flat = tree.flatten_up_to(tangents)
    moving = [n for n, t in enumerate(flat) if t is not None]

    def of_moving(*xs):
        its = dict(zip(moving, xs, strict=True))
        return fn(*tree.unflatten([its.get(n, x) for n, x in enumerate(leaves)]))

    if not moving:
        return fn(*primals), None
    return jax.jvp(of_moving, [leaves[n] for n in moving], [flat[n] for n in moving])


def known(*xs) -> bool:
    """True where all are Python ints, known while tracing."""
    return all(isinstance(x, int) for x in xs)


def smaller(a, b):
    """The minimum; of two Python ints a Python int, so that what is known while tracing stays known."""
    return min(a, b) if known(a, b) else jnp.minimum(a, b)


def larger(a, b):
    """The maximum, like smaller()."""
    return max(a, b) if known(a, b) else jnp.maximum(a, b)


def select(condition, a, b):
    """a where `condition` holds, else b, for indices; known where all three are, like smaller()."""
    if isinstance(condition, bool):
        return a if condition else b
    # Not jnp.where: of two Python ints Pallas makes bools, the condition's own type.
    return lax.select(condition, jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32))
