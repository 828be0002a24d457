"""One kernel alone on the GPU at hand: what the compiler makes of a launch of it, and a way to run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jflash import kernels, machine_code
from jflash.kernels import Inputs, Launcher, Triton
from jflash.launch.table import Launch
from jflash.score.score import Score


class Refused(Exception):
    """The compiler does not take a launch: too much shared memory, mostly."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A kernel, compiled with one launch."""

    spill_bytes: int
    run: Callable[[int], None]  # runs it so many times, one after the other, and waits for the last
    serialized: tuple[str, ...] = ()  # Kernel.serialized


@dataclasses.dataclass(frozen=True)
class Bench:
    """The arrays that the kernels of one call of attention() and its gradient work on."""

    inputs: Inputs
    engine: Triton

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, score: Score, engine: Triton) -> Bench:
        """Runs the forward for what the backward needs of it. The cotangent of the output is random."""
        do = jax.random.normal(jax.random.key(0), (*q.shape[:-1], v.shape[-1]), q.dtype)

        @jax.jit
        def inputs(q, k, v, score, do):
            o, norm = engine.forward(q, k, v, score)
            rows = kernels.rows_of(o, do, norm, jnp.zeros_like(norm.m), score, engine.launcher("delta", q, v, score))
            return Inputs(q, k, v, do, rows, engine.prepared(score, q, k))

        return cls(inputs(q, k, v, score, do), engine)

    def build(self, kernel: str, launch: Launch) -> Built:
        launcher = Launcher(launch, self.engine.precision, self.engine.interpret)
        score = self.inputs.score if kernel == "forward" else self.inputs.score.replace(sinks=None)
        score = kernels.with_visits(kernel, score, self.inputs.q, self.inputs.k, launcher)
        inputs = self.inputs._replace(score=score)
        try:
            compiled, program = machine_code.compile_here(lambda inputs: call(kernel, inputs, launcher), inputs)
        except jax.errors.JaxRuntimeError as error:
            raise Refused(str(error)) from error
        own = [found for found in program.kernels if found.name.startswith("jflash_")]
        assert own, f"{kernel} must be among {program.kernels}"

        def run(times: int) -> None:
            result = None
            for _ in range(times):
                result = compiled(inputs)
            jax.block_until_ready(result)

        return Built(max(found.spill_bytes for found in own), run, tuple(why for found in own for why in found.serialized))


def call(kernel: str, inputs: Inputs, launcher: Launcher) -> Any:
    """What one kernel computes. The score is Triton.prepared() and has the visits of this launch."""
    if kernel == "forward":
        return kernels.forward(inputs.q, inputs.k, inputs.v, inputs.score, launcher)
    if kernel in kernels.PARTS:
        return kernels.dkv(inputs, launcher, kernel)
    if kernel == "dq":
        return kernels.dq(inputs, launcher)
    assert kernel == "dscore"
    dbias = kernels.dbias(inputs, launcher) if inputs.score.bias is not None else None
    return dbias, kernels.dargs(inputs, launcher) if any(inputs.score.differentiable_args) else None
