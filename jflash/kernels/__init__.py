"""The Pallas kernels of the Triton backend, and the engine that launches them. All that touches that backend is here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jflash import tile
from jflash.derivatives import Tangents
from jflash.kernels.delta import row_tangents_of, rows_of
from jflash.kernels.dkv import PARTS, dkv
from jflash.kernels.dq import dq
from jflash.kernels.dscore import dargs, dbias
from jflash.kernels.forward import forward
from jflash.kernels.inputs import Inputs
from jflash.kernels.launch import Launcher
from jflash.kernels.reach import with_reach
from jflash.kernels.tangent import tangent
from jflash.launch import blocks
from jflash.launch import table as launch_table
from jflash.launch.blocks import DEFAULTS, BlockSizes
from jflash.launch.table import Entry, Key
from jflash.numerics import result_dtype
from jflash.score.score import Score
from jflash.score.visits import Cut, states, with_kv_visits, with_q_visits
from jflash.shapes import K, O, PerHead, PerQuery, Q, V
from jflash.tile import Norm, Rows, RowTangents

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

    @property
    def needs_gpu(self) -> bool:
        return not self.interpret

    def for_parts(self) -> Triton:
        return dataclasses.replace(self, partial=True)

    def result_dtype(self, dtype):
        return result_dtype(dtype, self.partial)

    def forward(self, q: Q, k: K, v: V, score: Score) -> tuple[O, Norm]:
        launcher = self.launcher("forward", q, v, score)
        return forward(q, k, v, with_visits("forward", self.prepared(score, q, k, queries=False), q, k, launcher), launcher)

    def tangent(self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, tangents: Tangents) -> tuple[O, PerQuery]:
        start = None if score.sinks is None else tile.sinks_tangent(norm, tangents.score.sinks, score)
        launcher = self.launcher("tangent", q, v, score)
        moving = _moving(tangents)
        score = self.prepared(score.replace(sinks=None), q, k)
        inputs = Inputs(q, k, v, None, Rows(None, None), with_visits("tangent", score, q, k, launcher), moving)
        return tangent(inputs, o, norm, start, launcher)

    def backward(self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery) -> tuple[Q, K, V, Score]:
        rows = rows_of(o, do, norm, dlse, score, self.launcher("delta", q, v, score))
        sinks = None if score.sinks is None else tile.sinks_cotangent(norm, rows.delta, score)
        return self._gradients(Inputs(q, k, v, do, rows, score), sinks)

    def backward_tangent(
        self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery, tangents: Tangents
    ) -> tuple[Q, K, V, Score]:
        launcher = self.launcher("delta", q, v, score)
        rows, rows_t = rows_of(o, do, norm, dlse, score, launcher), row_tangents_of(o, do, norm, tangents, launcher)
        sinks = None
        if score.sinks is not None:
            sinks = tile.sinks_cotangent_tangent(norm, rows.delta, score, tangents.score.sinks, rows_t)
        moving = _moving(tangents)._replace(rows=rows_t)
        return self._gradients(Inputs(q, k, v, do, rows, score, moving), sinks)

    def _gradients(self, inputs: Inputs, sinks: PerHead | None) -> tuple[Q, K, V, Score]:
        """(dq, dk, dv, dscore), or their tangents where the inputs move; that of the sinks is known."""
        q, k, v, score = inputs.q, inputs.k, inputs.v, inputs.score
        dscore = score.only().replace(sinks=sinks)
        score = self.prepared(score.replace(sinks=None), q, k)
        grads: dict[str, Array] = {}
        for kernel in used(q, v, score, inputs.suffix)[2:]:  # behind forward and delta
            launcher = self.launcher(kernel + inputs.suffix, q, v, score)
            its = inputs._replace(score=with_visits(kernel, score, q, k, launcher))
            if kernel in PARTS:
                grads |= dkv(its, launcher, kernel)
            elif kernel == "dq":
                grads["dq"] = dq(its, launcher)
            elif kernel == "dscore":
                if score.bias is not None:
                    dscore = dscore.replace(bias=dbias(its, launcher))
                if any(score.differentiable_args):
                    dscore = dscore.replace(args=dargs(its, launcher))
        return grads["dq"], grads["dk"], grads["dv"], dscore

    def launcher(self, kernel: str, q: Q, v: V, score: Score) -> Launcher:
        return Launcher(self.entry(kernel, q, v, score).launch, self.precision, self.interpret, self.partial)

    def entry(self, kernel: str, q: Q, v: V, score: Score) -> Entry:
        """How a kernel is launched, and why so."""
        return self.blocks.over(blocks.default(key_of(kernel, q, v, score)))

    def cut(self, q: Q, v: V, score: Score) -> Cut:
        """The tiles of the forward."""
        return _cut(q, self.launcher("forward", q, v, score))

    def visits(self, score: Score, cut: Cut) -> Array:
        """What it does with each of them, see score.visits.states()."""
        return states(score, cut)

    def prepared(self, score: Score, q: Q, k: K, queries: bool = True) -> Score:
        """`score` with what the kernels need besides: what is reached, and a mask that Pallas reads right.

        Pallas computes offsets in 32 bits up to 2**32 bytes, which is not enough for bytes from 2**31 on: two for each
        then. And in its interpreter the bools of a ref are integers, but those from beyond its end are not.
        """
        if score.mask is not None and 2**31 <= score.mask.size <= 2**32:
            score = score.replace(mask=score.mask.astype(jnp.int16))
        elif score.mask is not None and self.interpret:
            score = score.replace(mask=score.mask.astype(jnp.int8))
        return with_reach(score, q, k, self.interpret, queries)


def _moving(tangents: Tangents) -> Inputs:
    """The tangents as Inputs; what they say of rows is yet to be known."""
    score = tangents.score.replace(sinks=None)
    return Inputs(tangents.q, tangents.k, tangents.v, tangents.do, RowTangents(), score)


def key_of(kernel: str, q: Q, v: V, score: Score) -> Key:
    """What the launch of a kernel is chosen for."""
    lengths = map(launch_table.length_class, (score.q_len, score.kv_len))
    return Key(kernel, 8 * q.dtype.itemsize, q.shape[-1], v.shape[-1], score.options_class, *lengths)


def used(q: Q, v: V, score: Score, suffix: str = "") -> tuple[str, ...]:
    """The kernels that attention and its gradient launch, in their order; or its gradient's tangent, by their `suffix`."""
    of_arrays = ("dscore",) if score.bias is not None or any(score.differentiable_args) else ()
    return "forward", "delta", *blocks.kernels_of_keys(key_of(f"dkv{suffix}", q, v, score)), "dq", *of_arrays


def with_visits(
    kernel: str, score: Score, q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, launcher: Launcher
) -> Score:
    """`score` with the tiles that a kernel visits, of arrays shaped like q and k."""
    cut = _cut(q, launcher)
    return with_q_visits(score, cut, k.shape[2]) if kernel in PARTS else with_kv_visits(score, cut)


def _cut(q: Array | jax.ShapeDtypeStruct, launcher: Launcher) -> Cut:
    return Cut(q.shape[0], q.shape[2], launcher.block_q, launcher.block_kv)
