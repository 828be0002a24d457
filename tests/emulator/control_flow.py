"""From a list of instructions to basic blocks, and which registers outlive them.

A basic block is entered at its first instruction only and left after its last. Where threads take different branches,
the block that stands first in the text runs first, by those who are in it, so that all meet again where their paths join:
compilers put the join behind both sides.
"""

from __future__ import annotations

import dataclasses

from emulator.errors import Unknown
from emulator.parser import Address, Instruction, Kernel, Label, Not, Operand, Pair, Register, Symbol, Vector

# All others write their first operand.
WRITE_NOTHING = {
    *("st", "bra", "ret", "exit", "bar", "barrier", "cp", "fence", "membar", "trap", "stmatrix", "prefetch"),
    *("setmaxnreg", "griddepcontrol"),
}


@dataclasses.dataclass
class BasicBlock:
    number: int
    instructions: list[Instruction]
    waits: bool = False  # its first instruction is a barrier: it runs once all threads of a block of the grid have come
    condition: tuple[str, bool] | None = None  # of the branch at its end, a guard; None: always
    target: int | None = None  # where that leads; the number behind the last block is the end
    following: int | None = None  # where it goes on without the branch
    reads: set[str] = dataclasses.field(default_factory=set)  # registers that others must have written
    keeps: set[str] = dataclasses.field(default_factory=set)  # those it writes that others read


def is_wgmma(instruction: Instruction) -> bool:
    return instruction.name == "wgmma" and instruction.modifiers[0] == "mma_async"


def basic_blocks(kernel: Kernel) -> list[BasicBlock]:
    blocks, labels = _cut(kernel)
    for block in blocks:
        last = block.instructions[-1]
        block.waits = _is_barrier(block.instructions[0])
        if last.name == "bra":
            (label,) = last.operands
            assert isinstance(label, Symbol)
            block.target, block.condition = labels[label.name], last.guard
        elif last.name in ("ret", "exit"):
            block.target, block.condition = len(blocks), last.guard
        block.following = block.number + 1 if block.target is None or block.condition else None
    _find_lifetimes(blocks)
    return blocks


def _cut(kernel: Kernel) -> tuple[list[BasicBlock], dict[str, int]]:
    """Blocks, without what follows them, and the number of the block at each label."""
    blocks, labels, current = [], {}, []

    def close():
        if current:
            blocks.append(BasicBlock(len(blocks), list(current)))
            current.clear()

    for item in kernel.body:
        if isinstance(item, Label):
            close()
            labels[item.name] = len(blocks)
            continue
        if _is_barrier(item):
            close()
            if item.guard:
                raise Unknown(f"{item}: a barrier under a predicate")
        current.append(item)
        if item.name in ("bra", "ret", "exit"):
            close()
    close()
    return blocks, labels


def _is_barrier(instruction: Instruction) -> bool:
    return instruction.name in ("bar", "barrier") and instruction.modifiers[0] in ("sync", "cta")


def registers_of(operand: Operand) -> list[str]:
    match operand:
        case Register(name):
            return [name]
        case Vector(parts) | Pair(parts):
            return [name for part in parts for name in registers_of(part)]
        case Address(inner, _) | Not(inner):
            return registers_of(inner)
    return []


def reads_and_writes(instruction: Instruction) -> tuple[list[str], list[str]]:
    writes_first = is_wgmma(instruction) if instruction.name == "wgmma" else instruction.name not in WRITE_NOTHING
    results = instruction.operands[:1] if writes_first else ()
    writes = [name for operand in results for name in registers_of(operand)]
    reads = [name for operand in instruction.operands[len(results) :] for name in registers_of(operand)]
    if instruction.guard:
        reads += [instruction.guard[0], *writes]  # what is not written stays
    if is_wgmma(instruction):
        reads += writes  # it adds to them
    return reads, writes


def _find_lifetimes(blocks: list[BasicBlock]) -> None:
    """Fills in `reads` and `keeps`: the usual analysis from the end to the beginning, until nothing changes."""
    writes: list[set[str]] = []
    for block in blocks:
        written: set[str] = set()
        for instruction in block.instructions:
            its_reads, its_writes = reads_and_writes(instruction)
            block.reads |= set(its_reads) - written
            written |= set(its_writes)
        writes.append(written)
    needed: list[set[str]] = [set() for _ in range(len(blocks) + 1)]  # when a block is entered
    changed = True
    while changed:
        changed = False
        for block, written in zip(reversed(blocks), reversed(writes), strict=True):
            after = set().union(*(needed[n] for n in (block.target, block.following) if n is not None))
            before = block.reads | (after - written)
            block.keeps = after & written
            changed |= before != needed[block.number]
            needed[block.number] = before
