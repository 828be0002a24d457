"""The emulator's instructions, one by one, beside plain Python that follows the pseudo-code of the PTX ISA.

Operands are random bits, and among them those at which instructions change their mind. A result of None is left open.
"""

import math
import operator
import struct
from fractions import Fraction

import numpy as np
import pytest

from emulator.by_hand import elementwise, execute

THREADS = 256
LOW = 2**32 - 1
INTEGERS = (0, 1, 2, 5, 31, 32, 33, 63, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
bits = lambda x: int(np.float32(x).view(np.uint32))
number = lambda encoded: struct.unpack("<f", struct.pack("<I", encoded))[0]
signed = lambda encoded: encoded - 2**32 if encoded >> 31 else encoded
is_nan = lambda encoded: encoded & 0x7FFFFFFF > 0x7F800000
LARGE_AND_SMALL = (math.inf, 65504, 65520, 3e38, 1e38, 3.5, 2.5, 1.0, 0.3, 2.0**-24, 2.0**-126, 1e-40, 0.0)
NANS = (0x7FC00000, 0x7F800001)
FLOATS = (*(bits(sign * x) for x in LARGE_AND_SMALL for sign in (1, -1)), *NANS)


def operands(special, seed):
    random = np.random.default_rng(seed)
    arrays = random.integers(0, 2**32, (3, THREADS), dtype=np.uint32)
    chosen = random.random(arrays.shape) < 0.5
    return np.where(chosen, random.choice(np.array(special, np.uint32), arrays.shape), arrays)


def check(instruction, meaning, special):
    arrays = operands(special, seed=len(instruction))
    got = elementwise(instruction, *arrays)
    compared = 0
    for a, b, c, x in zip(*arrays.tolist(), got.tolist(), strict=True):
        want = meaning(a, b, c)
        if want is not None:
            compared += 1
            assert x == want & LOW, f"{instruction} of {a:#x}, {b:#x}, {c:#x} gave {x:#x}, not {want & LOW:#x}"
    assert compared > THREADS // 8


# -------------------------------------------------------------------------------------------------------- integers


def towards_zero(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def permuted(a, b, selector):
    source = [(a | b << 32) >> 8 * n & 255 for n in range(8)]
    result = 0
    for n in range(4):
        choice = selector >> 4 * n & 15
        byte = source[choice & 7]
        result |= ((255 if byte & 128 else 0) if choice & 8 else byte) << 8 * n
    return result


def field(of_sign):
    def meaning(a, b, c):
        position, length = b & 255, c & 255
        fill = a >> min(position + length - 1, 31) & 1 if of_sign and length else 0
        at = lambda n: a >> position + n & 1 if n < length and position + n <= 31 else fill
        return sum(at(n) << n for n in range(32))

    return meaning


def inserted(a, b, c):
    for n in range(c & 255):
        if 5 + n <= 31:
            b = b & ~(1 << 5 + n) | (a >> n & 1) << 5 + n
    return b


INTEGER_INSTRUCTIONS = {
    "add.s32 %r10, %r0, %r1;": lambda a, b, c: a + b,
    "sub.u32 %r10, %r0, %r1;": lambda a, b, c: a - b,
    "mul.lo.s32 %r10, %r0, %r1;": lambda a, b, c: a * b,
    "mul.hi.u32 %r10, %r0, %r1;": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %r10, %r0, %r1;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.wide.s32 %d20, %r0, %r1; shr.u64 %d20, %d20, 32; cvt.u32.u64 %r10, %d20;": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mov.b64 %d20, {%r0, %r1}; mov.b64 %d21, {%r2, %r0}; mul.hi.u64 %d22, %d20, %d21; cvt.u32.u64 %r10, %d22;": (
        lambda a, b, c: (a | b << 32) * (c | a << 32) >> 64
    ),
    "mov.b64 %d20, {%r0, %r1}; mov.b64 %d21, {%r2, %r0}; mul.hi.s64 %d22, %d20, %d21; cvt.u32.u64 %r10, %d22;": (
        lambda a, b, c: (a | signed(b) << 32) * (c | signed(a) << 32) >> 64
    ),
    "mad.lo.s32 %r10, %r0, %r1, %r2;": lambda a, b, c: a * b + c,
    "cvt.u64.u32 %d19, %r2; mad.wide.u32 %d20, %r0, %r1, %d19; shr.u64 %d20, %d20, 32; cvt.u32.u64 %r10, %d20;": (
        lambda a, b, c: a * b + c >> 32
    ),
    "min.s32 %r10, %r0, %r1;": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %r10, %r0, %r1;": lambda a, b, c: max(a, b),
    "abs.s32 %r10, %r0;": lambda a, b, c: abs(signed(a)),
    "neg.s32 %r10, %r0;": lambda a, b, c: -a,
    "div.s32 %r10, %r0, %r1;": lambda a, b, c: towards_zero(signed(a), signed(b)) if b else None,
    "div.u32 %r10, %r0, %r1;": lambda a, b, c: a // b if b else None,
    "rem.s32 %r10, %r0, %r1;": lambda a, b, c: int(math.fmod(signed(a), signed(b))) if b else None,
    "rem.u32 %r10, %r0, 7;": lambda a, b, c: a % 7,
    "and.b32 %r10, %r0, %r1;": lambda a, b, c: a & b,
    "or.b32 %r10, %r0, %r1;": lambda a, b, c: a | b,
    "xor.b32 %r10, %r0, -2;": lambda a, b, c: a ^ -2,
    "not.b32 %r10, %r0;": lambda a, b, c: ~a,
    "lop3.b32 %r10, %r0, %r1, %r2, 0x96;": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 %r10, %r0, %r1, %r2, 0xca;": lambda a, b, c: (a & b) | (~a & c),
    "shl.b32 %r10, %r0, %r1;": lambda a, b, c: a << b if b < 32 else 0,
    "shl.b32 %r10, %r0, 33;": lambda a, b, c: 0,
    "shr.u32 %r10, %r0, %r1;": lambda a, b, c: a >> b if b < 32 else 0,
    "shr.s32 %r10, %r0, %r1;": lambda a, b, c: signed(a) >> min(b, 31),
    "shr.s32 %r10, %r0, 40;": lambda a, b, c: signed(a) >> 31,
    "shf.l.wrap.b32 %r10, %r0, %r1, %r2;": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "shf.r.wrap.b32 %r10, %r0, %r1, %r2;": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "shf.r.clamp.b32 %r10, %r0, %r1, %r2;": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "bfe.u32 %r10, %r0, %r1, %r2;": field(of_sign=False),
    "bfe.s32 %r10, %r0, %r1, %r2;": field(of_sign=True),
    "bfi.b32 %r10, %r0, %r1, 5, %r2;": inserted,
    "prmt.b32 %r10, %r0, %r1, %r2;": permuted,
    "prmt.b32 %r10, %r0, %r1, 0x5410U;": lambda a, b, c: permuted(a, b, 0x5410),
    "prmt.b32 %r10, %r0, %r1, 0xb3e7;": lambda a, b, c: permuted(a, b, 0xB3E7),
    "clz.b32 %r10, %r0;": lambda a, b, c: 32 - a.bit_length(),
    "popc.b32 %r10, %r0;": lambda a, b, c: a.bit_count(),
    "mov.b32 {%h0, %h1}, %r0; mov.b32 %r10, {%h1, %h0};": lambda a, b, c: a >> 16 | a << 16,
    "setp.lt.s32 %p1, %r0, %r1; setp.gt.and.u32 %p2, %r2, 7, %p1; selp.b32 %r10, 3, 4, %p2;": (
        lambda a, b, c: 3 if signed(a) < signed(b) and c > 7 else 4
    ),
    "setp.eq.u32 %p1, %r0, %r1; setp.ne.or.b32 %p2, %r2, 31, !%p1; selp.b32 %r10, 3, 4, %p2;": (
        lambda a, b, c: 3 if c != 31 or a != b else 4
    ),
    "setp.lt.u32 %p1, %r0, %r1; mov.u32 %r10, 5; @!%p1 mov.u32 %r10, %r2;": lambda a, b, c: 5 if a < b else c,
    "{ .reg .b32 t; mov.b32 t, %r0; { .reg .b32 t; mov.b32 t, 1; add.u32 %r10, t, %r1; } add.u32 %r10, %r10, t; }": (
        lambda a, b, c: a + b + 1
    ),
    "cvt.s64.s32 %d20, %r0; shr.u64 %d21, %d20, 32; cvt.u32.u64 %r10, %d21;": lambda a, b, c: signed(a) >> 32,
    "cvt.s32.s8 %r10, %r0;": lambda a, b, c: (a & 127) - (a & 128),
    "cvt.u16.u32 %h1, %r0; mov.b32 %r10, {%h1, %h1};": lambda a, b, c: (a & 0xFFFF) * 0x10001,
}


@pytest.mark.parametrize("instruction", INTEGER_INSTRUCTIONS)
def test_integers(instruction):
    check(instruction, INTEGER_INSTRUCTIONS[instruction], INTEGERS)


# ---------------------------------------------------------------------------------------------------------- floats


def rounded(fn):
    """`fn` of numbers, in numpy's float32 or exactly; what of a NaN is made is left open."""

    def meaning(*encoded):
        x = [np.float32(np.nan if is_nan(e) else number(e)) for e in encoded]
        with np.errstate(all="ignore"):
            result = fn(*x)
        return None if result is None or np.isnan(result) else bits(result)

    return meaning


def flushed(x):
    return np.copysign(np.float32(0), x) if abs(x) < 2.0**-126 else x


def fused(a, b, c):
    """Rounded once, out of exact fractions; left open where the emulator's float64 in between is known to miss a tie."""
    if not all(map(math.isfinite, (a, b, c))):
        return np.float32(float(a) * float(b) + float(c))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0 or abs(exact) >= 2**127:  # signs of zero, and overflow, apart
        return None
    once, twice = nearest(exact), nearest(Fraction(float(exact)))
    return once if once == twice else None


def nearest(exact):
    low, high = neighbours(exact)
    below, above = exact - Fraction(float(low)), Fraction(float(high)) - exact
    if below != above:
        return low if below < above else high
    return low if bits(low) % 2 == 0 else high


def neighbours(exact):
    """The float32 numbers on either side; twice the same where it is one."""
    x = np.float32(float(exact))
    while Fraction(float(x)) > exact:
        x = np.nextafter(x, np.float32(-np.inf))
    while Fraction(float(np.nextafter(x, np.float32(np.inf)))) <= exact:
        x = np.nextafter(x, np.float32(np.inf))
    return x, (x if Fraction(float(x)) == exact else np.nextafter(x, np.float32(np.inf)))


def directed(mode):
    def meaning(a, b, c):
        if not all(map(math.isfinite, (a, b, c))):
            return None
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if abs(exact) >= 2**127 or abs(exact) < Fraction(1, 2**120):
            return None
        low, high = neighbours(exact)
        return {"rm": low, "rp": high, "rz": low if exact > 0 else high}[mode]

    return rounded(meaning)


def to_half(encoded, is_bf16):
    """To the nearest, ties to even, out of exact integers."""
    if is_nan(encoded):
        return 0x7FFF
    if is_bf16:
        upper, lower = encoded >> 16, encoded & 0xFFFF
        return upper + (lower > 0x8000 or (lower == 0x8000 and upper & 1))
    x, sign = abs(number(encoded)), encoded >> 16 & 0x8000
    if math.isinf(x):
        return 0x7C00 | sign
    exponent = max(math.frexp(x)[1] - 1, -14) if x else -14
    units = round(Fraction(x) / Fraction(2) ** (exponent - 10))  # Python rounds ties to even
    value = units * Fraction(2) ** (exponent - 10)
    return (0x7C00 if value >= 65536 else int(np.float16(float(value)).view(np.uint16))) | sign


def integer_to_bf16(n):
    if n == 0:
        return 0
    exponent = n.bit_length() - 1
    mantissa = round(Fraction(n) / Fraction(2) ** (exponent - 7))
    return (exponent + 127 << 7) + mantissa - 128


def to_integer(least, most):
    def meaning(encoded):
        if is_nan(encoded):
            return 0
        x = number(encoded)
        return (most if x > 0 else least) if math.isinf(x) else min(max(math.trunc(x), least), most)

    return lambda a, b, c: meaning(a)


def halves(fn, is_bf16):
    """`fn` of the upper and of the lower halves, computed in float32."""
    wide = lambda half: half << 16 if is_bf16 else bits(np.uint16(half).view(np.float16))

    def meaning(*registers):
        result = 0
        for place in (0, 16):
            x = [np.float32(number(wide(r >> place & 0xFFFF))) for r in registers]
            with np.errstate(all="ignore"):
                value = np.float32(fn(*x))
            if np.isnan(value):
                return None
            result |= to_half(bits(value), is_bf16) << place
        return result

    return meaning


def larger(a, b):
    """-0 is less than +0."""
    return (a if not np.signbit(a) else b) if a == b == 0 else np.fmax(a, b)


SOME = tuple(bits(x) for x in (252.0, 12582913.0, 0.3, -0.7, 1.5, 1e-3, -7.25, 3.0))
FLOAT_INSTRUCTIONS = {
    "add.rn.f32 %r10, %r0, %r1;": rounded(lambda a, b, c: a + b),
    "sub.rn.f32 %r10, %r0, %r1;": rounded(lambda a, b, c: a - b),
    "mul.ftz.f32 %r10, %r0, %r1;": rounded(lambda a, b, c: flushed(flushed(a) * flushed(b))),
    "div.full.f32 %r10, %r0, %r1;": rounded(lambda a, b, c: a / b),
    "fma.rn.f32 %r10, %r0, %r1, %r2;": rounded(fused),
    "{ .reg .f32 t; fma.rn.ftz.f32 t, %r0, %r1, %r2; mov.b32 %r10, t; }": (
        rounded(lambda a, b, c: None if (x := fused(flushed(a), flushed(b), flushed(c))) is None else flushed(x))
    ),
    "max.f32 %r10, %r0, %r1;": rounded(lambda a, b, c: larger(a, b)),
    "min.f32 %r10, %r0, %r1;": rounded(lambda a, b, c: -larger(-a, -b)),
    "max.f32 %r10, %r0, 0f7FC00000;": rounded(lambda a, b, c: a),
    "min.NaN.f32 %r11, %r0, %r1; setp.nan.f32 %p1, %r11, %r11; selp.b32 %r10, 1, 0, %p1;": (
        lambda a, b, c: int(is_nan(a) or is_nan(b))
    ),
    "neg.f32 %r10, %r0;": rounded(lambda a, b, c: -a),
    "abs.f32 %r10, %r0;": rounded(lambda a, b, c: abs(a)),
    "copysign.f32 %r10, %r0, %r1;": rounded(lambda a, b, c: np.copysign(b, a)),
    "ex2.approx.ftz.f32 %r10, %r0;": rounded(lambda a, b, c: flushed(np.exp2(flushed(a)))),
    "lg2.approx.f32 %r10, %r0;": rounded(lambda a, b, c: np.log2(a)),
    "rcp.approx.ftz.f32 %r10, %r0;": rounded(lambda a, b, c: flushed(1 / flushed(a))),
    "sqrt.rn.f32 %r10, %r0;": rounded(lambda a, b, c: np.sqrt(a)),
    "rsqrt.approx.f32 %r10, %r0;": rounded(lambda a, b, c: 1 / np.sqrt(a)),
    "tanh.approx.f32 %r10, %r0;": rounded(lambda a, b, c: np.tanh(a)),
    "cvt.sat.f32.f32 %r10, %r0;": rounded(lambda a, b, c: min(max(a, np.float32(0)), np.float32(1)) + np.float32(0)),
    "cvt.rmi.f32.f32 %r10, %r0;": rounded(lambda a, b, c: np.floor(a)),
    "cvt.rn.f16x2.f32 %r10, %r0, %r1;": lambda a, b, c: to_half(a, False) << 16 | to_half(b, False),
    "cvt.rn.bf16x2.f32 %r10, %r0, %r1;": lambda a, b, c: to_half(a, True) << 16 | to_half(b, True),
    "cvt.rn.bf16.f32 %h1, %r0; mov.b32 %r10, {%h1, %h1};": lambda a, b, c: to_half(a, True) * 0x10001,
    "mov.b32 {%h0, %h1}, %r0; cvt.f32.f16 %r10, %h1;": (
        lambda a, b, c: None if np.isnan(x := np.uint16(a >> 16).view(np.float16)) else bits(x)
    ),
    "mov.b32 {%h0, %h1}, %r0; cvt.f32.bf16 %r10, %h1;": lambda a, b, c: a & 0xFFFF0000,
    "cvt.rna.tf32.f32 %r10, %r0;": lambda a, b, c: a + 0x1000 & ~0x1FFF if a & 0x7F800000 != 0x7F800000 else None,
    "cvt.rzi.s32.f32 %r10, %r0;": to_integer(-(2**31), 2**31 - 1),
    "cvt.rzi.u32.f32 %r10, %r0;": to_integer(0, 2**32 - 1),
    "cvt.rn.f32.s32 %r10, %r0;": lambda a, b, c: bits(np.float32(signed(a))),
    "cvt.rn.bf16.u32 %h1, %r0; mov.b32 %r10, {%h1, %h1};": lambda a, b, c: integer_to_bf16(a) * 0x10001,
    "add.rn.bf16x2 %r10, %r0, %r1;": halves(lambda a, b, c: a + b, is_bf16=True),
    "mul.rn.f16x2 %r10, %r0, %r1;": halves(lambda a, b, c: a * b, is_bf16=False),
    **{f"fma.{mode}.f32 %r10, %r0, %r1, %r2;": directed(mode) for mode in ("rm", "rp", "rz")},
}


@pytest.mark.parametrize("instruction", FLOAT_INSTRUCTIONS)
def test_floats(instruction):
    special = SOME if instruction.startswith(("fma.rm", "fma.rp", "fma.rz")) else FLOATS
    check(instruction, FLOAT_INSTRUCTIONS[instruction], special)


@pytest.mark.parametrize("comparison", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("unordered", ["", "u"])
def test_beside_a_nan_comparisons_are_false_and_those_with_u_true(comparison, unordered):
    compare = getattr(operator, comparison)

    def meaning(a, b, c):
        return int(bool(unordered)) if is_nan(a) or is_nan(b) else int(compare(number(a), number(b)))

    check(f"setp.{comparison}{unordered}.f32 %p1, %r0, %r1; selp.b32 %r10, 1, 0, %p1;", meaning, FLOATS)


# ----------------------------------------------------------------------------------------------- threads of a warp


def shuffled(mode, lane, b, c):
    """(source, whether there is one): the pseudo-code of shfl."""
    segment, clamp = c >> 8 & 31, c & 31
    greatest, least = (lane & segment) | (clamp & ~segment), lane & segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": least | (b & ~segment)}[mode]
    inside = source >= greatest if mode == "up" else source <= greatest
    return (source if inside else lane), inside


@pytest.mark.parametrize(
    ("mode", "clamp"),
    [("bfly", 31), ("up", 0), ("down", 31), ("idx", 31), ("bfly", 0x1C1F), ("idx", 0x181F), ("up", 0x1800), ("down", 0x181F)],
)
@pytest.mark.parametrize("given", ["as a number", "in a register"])
def test_shuffles(mode, clamp, given):
    x = np.arange(32, dtype=np.uint32)
    for b in (0, 1, 2, 5, 8, 16, 31):
        where = b if given == "as a number" else "%r3"
        shuffle = f"mov.u32 %r3, {b}; shfl.sync.{mode}.b32 %r10|%p1, %r0, {where}, {clamp}, -1; @%p1 add.u32 %r10, %r10, 100;"
        wanted = [source + 100 * inside for source, inside in (shuffled(mode, lane, b, clamp) for lane in range(32))]
        np.testing.assert_array_equal(elementwise(shuffle, x), wanted)


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("vote.sync.ballot.b32 %r10, %p1, -1;", [0b1111 << 28] * 32),
        ("vote.sync.any.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;", [1] * 32),
        ("vote.sync.all.pred %p2, %p1, -1; selp.b32 %r10, 1, 0, %p2;", [0] * 32),
        ("elect.sync %r11|%p2, -1; selp.b32 %r10, 1, 0, %p2;", [1] + [0] * 31),
        ("redux.sync.add.s32 %r10, %r0, -1;", [sum(range(32))] * 32),
        ("redux.sync.max.u32 %r10, %r0, -1;", [31] * 32),
    ],
)
def test_votes_and_reductions(instruction, wanted):
    x = np.arange(32, dtype=np.uint32)
    np.testing.assert_array_equal(elementwise(f"setp.ge.u32 %p1, %r0, 28; {instruction}", x), wanted)


def test_threads_that_go_round_a_loop_differently_often_meet_again():
    loop = """
        mov.u32 %r10, 0; mov.u32 %r11, 0;
        again: add.u32 %r10, %r10, %r11; add.u32 %r11, %r11, 1; setp.le.u32 %p1, %r11, %r0; @%p1 bra again;
        shfl.sync.bfly.b32 %r12, %r11, 31, 31, -1; sub.u32 %r10, %r10, %r12;
    """
    x = np.arange(32, dtype=np.uint32)
    wanted = [sum(range(n + 1)) - (32 - n) & LOW for n in range(32)]
    np.testing.assert_array_equal(elementwise(loop, x), wanted)


def test_instructions_are_counted_by_the_warps_that_execute_them():
    body = "setp.lt.u32 %p1, %r99, 40; @!%p1 bra over; ex2.approx.f32 %r0, %r99; over: add.s64 %d31, %d0, %d39; "
    _, report = execute(body + "st.global.b32 [%d31], %r99;", [], np.empty(96, np.uint32), threads=96)
    assert (report.executed["setp"], report.executed["ex2"], report.executed["st"]) == (3, 2, 3)
