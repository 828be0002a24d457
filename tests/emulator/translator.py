"""From basic blocks to Python functions.

A basic block becomes `block_7(R, M, m)`: R holds the registers that outlive basic blocks, M is the machine (execution.py)
and m says which threads run it, None for all. Within it a register is a local variable, an array of one value a thread.
That variables are assigned once lets the function keep a register in several views at once, and makes `mov` free.

What an instruction does is written in instructions/, as functions of the translator and the instruction, that say what
they read and write; `call` puts a Python function into the reach of the generated code.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from emulator import control_flow, types
from emulator.control_flow import BasicBlock
from emulator.errors import Unknown
from emulator.fragments import unpack_product
from emulator.parser import Float, Instruction, Integer, Kernel, Not, Nothing, Operand, Register, Special, Symbol, Vector

WIDE = "wide"  # the view of a float32 as a float64, in which products are exact
HANDLERS: dict[str, Callable[[Translator, Instruction], None]] = {}


def instruction(*names: str):
    """Makes a function the meaning of the instructions of these names."""

    def add(handler):
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return add


@dataclasses.dataclass(eq=False)
class Value:
    """What a register holds, in all views that were asked for. One is equal to itself only."""

    bits: int
    views: dict[str, str]  # view: variable
    product: tuple[str, int] | None = None  # of matrices, and which of its four registers: unpacked when it is asked for


class Translator:
    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.blocks = control_flow.basic_blocks(kernel)
        every = [i for block in self.blocks for i in block.instructions]
        # Registers that wgmma writes late are only in R.
        self.late = {name for i in every if control_flow.is_wgmma(i) for name in control_flow.registers_of(i.operands[0])}
        kept = {name for block in self.blocks for name in block.reads | block.keeps}
        self.slots = {name: slot for slot, name in enumerate(sorted(kept | self.late))}
        self.counts: list[collections.Counter[str]] = []  # of instructions in each block
        self._reach: dict[str, Any] = {**types.VIEWS, "np": np, "where": np.where}
        self._constants: dict[Any, str] = {}
        self._variables = 0
        source = "\n".join(line for block in self.blocks for line in self._function(block))
        exec(compile(source, f"<{kernel.name}>", "exec"), self._reach)
        self.functions: list[Callable] = [self._reach[f"block_{block.number}"] for block in self.blocks]

    def _function(self, block: BasicBlock) -> list[str]:
        self._lines: list[str] = []
        self._values: dict[str, Value] = {}
        self._unpacked: dict[str, str] = {}
        self.fragments: dict[Any, str] = {}  # matrices that mma has made of registers, to be used again
        counts: collections.Counter[str] = collections.Counter()
        for i in block.instructions:
            counts[i.name] += 1
            if i.name not in ("bra", "ret", "exit"):
                self._translate(i)
        self.counts.append(counts)
        self.guard, self.site = None, "at a branch"
        if kept := sorted(block.keeps - self.late):
            values = {name: self._view(self._value(name), types.raw(self.bits(name))) for name in kept}
            self.emit("if m is None:")
            for name, value in values.items():
                self.emit(f"    R[{self.slots[name]}] = {value}")
            self.emit("else:")
            for name, value in values.items():
                self.emit(f"    R[{self.slots[name]}] = where(m, {value}, R[{self.slots[name]}])")
        if block.condition:
            name, negated = block.condition
            self.emit(f"return {'~' * negated}{self.read(Register(name), '?')}")
        return [f"def block_{block.number}(R, M, m):", *(self._lines or ["    pass"])]

    def _translate(self, i: Instruction) -> None:
        self.guard, self.site = None, self.constant(str(i))
        if i.guard:
            name, negated = i.guard
            self.guard = self.variable(f"{'~' * negated}{self.read(Register(name), '?')}")
        if i.name not in HANDLERS:
            raise Unknown(str(i))
        try:
            HANDLERS[i.name](self, i)
        except Unknown as error:
            raise Unknown(f"{i} ({error})") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:  # a form of it that is not foreseen
            raise Unknown(f"{i} ({type(error).__name__}: {error})") from error

    # ------------------------------------------------------------------------------------------------ what is written

    def emit(self, line: str) -> None:
        self._lines.append("    " + line)

    def variable(self, expression: str) -> str:
        """A new variable of that value."""
        self._variables += 1
        self.emit(f"t{self._variables} = {expression}")
        return f"t{self._variables}"

    def constant(self, value: Any) -> str:
        """The name of a value: a numpy number, or a text."""
        key = (value.dtype.str, value.tobytes()) if isinstance(value, np.generic) else value
        if key not in self._constants:
            self._constants[key] = name = f"K{len(self._constants)}"
            self._reach[name] = value
        return self._constants[key]

    def call(self, function: Callable, *expressions: Any) -> str:
        """The expression function(*expressions); what is no text stands for itself."""
        name = function.__name__
        assert self._reach.setdefault(name, function) is function, name
        return f"{name}({', '.join(x if isinstance(x, str) else repr(x) for x in expressions)})"

    def mask(self) -> str:
        """Who executes the instruction."""
        return "m" if self.guard is None else f"M.both(m, {self.guard})"

    # ----------------------------------------------------------------------------------------------------- registers

    def bits(self, name: str) -> int:
        if name not in self.kernel.registers:
            raise Unknown(f"the register {name}")
        return types.bits(self.kernel.registers[name])

    def width(self, operand: Operand, otherwise: int) -> int:
        """The bits of a register; an immediate has as many as are asked for."""
        return self.bits(operand.name) if isinstance(operand, Register) else otherwise

    def _value(self, name: str) -> Value:
        if name in self.late:
            raw = self.variable(f"M.wgmma.read({self.slots[name]}, R, m, {self.site})")
            return Value(self.bits(name), {types.raw(self.bits(name)): raw})
        if name not in self._values:
            if name not in self.slots:
                raise Unknown(f"{name} is read and never written")
            bits = self.bits(name)
            self._values[name] = Value(bits, {types.raw(bits): self.variable(f"R[{self.slots[name]}]")})
        return self._values[name]

    def _view(self, value: Value, view: str) -> str:
        if view in value.views:
            return value.views[view]
        if value.product and not value.views:
            matrix, k = value.product
            if matrix not in self._unpacked:
                self._unpacked[matrix] = self.variable(self.call(unpack_product, matrix))
            value.views["f4"] = self.variable(f"{self._unpacked[matrix]}[{k}]")
            return self._view(value, view)
        if view == WIDE:
            made = f"{self._view(value, 'f4')}.astype(f8)"
        elif value.bits == 1 or view == "?" or int(view[1:]) * 8 != value.bits:
            raise Unknown(f"a register of {value.bits} bits as {view}")
        else:
            made = f"{next(name for seen, name in value.views.items() if seen != WIDE)}.view({view})"
        value.views[view] = self.variable(made)
        return value.views[view]

    def read(self, operand: Operand, view: str) -> str:
        """The expression of an operand: an array of one value a thread, or a numpy scalar for an immediate."""
        match operand:
            case Register(name):
                return self._view(self._value(name), view)
            case Not(register):
                return f"(~{self.read(register, '?')})"
            case Integer(value) if view == "?":
                return self.constant(np.bool_(value != 0))
            case Integer(value):
                return self.constant(_immediate(value, view))
            case Float(encoded, _):
                return self.constant(_immediate(encoded, view))
            case Special(name):
                return f"M.special({name!r}).astype({view})"
            case Symbol(name) if name in self.kernel.symbols:
                return self.constant(_immediate(self.kernel.symbols[name], view))
        raise Unknown(f"the operand {operand}")

    def read_array(self, operand: Operand, view: str) -> str:
        """Like read(), an array always."""
        expression = self.read(operand, view)
        return expression if _many(operand) else f"M.full({expression})"

    def write(self, target: Operand, view: str, expression: str) -> None:
        """Assigns to a register, where the guard of the instruction holds."""
        if isinstance(target, Nothing):
            return
        if not isinstance(target, Register):
            raise Unknown(f"{target} as a result")
        if self.guard:
            expression = f"where({self.guard}, {expression}, {self.read(target, view)})"
        made = expression if expression.isidentifier() else self.variable(expression)
        bits = self.bits(target.name)
        if (1 if view == "?" else 8 * int(view[1:])) != bits:
            raise Unknown(f"{view} into a register of {bits} bits")
        if target.name in self.late:
            self.emit(f"M.wgmma.write({self.slots[target.name]}, R, {made}.view({types.raw(bits)}), m, {self.site})")
        else:
            self._values[target.name] = Value(bits, {view: made})

    def write_product(self, targets: Sequence[Operand], matrix: str) -> None:
        """Assigns the four registers of a product of matrices, which stays a matrix until they are asked for."""
        for k, target in enumerate(targets):
            if not isinstance(target, Register) or target.name in self.late:
                raise Unknown(f"{target} as a part of a product")
            self._values[target.name] = Value(32, {}, (matrix, k))

    def product_of(self, operands: Sequence[Operand]) -> str | None:
        """The matrix that these registers are a product of, if they are."""
        products = [self._value(x.name).product if isinstance(x, Register) else None for x in operands]
        matrix = products[0] and products[0][0]
        return matrix if matrix and products == [(matrix, k) for k in range(4)] else None

    def alias(self, target: Register, source: Register) -> bool:
        """target = source, without an instruction; False where that cannot be."""
        if self.guard or {target.name, source.name} & self.late or self.bits(target.name) != self.bits(source.name):
            return False
        self._values[target.name] = self._value(source.name)
        return True

    def identity(self, operands: Sequence[Operand]) -> tuple:
        """What tells whether operands hold what they held before."""
        return tuple(self._value(x.name) if isinstance(x, Register) else x for x in operands)

    # --------------------------------------------------------------------------------------------- common instructions

    def elementwise(self, i: Instruction, view: str, template: str, sources: Sequence[Operand] | None = None, to: str = ""):
        """The first operand becomes template.format(*sources), each seen in `view`; `to`: the view of the result."""
        sources = i.operands[1:] if sources is None else sources
        result = template.format(*(self.read(x, view) for x in sources))
        self.write(i.operands[0], to or view, result if any(map(_many, sources)) else f"M.full({result})")

    def address(self, operand: Any) -> str:
        """u8, of [base + offset]."""
        width = self.width(operand.base, 64)
        base = self.read_array(operand.base, f"u{width // 8}")
        base = base if width == 64 else f"{base}.astype(u8)"
        return f"({base} + {self.constant(_immediate(operand.offset, 'u8'))})" if operand.offset else base


def parts(operand: Operand) -> tuple[Operand, ...]:
    """The registers of a vector, or the one that there is."""
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _many(operand: Operand) -> bool:
    """Whether an operand has a value for each thread."""
    return isinstance(operand, Register | Special | Not)


def _immediate(value: int, view: str) -> np.generic:
    if view == WIDE:
        return np.float64(_immediate(value, "f4"))
    size = int(view[1:])
    return np.array(value & (1 << 8 * size) - 1, f"u{size}").view(view)[()]
