"""Integers and floats: add to fma, and the functions that a GPU approximates, which are exact here."""

import numpy as np

from emulator import floats, types
from emulator.errors import Unknown
from emulator.floats import extreme, flush, from_bf16, from_f16, saturate, to_bf16, to_f16
from emulator.parser import Instruction
from emulator.translator import WIDE, Translator, instruction

FLOAT_MODIFIERS = {"rn", "ftz", "sat", "full", "approx", "NaN"}
FUNCTIONS = {
    "neg": "(-{})",
    "abs": "np.abs({})",
    "ex2": "np.exp2({})",
    "lg2": "np.log2({})",
    "rcp": "(1 / {})",
    "sqrt": "np.sqrt({})",
    "rsqrt": "(1 / np.sqrt({}))",
    "sin": "np.sin({})",
    "cos": "np.cos({})",
    "tanh": "np.tanh({})",
}


@instruction("add")
def add(t: Translator, i: Instruction):
    _arithmetic(t, i, "{} + {}")


@instruction("sub")
def sub(t: Translator, i: Instruction):
    _arithmetic(t, i, "{} - {}")


@instruction(*FUNCTIONS)
def function(t: Translator, i: Instruction):
    _arithmetic(t, i, FUNCTIONS[i.name])


@instruction("min", "max")
def minimum(t: Translator, i: Instruction):
    """Of a number and a NaN the number, but for .NaN."""
    if not types.floating(i.kind):
        _arithmetic(t, i, f"np.{i.name}imum({{}}, {{}})")
    else:
        function = f"np.{i.name}imum" if "NaN" in i.modifiers else f"np.f{i.name}"
        _arithmetic(t, i, t.call(extreme, function, "{}", "{}"))


def _arithmetic(t: Translator, i: Instruction, template: str):
    kind, modifiers = i.kind, set(i.modifiers[:-1])
    if types.floating(kind):
        if modifiers - FLOAT_MODIFIERS:
            raise Unknown(f"modifiers {modifiers}")
        if kind in types.HALVES:
            return _halves(t, i, template)
        return _floats(t, i, template)
    if modifiers - {"lo"}:
        raise Unknown(f"modifiers {modifiers}")
    return t.elementwise(i, types.view(kind), template)


def _floats(t: Translator, i: Instruction, template: str):
    if "ftz" in i.modifiers:
        flushed = t.call(flush, "{}")
        template = flushed.replace("{}", template.replace("{}", flushed))
    if "sat" in i.modifiers:
        template = t.call(saturate, template)
    t.elementwise(i, types.view(i.kind), template)


def _halves(t: Translator, i: Instruction, template: str):
    """Computed in float32 and rounded, as the hardware does; two in one register where the type says so."""
    from_16, to_16 = (from_bf16, to_bf16) if i.kind.startswith("bf16") else (from_f16, to_f16)
    view = types.view(i.kind)
    sources = [t.call(from_16, f"{t.read_array(x, view)}.view(u2)") for x in i.operands[1:]]
    t.write(i.operands[0], view, f"{t.call(to_16, template.format(*sources))}.view({view})")


@instruction("mul")
def mul(t: Translator, i: Instruction):
    size = types.bits(i.kind)
    if "wide" in i.modifiers:
        _widened(t, i, "{} * {}")
    elif "hi" in i.modifiers and size == 64:
        call = t.call(high_product, "{}", "{}", types.signed(i.kind))
        t.elementwise(i, "u8", call)
    elif "hi" in i.modifiers:
        wide = types.view(f"{i.kind[0]}{2 * size}")
        template = f"({{}}.astype({wide}) * {{}}.astype({wide}) >> {size}).astype({types.view(i.kind)})"
        t.elementwise(i, types.view(i.kind), template)
    else:
        _arithmetic(t, i, "{} * {}")


@instruction("mad")
def mad(t: Translator, i: Instruction):
    if "wide" in i.modifiers:
        wide = types.view(f"{i.kind[0]}{2 * types.bits(i.kind)}")
        _widened(t, i, "{} * {} + " + t.read_array(i.operands[3], wide))
    else:
        _arithmetic(t, i, "{} * {} + {}")


def _widened(t: Translator, i: Instruction, template: str):
    """A product of twice as many bits."""
    narrow, wide = types.view(i.kind), types.view(f"{i.kind[0]}{2 * types.bits(i.kind)}")
    template = template.replace("{}", f"{{}}.astype({wide})")
    t.elementwise(i, narrow, template, i.operands[1:3], to=wide)


def high_product(a, b, signed):
    """The upper 64 bits of a product of 128: by halves, as on paper."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    middle = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
    other = (a & low) * (b >> half) + (middle & low)
    high = (a >> half) * (b >> half) + (middle >> half) + (other >> half)
    if signed:
        top = np.uint64(63)
        high = high - np.where(a >> top, b, np.uint64(0)) - np.where(b >> top, a, np.uint64(0))
    return high


@instruction("fma")
def fma(t: Translator, i: Instruction):
    if i.kind in types.HALVES:
        return _halves(t, i, t.call(floats.fma, "{}", "{}", "{}"))
    modifiers = set(i.modifiers[:-1])
    if modifiers - {"rn", "rm", "rp", "rz", "ftz", "sat"}:
        raise Unknown(f"modifiers {modifiers}")
    if i.kind == "f64":
        return t.elementwise(i, "f8", "{} * {} + {}")
    if modifiers == {"rn"}:
        return t.elementwise(i, WIDE, "({} * {} + {}).astype(f4)", to="f4")
    if "rn" in modifiers:
        return _floats(t, i, t.call(floats.fma, "{}", "{}", "{}"))
    (mode,) = modifiers & {"rm", "rp", "rz"}
    return _floats(t, i, t.call(floats.fma_towards, repr(mode), "{}", "{}", "{}"))


@instruction("div")
def div(t: Translator, i: Instruction):
    if types.floating(i.kind):
        return _arithmetic(t, i, "{} / {}")
    return t.elementwise(i, types.view(i.kind), t.call(quotient, "{}", "{}"))


@instruction("rem")
def rem(t: Translator, i: Instruction):
    t.elementwise(i, types.view(i.kind), t.call(remainder, "{}", "{}"))


def quotient(a, b):
    """Towards zero; by zero it is all ones, which PTX leaves open."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(zero, ~a.dtype.type(0), a // divisor)
    whole = np.abs(a.astype("i8")) // np.abs(divisor.astype("i8"))
    return np.where(zero, -1, np.where((a < 0) ^ (b < 0), -whole, whole)).astype(a.dtype)


def remainder(a, b):
    return (a - quotient(a, b) * b).astype(a.dtype)


@instruction("copysign")
def copysign(t: Translator, i: Instruction):
    """The sign of the first operand, the size of the second."""
    t.elementwise(i, types.view(i.kind), "np.copysign({1}, {0})")
