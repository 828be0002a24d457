"""The inline assembly: an exponential that costs two machine instructions, and a number that the compiler knows nothing of."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

from jflash.numerics import HUGE_EXPONENT, LARGEST, Arithmetic


@dataclasses.dataclass(frozen=True)
class FusedArithmetic(Arithmetic):
    """The arithmetic of a kernel, for the interpreter, which has no inline assembly."""

    fused: ClassVar[bool] = True

    def exp2(self, x: Array, slope: Array | float, intercept: Array) -> Array:
        """Finite where a fused multiply-add is, and of rounded products: a CPU's compiler would fuse one of them, or not."""
        x, intercept_there = jnp.minimum(x * slope, LARGEST), jnp.minimum(intercept, LARGEST)
        return jnp.where(intercept == jnp.inf, 0, jnp.exp2(x - intercept_there))


@dataclasses.dataclass(frozen=True)
class PtxArithmetic(FusedArithmetic):
    """exp2(slope * x - intercept) as one FFMA and one MUFU.

    jnp.exp2 becomes ex2.approx.f32, which ptxas wraps in a compare and two multiplies for the sake of denormals, and
    XLA forbids contraction, so that the multiply and the subtraction would be two instructions more. A weight below
    2**-126 flushes to zero here; beside the largest weight of its row, which is one, float32 could not tell.
    """

    def exp2(self, x: Array, slope: Array | float, intercept: Array) -> Array:
        shape = jnp.broadcast_shapes(x.shape, jnp.shape(intercept))
        x, slope, intercept = (jnp.broadcast_to(jnp.asarray(a, jnp.float32), shape) for a in (x, slope, -intercept))
        return _assembly("{ .reg .f32 t; fma.rn.ftz.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }", x, slope, intercept)

    def lost(self, m: Array, slope: float) -> Array:
        slopes = jnp.full(m.shape, slope, jnp.float32)
        exact = "{ .reg .f32 t; mul.rn.f32 t, $1, $2; neg.f32 t, t; fma.rn.f32 $0, $1, $2, t; }"
        return jnp.where(jnp.abs(m) < HUGE_EXPONENT / slope, _assembly(exact, m, slopes), 0)


def _assembly(text: str, *args: Array) -> Array:
    """One float32 from each of the arguments, which are of one shape."""
    (result,) = plgpu.elementwise_inline_asm(
        text,
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return result


def unknown(x: Array) -> Array:
    """x, an int32 scalar, which the compiler cannot know to be x: what is computed from it is computed again."""
    (same,) = plgpu.elementwise_inline_asm(
        "mov.b32 $0, $1;",
        args=[jnp.full((1,), x, jnp.int32)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return jnp.sum(same)
