"""Bits: logic, shifts, fields and permutations."""

import numpy as np

from emulator import types
from emulator.errors import Unknown
from emulator.parser import Instruction, Integer
from emulator.translator import Translator, instruction

u1, u4, u8 = np.uint8, np.uint32, np.uint64


@instruction("and", "or", "xor")
def logic(t: Translator, i: Instruction):
    t.elementwise(
        i,
        "?" if i.kind == "pred" else f"u{types.bytes_of(i.kind)}",
        f"{{}} { {'and': '&', 'or': '|', 'xor': '^'}[i.name] } {{}}",
    )


@instruction("not")
def invert(t: Translator, i: Instruction):
    t.elementwise(i, "?" if i.kind == "pred" else f"u{types.bytes_of(i.kind)}", "~{}")


@instruction("lop3")
def lop3(t: Translator, i: Instruction):
    *_, table = i.operands
    assert isinstance(table, Integer)
    t.elementwise(i, "u4", t.call(by_table, "{}", "{}", "{}", table.value), i.operands[1:4])


def by_table(a, b, c, table):
    """Bit n of the table is the result where the bits of a, b and c are those of n."""
    result = np.zeros_like(a)
    for n in range(8):
        if table >> n & 1:
            result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return result


@instruction("shl", "shr")
def shift(t: Translator, i: Instruction):
    """By more bits than there are: zero, or the sign. Amounts are u32, whatever the type."""
    view, size = types.view(i.kind), types.bits(i.kind)
    view = f"u{size // 8}" if i.name == "shl" else view
    target, source, amount = i.operands
    if isinstance(amount, Integer) and amount.value < size:  # by far the most frequent
        symbol = "<<" if i.name == "shl" else ">>"
        return t.elementwise(i, view, f"{{}} {symbol} {view}({amount.value})", [source])
    count = t.read_array(amount, "u4")
    return t.write(target, view, t.call(shifted, t.read_array(source, view), count, i.name == "shl"))


def shifted(a, count, left):
    size = 8 * a.itemsize
    inside = np.minimum(count, size - 1).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> inside
    return np.where(count >= size, a.dtype.type(0), a << inside if left else a >> inside)


@instruction("shf")
def shf(t: Translator, i: Instruction):
    t.elementwise(i, "u4", t.call(funnel, "{}", "{}", "{}", "l" in i.modifiers, "wrap" in i.modifiers))


def funnel(low, high, count, left, wraps):
    """One half of 64 bits that are shifted."""
    count = (count & u4(31) if wraps else np.minimum(count, u4(32))).astype(u8)
    both = high.astype(u8) << u8(32) | low.astype(u8)
    return (both << count >> u8(32) if left else both >> count).astype(u4)


@instruction("bfe")
def bfe(t: Translator, i: Instruction):
    view = types.view(i.kind)
    source, position, length = i.operands[1:]
    arguments = t.read_array(source, f"u{view[1:]}"), t.read_array(position, "u4"), t.read_array(length, "u4")
    t.write(i.operands[0], f"u{view[1:]}", t.call(extracted, *arguments, types.signed(i.kind)))


def extracted(a, position, length, signed):
    """The bits from a position on; beyond the field, and beyond the register, its sign or zero."""
    size = 8 * a.itemsize
    position, length = (position & u4(255)).astype(u8), (length & u4(255)).astype(u8)
    bits, one = a.astype(u8), u8(1)
    there = np.minimum(length, np.where(position < size, size - position, 0).astype(u8))
    mask = np.where(there >= 64, ~u8(0), (one << np.minimum(there, u8(63))) - one)
    field = (bits >> np.minimum(position, u8(63))) & mask
    if signed:
        last = np.minimum(position + np.maximum(length, one) - one, u8(size - 1))
        negative = ((bits >> last) & one).astype(bool) & (length > 0)
        field = np.where(negative, field | ~mask, field)
    return field.astype(a.dtype)


@instruction("bfi")
def bfi(t: Translator, i: Instruction):
    if i.kind != "b32":
        raise Unknown(f"the type {i.kind}")
    t.write(i.operands[0], "u4", t.call(inserted, *(t.read_array(x, "u4") for x in i.operands[1:])))


def inserted(field, into, position, length):
    position, length = (position & u4(255)).astype(u8), (length & u4(255)).astype(u8)
    position, low = np.minimum(position, u8(63)), u8(0xFFFFFFFF)
    mask = (np.where(length >= 32, low, (u8(1) << np.minimum(length, u8(63))) - u8(1)) << position) & low
    return ((into.astype(u8) & ~mask) | ((field.astype(u8) << position) & mask)).astype(u4)


@instruction("prmt")
def prmt(t: Translator, i: Instruction):
    if i.modifiers != ("b32",):
        raise Unknown(f"modifiers {i.modifiers}")
    t.write(
        i.operands[0], "u4", t.call(permuted, *(t.read_array(x, "u4") for x in i.operands[1:3]), t.read(i.operands[3], "u4"))
    )


def permuted(a, b, selector):
    """Each byte of the result is one of eight, by three bits of the selector; the fourth asks for its sign instead."""
    eight = np.ascontiguousarray(np.stack([a, b], axis=-1)).view(u1)
    four = []
    for n in range(4):
        choice = selector >> u4(4 * n) & u4(15)
        if np.ndim(choice):
            byte = np.take_along_axis(eight, (choice & u4(7)).astype("i8")[:, None], axis=1)[:, 0]
        else:
            byte = eight[:, choice & 7]
        four.append(np.where(choice & u4(8), np.where(byte & u1(128), u1(255), u1(0)), byte))
    return np.stack(four, axis=-1).view(u4).reshape(-1)


@instruction("clz")
def clz(t: Translator, i: Instruction):
    t.elementwise(i, f"u{types.bytes_of(i.kind)}", t.call(leading_zeros, "{}"), to="u4")


def leading_zeros(a):
    for n in (1, 2, 4, 8, 16, 32):
        a = a | (a >> a.dtype.type(n) if n < 8 * a.itemsize else a)
    return (8 * a.itemsize - np.bitwise_count(a)).astype(u4)


@instruction("popc")
def popc(t: Translator, i: Instruction):
    t.elementwise(i, f"u{types.bytes_of(i.kind)}", "np.bitwise_count({}).astype(u4)", to="u4")
