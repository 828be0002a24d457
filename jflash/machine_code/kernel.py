"""One kernel: what its PTX, the assembler and the disassembler tell of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pathlib
import re
import subprocess
import tempfile
from typing import NamedTuple

from jflash.machine_code.gpus import REGISTERS, RESERVED_SHARED, Target
from jflash.machine_code.loops import Loop, find_loops
from jflash.machine_code.pipeline import Estimate, decode, simulate

# What multiplies matrices of floats: the machine instruction, and the PTX instruction that it is made from.
TENSOR_CORES = {
    "UTCHMMA": r"\btcgen05\.mma\S*\.kind::(f16|tf32)\b",
    "HGMMA": r"\bwgmma\.mma_async\S*\.(f16|bf16|tf32)\b",
    "HMMA": r"\bmma\.sync\S*\.(f16|bf16|tf32)\b",
}


# What ptxas says where it waits for each wgmma on its own and lets nothing run beside it: C7510 and its neighbours.
SERIALIZED = r"\((C\d+)\).*wgmma.* serialized due to (.*?)(?: in the function .*| for the function .*)?$"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel for one GPU. ptxas and the disassembler run when they are first asked for something."""

    name: str
    target: Target
    grid: tuple[int, ...]  # blocks along x, y, z
    threads: int  # of a block
    dynamic_shared_bytes: int | None  # of a block; None where XLA does not tell, as in JAX 0.10
    module: str = dataclasses.field(repr=False)  # the PTX that holds this kernel, and others maybe

    # -------------------------------------------------------------------------------------------------- from the PTX

    @property
    def ptx(self) -> str:
        """The PTX of this kernel."""
        start = self.module.index(f".entry {self.name}(")
        end = self.module.find(".entry ", start + 1)
        return self.module[start:] if end < 0 else self.module[start:end]

    @property
    def tensor_cores(self) -> str | None:
        """The instruction that multiplies matrices: "HMMA", "HGMMA" (H100), "UTCHMMA" (B200), or None."""
        return next((name for name, pattern in TENSOR_CORES.items() if re.search(pattern, self.ptx)), None)

    # -------------------------------------------------------------------------------------------------- from ptxas

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._assembled.registers

    @property
    def spill_bytes(self) -> int:
        """Bytes that the code of a thread stores to local memory and loads from it for want of registers."""
        return self._assembled.spill_bytes

    @property
    def serialized(self) -> tuple[str, ...]:
        """Why ptxas waits for each product of an H100's tensor cores on its own: "C7511: insufficient register resources ...".

        Such a kernel has as few instructions as any other, and is slower: the tensor cores idle between two products.
        Loop.waits counts what came of it. Empty where the code waits as rarely as the PTX does.
        """
        return self._assembled.serialized

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory of a block, static and dynamic; None where XLA does not tell the latter."""
        dynamic = self.dynamic_shared_bytes
        return None if dynamic is None else dynamic + self._assembled.static_shared_bytes

    @property
    def blocks_per_multiprocessor(self) -> int | None:
        """How many blocks fit on one multiprocessor; None where the shared memory is unknown."""
        if self.shared_bytes is None:
            return None
        warps = -(-self.threads // 32)
        return min(
            REGISTERS // (warps * _round_up(32 * self.registers, 256)),  # a warp's registers come in units of 256
            self.target.shared_per_multiprocessor // _round_up(self.shared_bytes + RESERVED_SHARED, 128),
            self.target.threads_per_multiprocessor // (32 * warps),
            self.target.blocks_per_multiprocessor,
        )

    # -------------------------------------------------------------------------------------- from the disassembler

    @functools.cached_property
    def sass(self) -> str:
        """The machine code, disassembled."""
        with tempfile.TemporaryDirectory() as folder:
            cubin = pathlib.Path(folder, "kernel.cubin")
            cubin.write_bytes(self._assembled.cubin)
            return _run("nvidia-cuda-nvdisasm", "nvdisasm", "--print-code", cubin)

    @functools.cached_property
    def encoded(self) -> str:
        """The machine code, disassembled, each instruction with its encoding."""
        with tempfile.TemporaryDirectory() as folder:
            cubin = pathlib.Path(folder, "kernel.cubin")
            cubin.write_bytes(self._assembled.cubin)
            return _run("nvidia-cuda-nvdisasm", "nvdisasm", "--print-code", "-hex", cubin)

    def estimate(self, loop: Loop) -> Estimate | None:
        """An ESTIMATE of what a round of one of its loops takes; None where the blocks on a multiprocessor are not known.

        Nor on B200, whose tensor-core instructions do not name the sizes of their tiles.
        """
        blocks = self.blocks_per_multiprocessor
        if not blocks or not loop.cycles["tensor"]:
            return None
        return simulate(decode(self.encoded, loop.start, loop.end), self.target, blocks, self.threads)

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops, in the order of their ends."""
        return find_loops(self.sass, self.target)

    @property
    def busy(self) -> tuple[Loop, ...]:
        """The innermost loops with work for the tensor cores; a masked twin of a loop is one of its own."""
        loops = [loop for loop in self.loops if loop.cycles["tensor"]]
        return tuple(loop for loop in loops if not any(loop.contains(other) for other in loops))

    @property
    def hot(self) -> Loop | None:
        """The innermost loop with the most work for the tensor cores; the shortest, where a masked twin has as much.

        None where there is no such loop, and on B200, whose tensor-core instructions do not name the sizes of their tiles.
        """
        return max(self.busy, key=lambda loop: (loop.cycles["tensor"], -loop.cycles["issue"]), default=None)

    @property
    def issue_per_tensor(self) -> float | None:
        """Issue slots that the hot loop takes for each cycle that it gives the tensor cores, by the assumed rates.

        At 1 and less, two blocks or more on a multiprocessor could keep the tensor cores busy. None without hot loop.
        """
        return self.hot.cycles["issue"] / self.hot.cycles["tensor"] if self.hot else None

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.tensor_cores or 'no tensor cores'}, {self.registers} registers, {self.spill_bytes} bytes "
            f"spilled, {self.shared_bytes} bytes shared, {self.threads} threads, grid {self.grid}, "
            f"{self.blocks_per_multiprocessor} blocks on a multiprocessor"
        )
        text = "\n  SERIALIZED, ".join((text, *self.serialized))
        return f"{text}\n  {self.hot}" if self.hot else text

    @functools.cached_property
    def _assembled(self) -> Assembled:
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = pathlib.Path(folder, "module.ptx"), pathlib.Path(folder, "kernel.cubin")
            ptx.write_text(self.module)
            options = ("--verbose", "--gpu-name", self.target.architecture, "--entry", self.name)
            report = _run("nvidia-cuda-nvcc", "ptxas", *options, ptx, "--output-file", cubin)
            number = lambda what: sum(map(int, re.findall(rf"(\d+) {what}", report)))
            return Assembled(
                registers=number("registers"),
                spill_bytes=number("bytes spill"),
                static_shared_bytes=number("bytes smem"),
                serialized=serialized(report),
                cubin=cubin.read_bytes(),
            )


class Assembled(NamedTuple):
    """What ptxas makes of a kernel, and says about it."""

    registers: int
    spill_bytes: int
    static_shared_bytes: int
    serialized: tuple[str, ...]
    cubin: bytes


def serialized(report: str) -> tuple[str, ...]:
    """Why products are waited for one by one, out of what ptxas says."""
    return tuple(f"{code}: {why}" for code, why in re.findall(SERIALIZED, report, re.MULTILINE))


def _run(wheel: str, tool: str, *args) -> str:
    """What a tool out of a wheel says."""
    path = importlib.metadata.distribution(wheel).locate_file(f"nvidia/cu13/bin/{tool}")
    done = subprocess.run([str(path), *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr}")
    return done.stdout + done.stderr


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
