"""jflash.launches(): how the kernels are launched, and why. jflash.tune(): measure what is best on the GPU at hand."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from jflash import derivatives, kernels, linear, machine_code
from jflash.kernels import Triton
from jflash.launch import gpu, user_cache
from jflash.launch.blocks import Options, of_score
from jflash.launch.blocks import given as blocks_of
from jflash.launch.table import Entry, Key
from jflash.machine_code import Target
from jflash.parallel import primitive
from jflash.score import arguments
from jflash.score.score import Score
from jflash.tuning import progress, tuner
from jflash.tuning.probe import Bench
from jflash.tuning.tuner import Tuner

ASSEMBLER = "nvidia-cuda-nvcc"


def launches(
    q: ArrayLike | jax.ShapeDtypeStruct,
    k: ArrayLike | jax.ShapeDtypeStruct,
    v: ArrayLike | jax.ShapeDtypeStruct,
    **options: Unpack[Options],
) -> dict[str, Entry]:
    """How the GPU kernels of attention(q, k, v, **options) and its gradient would be launched, and why so.

    Nothing runs, and only shapes and dtypes matter: in place of arrays jax.ShapeDtypeStructs do, among the options too.
    The GPU is this process's, or that of the mesh in use (jax.set_mesh); without one, it is what fits every GPU.
    `implementation` is not looked at: "xla" and "naive" launch no kernel.

    Returns:
      For each kernel ("forward", "delta", "dkv" or "dk" and "dv", "dq", and "dscore" for the gradients of bias and
      score_args) an Entry: `launch` (tile sizes, warps, stages), `origin` ("measured", "machine code", "rule", or
      "block_sizes" for what the caller chose), the `gpu`, `date` and `versions` that it was found with, and `table`, the
      file that it stands in.

    Raises:
      TypeError, ValueError: as attention() does, and where the kernels cannot do what is asked.
    """
    leaves, structure = jax.tree.flatten(options)
    known = lambda leaf: not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    statics = [leaf if known(leaf) else None for leaf in leaves]
    entries = {}

    def trace(q, k, v, arrays):
        whole = [static if array is None else array for static, array in zip(statics, arrays, strict=True)]
        problem = _Problem.of(q, k, v, jax.tree.unflatten(structure, whole))
        entries.update({kernel: problem.entry(kernel) for kernel in problem.kernels})

    array = lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)
    jax.eval_shape(trace, array(q), array(k), array(v), [None if known(leaf) else leaf for leaf in leaves])
    return entries


def tune(q: ArrayLike, k: ArrayLike, v: ArrayLike, *, minutes: float = 5.0, **options: Unpack[Options]) -> dict[str, Entry]:
    """Measures how the kernels of attention(q, k, v, **options) and its gradient run fastest on the GPU at hand.

    For each kernel, launches (tile sizes, warps, stages) near the one that is used now are compiled; of those that fit and
    neither spill nor wait for each product on its own the fastest is kept in the user's cache, unless the present one is
    as fast, within 2 percent. The cache is a file for each kind of GPU in $JFLASH_CACHE_DIR, or where platformdirs says.
    From then on attention() takes what stands there for the same head_dim and v_dim, dtypes of the same size and like
    options (all that cost no more than a comparison or two an element are alike), at the nearest lengths. A function that
    jax.jit has compiled keeps what it was compiled with: tune first, or call jax.clear_caches().

    A kernel alone is timed, called again and again; where it takes less than starting it, some 20 µs, all launches look
    alike. Progress is shown on stderr, with bars where rich is installed.

    Args:
      q, k, v: as in attention(), on one device: one device's share of what will be computed, with contents that are
        typical where it matters (segment_ids).
      minutes: about how long it may take, all kernels together. What was not tried then is left out.
      options: those of attention() but block_sizes and implementation; with bias or score_args, their gradients are tuned.

    Returns:
      For each kernel that was tuned ("forward", "dkv" or "dk" and "dv", "dq", "dscore") its Entry, with the `launch` and the
      `microseconds` that it takes.

    Raises:
      RuntimeError: where there is no NVIDIA GPU that runs the kernels.
      ModuleNotFoundError: where ptxas is missing, or there is no place to keep the result.
      TypeError, ValueError: as attention() does.
    """
    for name in ("block_sizes", "implementation"):
        if options.get(name) is not None:
            raise ValueError(f"{name} must not be given to tune(), which looks for block sizes of the Triton kernels")
    if not isinstance(minutes, (int, float)) or isinstance(minutes, bool) or not minutes > 0:
        raise ValueError(f"minutes must be a positive number, got {minutes!r}")
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((q, k, v, options))):
        raise TypeError("tune() measures and takes no traced arrays: call it outside of jax.jit and other transformations")
    target = _gpu_at_hand()
    user_cache.required_path(target.kind)

    problem = _Problem.of(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), options)
    bench = Bench.of(*problem)
    names = [kernel for kernel in problem.kernels if kernel != "delta"]
    measured = {}
    with progress.shown() as say:
        search = Tuner(bench.build, time.perf_counter, say)
        for kernel in names:
            present = problem.entry(kernel).launch
            key = problem.key(kernel)
            others = tuner.candidates(key, present, target.shared_per_block)
            timed = search.fastest(kernel, present, others, 60 * minutes / len(names))
            measured[kernel] = Entry(
                key,
                timed.launch,
                origin="measured",
                gpu=target.kind,
                date=datetime.date.today().isoformat(),
                versions=f"jax {jax.__version__}",
                spill_bytes=timed.spill_bytes,
                microseconds=round(1e6 * timed.seconds, 2),
            )
    path = user_cache.keep(target.kind, measured.values())
    # Or else calls outside of jit would go on with what they were traced with.
    derivatives.attend_jitted.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    primitive.forget_programs()
    linear.forget_programs()
    return {kernel: dataclasses.replace(entry, table=str(path)) for kernel, entry in measured.items()}


class _Problem(NamedTuple):
    """One call of attention(), with a batch."""

    q: Array
    k: Array
    v: Array
    score: Score
    engine: Triton

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> _Problem:
        """Checks the arguments as attention() does."""
        of_pairs = of_score(options)
        blocks = blocks_of(options.get("block_sizes"))
        arguments.arrays(q, k, v)
        batched = q.ndim == 4
        if not batched:
            q, k, v = q[None], k[None], v[None]
        if why_not := kernels.unsupported(q, v):
            raise ValueError(f"there is no launch to choose: {why_not}")
        score = Score.of(q, k, batched=batched, **of_pairs)
        if 0 in (q.size, k.size, v.size):
            raise ValueError(f"there is no launch to choose where q, k or v is empty, got {q.shape}, {k.shape}, {v.shape}")
        return cls(q, k, v, score, Triton(blocks, options.get("precision")))

    @property
    def kernels(self) -> tuple[str, ...]:
        return kernels.used(self.q, self.v, self.score)

    def key(self, kernel: str) -> Key:
        return kernels.key_of(kernel, self.q, self.v, self.score)

    def entry(self, kernel: str) -> Entry:
        return self.engine.entry(kernel, self.q, self.v, self.score)


def _gpu_at_hand() -> Target:
    """The GPU that is measured on; raises where there is none, or a tool is missing."""
    if not gpu.is_default():
        raise RuntimeError(f"tune() measures on an NVIDIA GPU; this process runs on {jax.default_backend()}")
    if why_not := gpu.too_old():
        raise RuntimeError(f"tune() measures the Triton kernels: {why_not}")
    if ASSEMBLER in machine_code.missing_wheels():
        raise ModuleNotFoundError(
            f"tune() asks ptxas what spills: install {ASSEMBLER}, which comes with jax[cuda13] (pip install {ASSEMBLER})"
        )
    return machine_code.like(jax.devices()[0])
