"""The loops of a kernel's machine code, and how long one round of each would keep the pipes of a multiprocessor busy."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from jflash.machine_code.gpus import Target

# For how many cycles one instruction of a warp holds its pipe in a quarter of a multiprocessor, which issues one
# instruction a cycle. From the table of arithmetic throughput in the CUDA programming guide (results a cycle of a
# multiprocessor, so 32 lanes / (results / 4)), for compute capability 9.0 and not checked on any device; what is not
# listed costs its issue slot alone. "fma" is scaled by the GPU's number of lanes.
PIPES = {
    ("fma", 1): "FADD FMUL FFMA HADD2 HMUL2 HFMA2",
    ("fma", 2): "IMAD FADD2 FMUL2 FFMA2",
    ("alu", 2): (
        "BMSK CS2R F2FP FCHK FMNMX FMNMX3 FSEL FSET FSETP I2FP IABS IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P "
        "SEL SGXT SHF VIADD VIMNMX"
    ),
    ("special", 8): "BREV F2F F2I FLO I2F MUFU POPC",
    ("memory", 4): "ATOM ATOMG ATOMS LD LDG LDGSTS LDL LDS LDSM RED SHFL ST STG STL STS STSM UTMALDG UTMASTG",
}
WAIT = "WARPGROUP.DEPBAR"  # wgmma.wait_group
PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}


class Instruction(NamedTuple):
    address: int
    opcode: str  # without its modifiers: HGMMA
    text: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """What stands between a branch backwards and its aim: roughly what one warp executes in a round."""

    start: int  # addresses of the first and the last instruction
    end: int
    opcodes: Mapping[str, int]  # how many instructions of each
    cycles: Mapping[str, float]  # a round, of each pipe: "issue", "tensor" and those of PIPES
    waits: int  # how often it waits for products that run beside it (HGMMA): serialized, as often as it starts one

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    def contains(self, other: Loop) -> bool:
        return self is not other and self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        cycles = ", ".join(f"{pipe} {cycles:.0f}" for pipe, cycles in sorted(self.cycles.items(), key=lambda item: -item[1]))
        waits = f" ({self.waits} waits for {self.opcodes['HGMMA']} HGMMA)" if self.waits else ""
        return f"loop {self.start:#x}-{self.end:#x}, {self.instructions} instructions{waits}, cycles of a round: {cycles}"


def find_loops(sass: str, target: Target) -> tuple[Loop, ...]:
    """The loops in the disassembly of one kernel, inner and outer, in the order of their ends."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}  # to the index in `code` of the instruction that follows
    loops = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif parts := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@\S+\s+)?([A-Z]\w*)(.*);", line):
            code.append(Instruction(int(parts[1], 16), parts[2], parts[2] + parts[3]))
            # A label that is not known yet lies ahead: no loop. A branch to itself ends the kernel: nor this.
            target_label = re.search(r"`\((\.L_\w+)\)", line) if parts[2] == "BRA" else None
            if target_label and labels.get(target_label[1], len(code)) < len(code) - 1:
                loops.append(_loop(code[labels[target_label[1]] :], target))
    return tuple(loops)


def tensor_cycles(text: str, target: Target) -> float:
    """For how many cycles an instruction holds the tensor core of a quarter of a multiprocessor; 0 if it is no product.

    HGMMA.64x128x16: the 64 rows lie in four warps, one in each quarter. HMMA.16816: 16 x 8 x 16 in one warp. float16 and
    bfloat16 take one time, TF32 twice that. B200's UTCHMMA counts as 0: its sizes stand in a register.
    """
    if shape := re.match(r"HGMMA\.64x(\d+)x(\d+)", text):
        products = 16 * int(shape[1]) * int(shape[2])
    elif shape := re.match(r"HMMA\.168(\d+)", text):
        products = 16 * 8 * int(shape[1])
    else:
        return 0.0
    return products / target.tensor_rate * (2 if "TF32" in text else 1)


def _loop(code: list[Instruction], target: Target) -> Loop:
    cycles: dict[str, float] = collections.defaultdict(float)
    for instruction in code:
        cycles["issue"] += 1
        cycles["tensor"] += tensor_cycles(instruction.text, target)
        pipe, held = PIPE_OF.get(instruction.opcode, ("other", 0))
        cycles[pipe] += held * (128 / target.fp32_lanes if pipe == "fma" else 1)
    opcodes = collections.Counter(instruction.opcode for instruction in code)
    cycles = {pipe: n for pipe, n in cycles.items() if n or pipe == "tensor"}
    waits = sum(instruction.text.startswith(WAIT) for instruction in code)
    return Loop(code[0].address, code[-1].address, opcodes, cycles, waits)
