"""jflash on an emulated GPU: its kernels run here, all else is ordinary JAX on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from emulator.compiled import compiled, translated
from emulator.errors import Fault
from emulator.execution import launch
from emulator.report import Report
from jflash import machine_code
from jflash.kernels import Triton
from jflash.kernels.launch import Launcher

Change = Callable[[str, str], str]  # (a kernel's name, its PTX) -> PTX


@dataclasses.dataclass
class Log:
    """What the launches of one `with emulated(...)` were found to do, in their order."""

    gpu: str
    change: Change
    launches: list[tuple[str, Report]] = dataclasses.field(default_factory=list)  # names and reports

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.launches}

    @property
    def problems(self) -> list[str]:
        return [f"{name}: {what} ({count} times)" for name, report in self.launches for what, count in report.problems.items()]


_logs: list[Log] = []  # innermost last


@contextlib.contextmanager
def emulated(gpu: str, change: Change = lambda name, ptx: ptx) -> Iterator[Log]:
    """Within it, jflash's kernels are launched on a GPU, one of jflash.machine_code.GPUS, that this process emulates.

    Results must be waited for within it. `change` is applied to the PTX before each launch, for tests of the emulator.
    """
    kind = Mesh(machine_code.devices(gpu), ("device",)).abstract_mesh.abstract_device
    log, original, needs_gpu = Log(gpu, change), Launcher.call, Triton.needs_gpu
    _logs.append(log)
    Launcher.call, Triton.needs_gpu = _call(original), False
    try:
        # Tells jflash the kind of GPU, and JAX not to take what it traced elsewhere.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            yield log
    finally:
        Launcher.call, Triton.needs_gpu = original, needs_gpu
        _logs.pop()


def _call(original: Callable) -> Callable:
    """In place of Launcher.call."""

    def call(launcher: Launcher, kernel, *, out_shape, **how):
        fn = original(launcher, kernel, out_shape=out_shape, **how)
        return fn if launcher.interpret else functools.partial(_run, fn, out_shape)

    return call


def _run(fn: Callable, out_shape, *arguments):
    """fn(*arguments), one launch, in the midst of a program that JAX traces."""
    leaves, tree = jax.tree.flatten(arguments)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    kernel = compiled(fn, tree.unflatten(avals), _logs[-1].gpu)
    results, result_tree = jax.tree.flatten(tuple(out_shape) if isinstance(out_shape, list) else out_shape)  # as Pallas does
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]

    def execute(*operands):
        if not _logs:
            raise Fault(f"{kernel.name} is launched outside of emulated(): wait for results within it")
        log = _logs[-1]
        program = translated(kernel.name, log.change(kernel.name, kernel.ptx))
        empty = [np.empty(x.shape, x.dtype) for x in results]
        how = kernel.grid, kernel.threads, kernel.shared_bytes
        written, report = launch(program, *how, [np.asarray(x) for x in operands], empty)
        log.launches.append((kernel.name, report))
        return written

    return jax.tree.unflatten(result_tree, jax.pure_callback(execute, results, *leaves, vmap_method="sequential"))
