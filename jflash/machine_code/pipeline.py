"""An ESTIMATE of the cycles that a round of a loop takes: a quarter of a multiprocessor, simulated.

Counts of instructions know of no latency; here each warp waits as its machine code says. The compiler writes into every
instruction for how many cycles the next one must wait, and which of six barriers it sets and waits for; decode() reads
that. What takes how long then is assumed: the rates of loops.py, and LATENCIES, guesses of the order of what microbenchmarks
of such GPUs give (among them Luo et al. 2024, arXiv:2402.13499); none of them was checked on a device.

Left out: bank conflicts, the operands that products read from shared memory, misses of the instruction cache, branches
taken within a round, the beginning and the end of a kernel, the last wave of blocks, and that a busy GPU lowers its clock.
So it is not worth much: beside five launches of tokamax's forward that were measured on an H100 it is 13 to 44 percent too
fast, right in the order of three at head_dim 64, wrong in that of 128 and 256, after its assumptions had been changed once
to come closer. `python -m benchmarks.pipeline` shows that. Use it to see where a loop waits, not to say how fast it is.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import NamedTuple

from jflash.machine_code.gpus import Target
from jflash.machine_code.loops import PIPE_OF, WAIT, tensor_cycles

ROUNDS, WARM = 16, 6  # each warp goes through the loop so many times; the first ones are not counted

# Cycles from the issue of an instruction to its result, where that is not in the machine code: guesses.
LATENCIES = {
    "MUFU": 24,
    "LDS": 30,
    "LDSM": 33,
    "SHFL": 24,
    "LDG": 300,
    "LDGSTS": 300,  # out of the second-level cache
    "products": 32,  # of HGMMA, behind the last cycle in which it holds the tensor core; HMMA likewise
    "BAR": 20,  # from the last warp's arrival
}
OTHER = 20  # cycles of an instruction of variable latency that is not listed
READ = 12  # cycles until an instruction has read its operands, where others wait for that
PORT, L2 = 64, 26  # bytes a cycle: that one multiprocessor can take, and its share of a second-level cache of 6 TB/s: guesses


class Step(NamedTuple):
    """One instruction, and how it is scheduled."""

    text: str
    opcode: str
    stall: int  # cycles until the next one may issue
    written: int | None  # the barrier that waits for its result
    read: int | None  # the barrier that waits until its operands are read
    waits: tuple[int, ...]  # barriers that must be clear before it


def decode(sass: str, start: int, end: int) -> list[Step]:
    """The instructions between two addresses in a disassembly with encodings (nvdisasm -hex), on Volta and newer.

    An instruction has 128 bits. From bit 105: 4 of stall cycles, 1 of yield, 3 + 3 of the barriers that it sets (7: none),
    6 that it waits for (Jia et al. 2018, arXiv:1804.06826, section 2.1).
    """
    steps = []
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:@\S+\s+)?([A-Z]\w*)([^;]*);[^\n]*\n\s+/\* 0x([0-9a-f]{16}) \*/"
    for address, opcode, rest, high in re.findall(pattern, sass):
        if start <= int(address, 16) <= end:
            control = int(high, 16) >> 41
            barrier = lambda bits: None if bits & 7 == 7 else bits & 7
            waits = tuple(n for n in range(6) if control >> 11 + n & 1)
            steps.append(Step(opcode + rest, opcode, control & 15, barrier(control >> 5), barrier(control >> 8), waits))
    return steps


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a simulation came to. An estimate, see above."""

    cycles: float  # in which each block on the multiprocessor goes through one round
    tensor_share: float  # of them, those in which the tensor cores multiply
    issue_share: float  # and those in which an instruction issues

    def __str__(self) -> str:
        shares = f"tensor cores busy {self.tensor_share:.0%}, issue {self.issue_share:.0%}"
        return f"ESTIMATE: {self.cycles:.0f} cycles a round, {shares}"


@dataclasses.dataclass
class _Warp:
    block: int
    ready: float = 0.0  # when its next instruction may issue, as far as stalls say
    at: int = 0
    round: int = 0
    clear: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 6)  # when each of its barriers is
    products: list[float] = dataclasses.field(default_factory=list)  # when each group of products is done
    open_group: float = 0.0
    copies: list[float] = dataclasses.field(default_factory=list)  # when each group of copies to shared memory is there
    open_copies: float = 0.0
    arrived: int = 0  # at how many barriers of its block
    turn: int = 0  # when it issued last, in instructions of all


