"""The Pallas kernels of the Triton backend, and the engine that launches them. All that touches that backend is here."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from jflash import blocks
from jflash.blocks import DEFAULTS, BlockSizes
from jflash.kernels.delta import delta
from jflash.kernels.dkv import dkv
from jflash.kernels.dq import dq
from jflash.kernels.forward import forward
from jflash.kernels.launch import Launcher
from jflash.score import Score

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
LARGEST_HEAD_DIM = 256


def unsupported(q: Array, v: Array) -> str | None:
    """Why the kernels cannot take these arrays, or None."""
    if q.dtype not in DTYPES:
        return f"the Triton kernels take float16, bfloat16 or float32, got {q.dtype}"
    for name, width in (("head_dim", q.shape[-1]), ("v_dim", v.shape[-1])):
        if width > LARGEST_HEAD_DIM:
            return f"the Triton kernels take a {name} of at most {LARGEST_HEAD_DIM}, got {width}"
    return None


@dataclasses.dataclass(frozen=True)
class Triton:
    """The engine of implementation="triton", and of "interpret", which runs the same kernels without a GPU."""

    blocks: BlockSizes = DEFAULTS
    precision: lax.PrecisionLike = None
    interpret: bool = False

    def forward(self, q: Array, k: Array, v: Array, score: Score) -> tuple[Array, Array]:
        return forward(q, k, v, score, self._launcher("forward", q, v))

    def backward(
        self, q: Array, k: Array, v: Array, score: Score, o: Array, lse: Array, do: Array, dlse: Array
    ) -> tuple[Array, Array, Array]:
        lse2, row_delta = delta(o, do, lse, dlse, self._launcher("delta", q, v))
        dk, dv = dkv(q, k, v, do, lse2, row_delta, score, self._launcher("dkv", q, v))
        return dq(q, k, v, do, lse2, row_delta, score, self._launcher("dq", q, v)), dk, dv

    def _launcher(self, kernel: str, q: Array, v: Array) -> Launcher:
        launch = blocks.default(kernel, q.dtype, max(q.shape[-1], v.shape[-1]))
        if kernel != "delta":
            launch = self.blocks.launch(kernel, launch)
        return Launcher(launch, self.precision, self.interpret)
