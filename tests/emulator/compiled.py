"""Kernels compiled for an absent GPU, kept on disk: compiling takes most of an emulated launch's time.

The folder is shared by all processes that run tests, and by all versions of JAX: a file is named by a hash of all that its
content depends on, and appears as a whole. PTX_CACHE names another folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.version
from checks import compiling_quickly

from emulator.parser import parse
from emulator.translator import Translator
from jflash import machine_code

FOLDER = pathlib.Path(os.environ.get("PTX_CACHE") or pathlib.Path(tempfile.gettempdir(), f"jflash-ptx-{os.getuid()}"))
FASTEST = {"xla_gpu_disable_gpuasm_optimizations": True}  # ptxas need not optimize: only PTX is wanted


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel, and how it is launched."""

    name: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    ptx: str


def compiled(fn: Callable, avals: Any, gpu: str) -> Compiled:
    """The one kernel that fn(*avals) launches."""
    return _apart_from_jax(lambda: _compiled(fn, avals, gpu))


def _compiled(fn: Callable, avals: Any, gpu: str) -> Compiled:
    lowered = machine_code.lower_for(fn, *avals, gpu=gpu)
    everything = jax.__version__, jaxlib.version.__version__, gpu, FASTEST, lowered.as_text()
    path = FOLDER / f"{hashlib.sha256(repr(everything).encode()).hexdigest()}.json"
    if not path.exists():
        with compiling_quickly(False):  # whatever the tests have set for what is compiled for the CPU
            program = machine_code.compile_lowered(lowered, gpu, **FASTEST)
        (kernel,) = program.kernels
        shared = kernel.dynamic_shared_bytes
        if shared is None:  # JAX 0.10 does not tell: as much as there is, and bounds are those
            shared = kernel.target.shared_per_block
        _write(path, Compiled(kernel.name, kernel.grid, kernel.threads, shared, kernel.module))
    fields = json.loads(path.read_text())
    return Compiled(**(fields | {"grid": tuple(fields["grid"])}))


def _write(path: pathlib.Path, kernel: Compiled) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=FOLDER, delete=False) as file:
        json.dump(dataclasses.asdict(kernel), file)
    os.replace(file.name, path)


@functools.lru_cache(maxsize=32)
def translated(name: str, ptx: str) -> Translator:
    return Translator(parse(ptx)[name])


def _apart_from_jax(fn: Callable) -> Any:
    """fn() in a thread of its own, for JAX keeps by threads what is being traced, and on which mesh."""
    results: list = []

    def work():
        try:
            results.append((fn(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((result, error),) = results
    if error is not None:
        raise error
    return result
