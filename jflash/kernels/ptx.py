"""The inline assembly: an exponential that costs two machine instructions, and a number that the compiler knows nothing of."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

from jflash.numerics import Arithmetic


@dataclasses.dataclass(frozen=True)
class PtxArithmetic(Arithmetic):
    """exp2(slope * x - intercept) as one FFMA and one MUFU.

    jnp.exp2 becomes ex2.approx.f32, which ptxas wraps in a compare and two multiplies for the sake of denormals, and
    XLA forbids contraction, so that the multiply and the subtraction would be two instructions more. A weight below
    2**-126 flushes to zero here; beside the largest weight of its row, which is one, float32 could not tell.
    """

    def exp2(self, x: Array, slope: Array | float, intercept: Array) -> Array:
        shape = jnp.broadcast_shapes(x.shape, jnp.shape(intercept))
        x, slope, intercept = (jnp.broadcast_to(jnp.asarray(a, jnp.float32), shape) for a in (x, slope, -intercept))
        (y,) = plgpu.elementwise_inline_asm(
            "{ .reg .f32 t; fma.rn.ftz.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }",
            args=[x, slope, intercept],
            constraints="=f,f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        )
        return y


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
