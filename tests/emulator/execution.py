"""A launch, executed: the blocks of a grid, as many at once as make a vector of some thousand threads.

The loop of `_Machine.run` is a GPU's scheduler at its simplest. Threads wait at basic blocks; the first of these that any
thread waits at runs, for all that wait there. So threads that parted meet again, and a barrier lets nobody through before
all threads of its block have come.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

import emulator.instructions  # noqa: F401  the translator knows them from here on
from emulator.copies import Copies
from emulator.errors import Fault
from emulator.memory import ISLAND, Array, GlobalMemory
from emulator.report import Report
from emulator.shared import SharedMemory
from emulator.threads import WARP, Mask, Threads, Warps
from emulator.translator import Translator
from emulator.wgmma import Wgmma

AT_ONCE = 8192  # threads


def launch(
    program: Translator,
    grid: Sequence[int],
    threads: int,
    shared_bytes: int,
    operands: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    at_once: int = AT_ONCE,
) -> tuple[list[np.ndarray], Report]:
    """Runs a kernel: what it wrote, arrays like `results`, and what is to be said of it.

    Its parameters are the operands and then the results. Raises Fault for what a GPU would trap on or leave undefined.
    """
    kernel = program.kernel
    arrays = [Array(f"operand {n}", x, is_result=False) for n, x in enumerate(operands)]
    arrays += [Array(f"result {n}", x, is_result=True) for n, x in enumerate(results)]
    if len(arrays) != len(kernel.parameters):
        raise Fault(f"{kernel.name}: {len(arrays)} arrays for {len(kernel.parameters)} parameters")
    report = Report()
    x, y, z = (*grid, 1, 1)[:3]
    blocks, some = x * y * z, max(1, at_once // threads)
    with np.errstate(all="ignore"):
        for first in range(0, blocks, some):
            those = Threads(kernel.name, (x, y, z), np.arange(first, min(first + some, blocks)), threads)
            _Machine(program, those, arrays, max(shared_bytes, kernel.static_shared), report).run()
    written = arrays[len(operands) :]
    for array in written:
        if array.unwritten:
            report.problems[f"{array.unwritten} bytes of {array.name} are never written"] += 1
    return [array.value(like) for array, like in zip(written, results, strict=True)], report


class _Machine:
    """Some blocks of a grid; M in the functions that the translator makes."""

    def __init__(self, program: Translator, threads: Threads, arrays: list[Array], shared_bytes: int, report: Report):
        self.program, self.threads, self.report = program, threads, report
        self.arrays = GlobalMemory(arrays, threads, report)
        self.shared = SharedMemory(threads, shared_bytes, report)
        self.copies = Copies(threads, self.arrays, self.shared)
        self.warps = Warps(threads)
        self.wgmma = Wgmma(threads, self.shared, report)
        self._parameters = {
            name: np.full(threads.count, (n + 1) << ISLAND, "u8") for n, name in enumerate(program.kernel.parameters)
        }
        self._specials = _specials(threads)
        self._exited = np.zeros(threads.count, bool)

    # ------------------------------------------------------------------------------------ what generated code asks for

    def full(self, x) -> np.ndarray:
        """One value a thread."""
        return x if np.shape(x) == (self.threads.count,) else np.full(self.threads.count, x)

    def both(self, m: Mask, guard) -> np.ndarray:
        guard = self.full(guard)
        return guard if m is None else guard & m

    def special(self, name: str) -> np.ndarray:
        return self._specials[name]

    def parameter(self, name: str) -> np.ndarray:
        return self._parameters[name]

    def barrier(self, m: Mask) -> None:
        self.shared.races.barrier(None if m is None else self.threads.of_blocks(m).any(1))

    def trap(self, m: Mask, site: str) -> None:
        if m is None or m.any():
            raise self.threads.fault(site, 0 if m is None else int(np.argmax(m)), "a trap")

    # ------------------------------------------------------------------------------------------------------ the scheduler

    def run(self) -> None:
        program = self.program
        registers: list = [None] * len(program.slots)
        for name, slot in program.slots.items():  # registers that nobody wrote hold ones: NaN
            bits = program.bits(name)
            registers[slot] = np.full(self.threads.count, bits == 1 or (1 << bits) - 1, "?" if bits == 1 else f"u{bits // 8}")
        visits: collections.Counter[int] = collections.Counter()  # of basic blocks, by warps
        waiting: dict[int, Mask] = {0: None}  # basic block: who stands before it
        while waiting:
            number, m = self._next(waiting)
            block = program.blocks[number]
            visits[number] += self.threads.count // WARP if m is None else int(m.reshape(-1, WARP).any(1).sum())
            taken = program.functions[number](registers, self, m)
            if block.condition is None:
                self._send(waiting, block.following if block.target is None else block.target, m)
                continue
            taken = self.full(taken)
            self._send(waiting, block.target, self.both(m, taken))
            self._send(waiting, block.following, self.both(m, ~taken))
        self.wgmma.check_end()
        for number, times in visits.items():
            for name, count in program.counts[number].items():
                self.report.executed[name] += times * count

    def _next(self, waiting: dict[int, Mask]) -> tuple[int, Mask]:
        """Takes the first basic block that may run out of those that threads wait at: (its number, who runs it)."""
        for number in sorted(waiting):
            m = waiting.pop(number)
            if m is None or not self.program.blocks[number].waits:
                return number, m
            come = self.threads.of_blocks(m)
            complete = come.any(1) & self.threads.of_blocks(m | self._exited).all(1)
            ready = (come & complete[:, None]).reshape(-1)
            if (late := m & ~ready).any():
                waiting[number] = late
            if ready.any():
                return number, ready
        lines = ", ".join(f"line {self.program.blocks[number].instructions[0].line}" for number in waiting)
        raise Fault(f"{self.program.kernel.name}: threads of a block wait for each other at different barriers: {lines}")

    def _send(self, waiting: dict[int, Mask], number: int | None, m: Mask) -> None:
        assert number is not None
        if m is not None and not m.any():
            return
        if number == len(self.program.blocks):
            self._exited |= True if m is None else m
            return
        if number in waiting:
            other = waiting[number]
            m = None if m is None or other is None else m | other
        waiting[number] = None if m is None or m.all() else m


def _specials(threads: Threads) -> dict[str, np.ndarray]:
    """%tid.x and its like."""
    x, y, z = threads.grid
    block = threads.block_number
    one_dimensional = {
        "ctaid": (block % x, block // x % y, block // (x * y)),
        "nctaid": (x, y, z),
        "tid": (np.arange(threads.count) % threads.per_block, 0, 0),
        "ntid": (threads.per_block, 1, 1),
    }
    full = lambda value: np.full(threads.count, value, "u4")
    specials = {
        f"%{name}.{axis}": full(x) for name, values in one_dimensional.items() for axis, x in zip("xyz", values, strict=True)
    }
    tid = specials["%tid.x"]
    return specials | {"%laneid": tid % np.uint32(WARP), "%warpid": tid // np.uint32(WARP), "%cluster_ctarank": full(0)}
