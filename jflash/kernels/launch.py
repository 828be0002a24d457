"""How a kernel is launched: tile sizes, warps, stages, arithmetic, and whether it is compiled or interpreted."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jflash import varying
from jflash.kernels.ptx import FusedArithmetic, PtxArithmetic, unknown
from jflash.launch.blocks import Launch
from jflash.numerics import Arithmetic, known, result_dtype
from jflash.score.ranges import Span


@dataclasses.dataclass(frozen=True)
class Launcher:
    launch: Launch
    precision: lax.PrecisionLike = None
    interpret: bool = False
    partial: bool = False

    @property
    def block_q(self) -> int:
        return self.launch.block_q

    @property
    def block_kv(self) -> int:
        return self.launch.block_kv

    @property
    def arithmetic(self) -> Arithmetic:
        """Inline assembly has no interpreter."""
        return FusedArithmetic(self.precision) if self.interpret else PtxArithmetic(self.precision)

    def again(self, span: Span) -> Span:
        """The same positions, for what is stored after a loop: its addresses are then computed there.

        Otherwise the compiler keeps those of the loads before the loop, in registers that the loop spills others for.
        """
        return span if self.interpret else Span(unknown(span.start), span.size)

    def result_dtype(self, dtype):
        """The dtype of o and of the gradients of operands of `dtype`."""
        return result_dtype(dtype, self.partial)

    def call(self, kernel, *, grid, in_specs, out_specs, out_shape, name: str):
        """pl.pallas_call of `kernel(*refs, launcher=self)`."""
        if not known(*grid):
            raise ValueError(
                f"the Triton kernels take shapes that are known where they are lowered, got a grid of {grid}: export it with a "
                'batch that is, or with implementation="xla"'
            )
        return pl.pallas_call(
            functools.partial(kernel, launcher=self),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=jax.tree.map(lambda x: varying.nowhere(x.shape, x.dtype), out_shape),  # one device's part: primitive.py
            interpret=self.interpret,
            compiler_params=plgpu.CompilerParams(num_warps=self.launch.num_warps, num_stages=self.launch.num_stages),
            name=name,
        )
