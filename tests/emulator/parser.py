"""From the text of a PTX module to kernels, as lists of instructions.

Only what kernels of XLA's Triton are written with: no functions, no local or constant memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from emulator.errors import Unknown
from emulator.types import bits

# ---------------------------------------------------------------------------------------------------------- operands


@dataclasses.dataclass(frozen=True)
class Register:
    name: str


@dataclasses.dataclass(frozen=True)
class Integer:
    value: int


@dataclasses.dataclass(frozen=True)
class Float:
    """A float by its bits: 0f3F800000, or 0d and sixteen digits."""

    encoded: int
    size: int


@dataclasses.dataclass(frozen=True)
class Special:
    """A register that the hardware fills: %tid.x."""

    name: str


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A label, a parameter, or an array in shared memory."""

    name: str


@dataclasses.dataclass(frozen=True)
class Address:
    """[base + offset]"""

    base: Operand
    offset: int


@dataclasses.dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    parts: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """a|b: two results."""

    parts: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class Not:
    """!a, of a predicate."""

    register: Operand


@dataclasses.dataclass(frozen=True)
class Nothing:
    """_: a result that is thrown away."""


Operand = Register | Integer | Float | Special | Symbol | Address | Vector | Pair | Not | Nothing

# ------------------------------------------------------------------------------------------------------ instructions


@dataclasses.dataclass(frozen=True)
class Instruction:
    guard: tuple[str, bool] | None  # @p or @!p: the register, and whether it is negated
    name: str  # mma
    modifiers: tuple[str, ...]  # sync, aligned, m16n8k16, ...
    operands: tuple[Operand, ...]
    line: int  # of the module
    text: str

    @property
    def kind(self) -> str:
        """The type it works on: its last modifier."""
        return self.modifiers[-1]

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Label:
    name: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    target: str  # the architecture: sm_80
    parameters: tuple[str, ...]  # all of them pointers
    threads: int  # of a block, 0 where the text does not say
    body: tuple[Instruction | Label, ...]
    registers: dict[str, str]  # name: type
    symbols: dict[str, int]  # name: address in shared memory
    static_shared: int  # bytes of shared memory that symbols take


SPECIAL = re.compile(r"%((n?tid|n?ctaid|cluster_n?ctaid|n?clusterid)\.[xyz]|laneid|warpid|cluster_ctarank)$")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SHARED = re.compile(r"^\s*(?:\.visible\s+|\.extern\s+)*\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]", re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_STATEMENT = re.compile(r"(\s*)(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):|(?P<text>[^;]*);)")


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a module by name."""
    text = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    target = re.search(r"\.target\s+(\w+)", text)
    symbols, shared = {}, 0
    for align, name, size in _SHARED.findall(text):
        symbols[name] = -(-shared // int(align)) * int(align)
        shared = symbols[name] + int(size or 0)
    kernels = {}
    for entry in _ENTRY.finditer(text):
        name, parameters, directives = entry.groups()
        parameters = re.findall(r"\.param\s+\.[bu]64[^,]*?([\w$]+)\s*(?:,|$)", parameters)
        if len(parameters) != entry[2].count(".param"):
            raise Unknown(f"parameters of {name} that are no pointers: {entry[2]}")
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", directives)
        body, registers = _body(text, entry.end())
        kernels[name] = Kernel(
            name,
            target[1] if target else "",
            tuple(parameters),
            int(threads[1]) if threads else 0,
            tuple(body),
            registers,
            symbols,
            shared,
        )
    return kernels


def _body(text: str, position: int) -> tuple[list[Instruction | Label], dict[str, str]]:
    """The statements from a position to the brace that closes the kernel, and the registers that they declare."""
    body: list[Instruction | Label] = []
    registers: dict[str, str] = {}
    scopes: list[dict[str, str]] = [{}]  # what a name means, innermost last
    line = 1 + text.count("\n", 0, position)
    while scopes:
        found = _STATEMENT.match(text, position)
        if not found:
            raise Unknown(f"line {line}: {text[position : position + 80]}")
        line += found[1].count("\n")
        if found["open"]:
            scopes.append(dict(scopes[-1]))
        elif found["close"]:
            scopes.pop()
        elif found["label"]:
            body.append(Label(found["label"]))
        elif declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", found["text"], re.S):
            for name in _declared(declared[2]):
                own = name if len(scopes) == 1 else f"{name} of scope {position}"
                scopes[-1][name] = own
                registers[own] = declared[1]
                bits(declared[1])
        elif found["text"].startswith("."):
            if not re.match(r"\.(pragma|loc|file)\b", found["text"]):
                raise Unknown(f"line {line}: {found['text']}")
        elif found["text"]:
            body.append(_instruction(" ".join(found["text"].split()), scopes[-1], line))
        line += found[0].count("\n") - found[1].count("\n")
        position = found.end()
    return body, registers


def _declared(names: str) -> Iterator[str]:
    """The registers in `%r<3>, t`: %r0, %r1, %r2 and t."""
    for name in names.replace(" ", "").split(","):
        several = re.match(r"(.*)<(\d+)>$", name)
        yield from (f"{several[1]}{n}" for n in range(int(several[2]))) if several else (name,)


def _instruction(text: str, scope: dict[str, str], line: int) -> Instruction:
    guard, rest = None, text
    if found := re.match(r"@(!?)([%\w$]+)\s+(.*)", text):
        guard, rest = (scope.get(found[2], found[2]), bool(found[1])), found[3]
    opcode, _, operands = rest.partition(" ")
    name, *modifiers = opcode.split(".")
    return Instruction(guard, name, tuple(modifiers), tuple(_operand(x, scope) for x in _split(operands)), line, text)


def _split(text: str, separator: str = ",") -> list[str]:
    """The parts between separators that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str, scope: dict[str, str]) -> Operand:
    if text in scope:  # nearly all are registers
        return Register(scope[text])
    several = lambda inner, separator=",": tuple(_operand(x, scope) for x in _split(inner, separator))
    if text.startswith("{"):
        return Vector(several(text[1:-1]))
    if text.startswith("["):
        found = re.match(r"\[\s*([^\s+,]+?)\s*(?:([+-])\s*(-?\w+))?\s*\]$", text)
        if not found:
            raise Unknown(f"the address {text}")
        offset = int(found[3], 0) if found[2] else 0
        return Address(_operand(found[1], scope), -offset if found[2] == "-" else offset)
    if re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", text):
        return Integer(int(text.rstrip("U"), 0))
    if re.match(r"0[fF][0-9a-fA-F]{8}$|0[dD][0-9a-fA-F]{16}$", text):
        return Float(int(text[2:], 16), 4 * len(text[2:]))
    if text == "_":
        return Nothing()
    if text.startswith("!"):
        return Not(_operand(text[1:], scope))
    if "|" in text:
        return Pair(several(text, "|"))
    return Special(text) if SPECIAL.match(text) else Symbol(text)