def simulate(steps: list[Step], target: Target, blocks: int, threads: int) -> Estimate:
    """The loop's steady state with so many blocks on a multiprocessor."""
    per_block = max(1, threads // 128)  # warps of a block in each quarter
    warps = [_Warp(block) for block in range(blocks) for _ in range(per_block)]
    free: dict[str, float] = collections.defaultdict(float)  # when each pipe is
    arrivals: dict[tuple[int, int], list[float]] = collections.defaultdict(list)  # of (block, which barrier in its life)
    costs = [_cost(step, target) for step in steps]
    now, turns, began, done = 0.0, 0, None, 0
    while any(warp.round < ROUNDS for warp in warps):
        # The first that may issue, and of several that whose last instruction is the longest ago: nothing is known of it.
        when, _, warp = min(
            ((max(_when(warp, steps, costs, free, arrivals, per_block), now), warp.turn, warp) for warp in warps),
            key=lambda candidate: candidate[:2],
        )
        if when == float("inf"):
            raise RuntimeError(f"the loop never goes on: {steps[warps[0].at].text}")
        _issue(warp, steps[warp.at], *costs[warp.at], when, free, arrivals)
        now, turns = when + 1, turns + 1
        warp.at, warp.turn = warp.at + 1, turns
        if warp.at == len(steps):
            warp.at, warp.round = 0, warp.round + 1
            if began is not None:
                done += 1
            elif all(other.round >= WARM for other in warps):
                began = now
    assert began is not None
    cycles = (now - began) * len(warps) / done
    held = lambda of: sum(cycles for pipe, cycles in costs if pipe == of) * len(warps)
    cycles = max(cycles, held("tensor"), held("copies") * PORT / L2)
    return Estimate(cycles, held("tensor") / cycles, len(steps) * len(warps) / cycles)


def _cost(step: Step, target: Target) -> tuple[str, float]:
    """The pipe that an instruction needs, and for how many cycles it holds it."""
    if cycles := tensor_cycles(step.text, target):
        return "tensor", cycles
    if step.opcode == "LDGSTS":
        width = int(match[1]) // 8 if (match := re.search(r"\.(32|64|128)\b", step.text)) else 4
        return "copies", 4 * 32 * width / PORT
    pipe, held = PIPE_OF.get(step.opcode, ("issue", 1))
    return pipe, held * (128 / target.fp32_lanes if pipe == "fma" else 1)


def _when(warp: _Warp, steps, costs, free, arrivals, per_block: int) -> float:
    """The earliest cycle in which the warp may issue its next instruction; infinity where another must move first."""
    step, (pipe, _) = steps[warp.at], costs[warp.at]
    when = max([warp.ready, *(warp.clear[n] for n in step.waits)])
    if pipe not in ("tensor", "copies") or step.opcode == "HMMA":  # HGMMA and copies queue; the others hold up their warp
        when = max(when, free[pipe])
    if step.text.startswith(WAIT) or step.opcode == "DEPBAR":
        groups = warp.products if step.text.startswith(WAIT) else warp.copies
        pending = int(match[1], 16) if (match := re.search(r", 0x([0-9a-f]+)", step.text)) else 0
        if len(groups) > pending:
            when = max(when, groups[len(groups) - pending - 1])
    if warp.arrived and (waited := arrivals[warp.block, warp.arrived]) is not None:
        if len(waited) < per_block:
            return float("inf")
        when = max(when, max(waited) + LATENCIES["BAR"])
    return when


def _issue(warp: _Warp, step: Step, pipe: str, held: float, now: float, free, arrivals) -> None:
    start = max(now, free[pipe])
    free[pipe] = start + held
    latency = LATENCIES["products"] if pipe == "tensor" else LATENCIES.get(step.opcode, OTHER)
    done = start + held + latency
    if step.opcode == "HGMMA":
        warp.open_group = max(warp.open_group, done)
        if "gsb0" in step.text:
            warp.products.append(warp.open_group)
    elif step.opcode == "LDGSTS":
        warp.open_copies = max(warp.open_copies, done)
    elif step.opcode == "LDGDEPBAR":
        warp.copies.append(warp.open_copies)
    elif step.opcode == "BAR":
        warp.arrived += 1
        arrivals[warp.block, warp.arrived].append(now)
    if step.written is not None:
        warp.clear[step.written] = max(warp.clear[step.written], done)
    if step.read is not None:
        warp.clear[step.read] = max(warp.clear[step.read], now + READ)
    warp.ready = now + max(step.stall, 1)
