"""From a JAX function to the kernels that XLA makes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jflash.machine_code.embedded import embedded_kernels
from jflash.machine_code.gpus import GPUS, Target, like
from jflash.machine_code.kernel import Kernel

WHEELS = {
    "jax-cuda13-plugin": "JAX's side of CUDA, in the version of JAX",
    "jax-cuda13-pjrt": "XLA's side of CUDA, in the version of JAX",
    "nvidia-nvvm": "libdevice, mathematical functions",
    "nvidia-cuda-nvcc": "ptxas, the assembler",
    "nvidia-cuda-nvdisasm": "the disassembler",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What XLA made of a JAX function for one GPU."""

    kernels: tuple[Kernel, ...]  # in the order of their first launch; then those that jax-triton brought along
    temp_bytes: int  # device memory beyond arguments and results
    text: str = dataclasses.field(repr=False)  # optimized HLO: collectives, copies and layouts show here

    def __getitem__(self, name: str) -> Kernel:
        """The kernel of that name."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise KeyError(f"no kernel {name!r}; there are {[kernel.name for kernel in self.kernels]}")


def compile_for(fn: Callable, *avals, gpu: str, mesh: Mesh | None = None) -> Program:
    """Compiles jax.jit(fn) for a GPU. The arguments are those of lower_for()."""
    return compile_lowered(lower_for(fn, *avals, gpu=gpu, mesh=mesh), gpu)


def compile_lowered(lowered: jax.stages.Lowered, gpu: str, **options: Any) -> Program:
    """Compiles what lower_for() gave, for the same GPU; `options` are XLA's."""
    return _compile(lowered, GPUS[gpu], **options)[1]


def compile_here(fn: Callable, *arguments) -> tuple[jax.stages.Compiled, Program]:
    """Compiles jax.jit(fn) for the GPU that this process runs on: (what can be called, what the compiler made of it)."""
    target = like(jax.devices()[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return _compile(jax.jit(fn).lower(*arguments), target)


def _compile(lowered: jax.stages.Lowered, target: Target, **options: Any) -> tuple[jax.stages.Compiled, Program]:
    """Compiles a lowered program, and reads what XLA says of it meanwhile."""
    with tempfile.TemporaryDirectory() as folder, _no_persistent_cache():
        # Options of this one compilation, unlike XLA_FLAGS: nothing to set before JAX starts, and nothing that processes
        # running side by side would share.
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx", **options})
        read = lambda pattern: [path.read_text() for path in sorted(pathlib.Path(folder).glob(pattern))]
        modules, launches = read("*.ptx"), _launches("".join(read("*.thunk_sequence.txt")))
    module_of = {name: module for module in modules for name in re.findall(r"\.entry (\w+)", module)}
    kernels = (Kernel(name, target, *launch, module_of[name]) for name, launch in launches.items() if name in module_of)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    return compiled, Program((*kernels, *embedded_kernels(lowered, target)), memory.temp_size_in_bytes, text)


@contextlib.contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """A program out of JAX's persistent cache comes without its PTX, and one for another device cannot be read back."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def lower_for(fn: Callable, *avals, gpu: str, mesh: Mesh | None = None) -> jax.stages.Lowered:
    """Lowers jax.jit(fn) for a GPU.

    Args:
      fn: a function of arrays.
      avals: its arguments, jax.ShapeDtypeStruct for arrays. What has no sharding is there on every device.
      gpu: one of GPUS.
      mesh: of devices(gpu, count), for a program of several devices.
    """
    mesh = Mesh(devices(gpu), ("device",)) if mesh is None else mesh
    everywhere = NamedSharding(mesh, PartitionSpec())
    place = lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding or everywhere)
    # From JAX 0.11 on, a Triton kernel is lowered for the GPU that is there, or for the one that the mesh describes.
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return jax.jit(fn).trace(*jax.tree.map(place, avals)).lower(lowering_platforms=("cuda",))


@functools.cache
def devices(gpu: str, count: int = 1) -> Sequence[Any]:
    """`count` devices of one host that one can compile for and not run on; a sharded program needs a Mesh of them."""
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {tuple(GPUS)}, got {gpu!r}")
    if missing := missing_wheels():
        raise ModuleNotFoundError(
            "compiling for a GPU that is not there needs more wheels: "
            + ", ".join(f"{wheel} ({WHEELS[wheel]})" for wheel in missing)
        )
    prepare()
    try:
        return topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=GPUS[gpu].config()).devices
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX has not loaded its CUDA plug-in: call jflash.machine_code.prepare() before JAX first looks for devices, "
            f"and install jax-cuda13-plugin and jax-cuda13-pjrt in the version of JAX, {jax.__version__}"
        ) from error


def prepare() -> None:
    """Lets JAX load its CUDA plug-in where there is no GPU. Call it before JAX first looks for devices.

    The plug-in looks for cuDNN as it loads, which compiling does not need. Not finding it, JAX logs a long traceback and
    does without the plug-in from then on, unless it was told not to look. devices() calls this function itself, so only a
    program that computes before it compiles, as a test suite does, must call it early. Where there is a GPU, it is used.
    """
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def missing_wheels() -> list[str]:
    """The names in WHEELS that are not installed."""
    return [wheel for wheel in WHEELS if not any(importlib.metadata.distributions(name=wheel))]


class _Launch(NamedTuple):
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int | None


def _launches(thunks: str) -> dict[str, _Launch]:
    """Name and launch of each kernel in XLA's list of what a program runs, as JAX 0.12 and as JAX 0.10 write it."""
    formats = (
        r"(\w+) grid: \[([\d, ]+)\] threads: \[(\d+)[\d, ]*\] +shared_memory: (\d+)",
        r"kernel=(\w+), .*?blocks: \{([\d, ]+)\}, threads/block: \{(\d+)[\d, ]*\}()",
    )
    return {
        name: _Launch(tuple(map(int, grid.split(","))), int(threads), int(shared) if shared else None)
        for pattern in formats
        for name, grid, threads, shared in re.findall(pattern, thunks)
    }
