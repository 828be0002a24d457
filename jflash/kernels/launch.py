"""How a kernel is launched: tile sizes, warps, stages, arithmetic, and whether it is compiled or interpreted."""

from __future__ import annotations

import dataclasses
import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jflash.blocks import Launch
from jflash.kernels.ptx import PtxArithmetic
from jflash.numerics import Arithmetic, known


@dataclasses.dataclass(frozen=True)
class Launcher:
    launch: Launch
    precision: lax.PrecisionLike = None
    interpret: bool = False

    @property
    def block_q(self) -> int:
        return self.launch.block_q

    @property
    def block_kv(self) -> int:
        return self.launch.block_kv

    @property
    def arithmetic(self) -> Arithmetic:
        """Inline assembly has no interpreter."""
        return Arithmetic(self.precision) if self.interpret else PtxArithmetic(self.precision)

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
            out_shape=out_shape,
            interpret=self.interpret,
            compiler_params=plgpu.CompilerParams(num_warps=self.launch.num_warps, num_stages=self.launch.num_stages),
            name=name,
        )
