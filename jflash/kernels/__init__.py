"""The Pallas kernels of the Triton backend, and the engine that launches them. All that touches that backend is here."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from jflash import blocks, ranges, tile
from jflash.blocks import DEFAULTS, BlockSizes
from jflash.kernels.delta import delta
from jflash.kernels.dkv import dkv
from jflash.kernels.dq import dq
from jflash.kernels.dscore import Inputs, dargs, dbias
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
    partial: bool = False

    def for_parts(self) -> Triton:
        return dataclasses.replace(self, partial=True)

    def forward(self, q: Array, k: Array, v: Array, score: Score) -> tuple[Array, Array]:
        launcher = self._launcher("forward", q, v, score)
        score = ranges.with_kv_visits(self._prepared(score, q, k, v), launcher.block_q, launcher.block_kv)
        return forward(q, k, v, score, launcher)

    def backward(
        self, q: Array, k: Array, v: Array, score: Score, o: Array, lse: Array, do: Array, dlse: Array
    ) -> tuple[Array, Array, Array, Score]:
        lse2, row_delta = delta(o, do, lse, dlse, self._launcher("delta", q, v, score))
        arrays = q, k, v, do, lse2, row_delta
        dscore = score.only()
        if score.sinks is not None:
            dscore = dscore.replace(sinks=tile.sinks_cotangent(score.sinks, lse, row_delta))
        score = self._prepared(score.replace(sinks=None), q, k, v)

        launcher = self._launcher("dkv", q, v, score)
        dk, dv = dkv(*arrays, ranges.with_q_visits(score, launcher.block_q, launcher.block_kv), launcher)
        launcher = self._launcher("dq", q, v, score)
        dq_ = dq(*arrays, ranges.with_kv_visits(score, launcher.block_q, launcher.block_kv), launcher)

        launcher = self._launcher("dscore", q, v, score)
        inputs = Inputs(*arrays, ranges.with_kv_visits(score, launcher.block_q, launcher.block_kv))
        if score.bias is not None:
            dscore = dscore.replace(bias=dbias(inputs, launcher))
        if any(score.differentiable_args):
            dscore = dscore.replace(args=dargs(inputs, launcher))
        return dq_, dk, dv, dscore

    def _launcher(self, kernel: str, q: Array, v: Array, score: Score) -> Launcher:
        launch = blocks.default(kernel, q.dtype, max(q.shape[-1], v.shape[-1]), score.options_class)
        if kernel != "delta":
            launch = self.blocks.launch(kernel, launch)
        return Launcher(launch, self.precision, self.interpret, self.partial)

    def _prepared(self, score: Score, q: Array, k: Array, v: Array) -> Score:
        """`score` with what the kernels need besides: what is reached, and a mask that Pallas reads right.

        Pallas computes offsets in 32 bits up to 2**32 bytes, which is not enough for bytes from 2**31 on: two for each
        then. And in its interpreter the bools of a ref are integers, but those from beyond its end are not.
        """
        score = ranges.with_reach(score, q, k, v)
        if score.mask is None:
            return score
        if 2**31 <= score.mask.size <= 2**32:
            return score.replace(mask=score.mask.astype(jnp.int16))
        return score.replace(mask=score.mask.astype(jnp.int8)) if self.interpret else score
