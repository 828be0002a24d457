"""The float formats of tensor cores in numpy, and what numpy's float32 lacks: flushing, fused multiply-add, directions."""

import numpy as np

u2, u4, f2, f4, f8 = np.uint16, np.uint32, np.float16, np.float32, np.float64
NAN_16 = u2(0x7FFF)  # what a conversion to a 16-bit float makes of a NaN
LARGEST_EXPONENT = u4(0x7F800000)  # infinities and NaNs


def flush(x):
    """Denormals become zero: .ftz."""
    return np.where(np.abs(x) < f4(2.0**-126), np.copysign(f4(0), x), x)


def saturate(x):
    """Into [0, 1], NaN to 0: .sat."""
    return np.where(x > 0, np.minimum(x, f4(1)), f4(0))


def extreme(function, a, b):
    """One of numpy's minima and maxima, but -0 is less than +0: what is equal differs in that sign alone, if at all."""
    combined = np.bitwise_and if function in (np.fmax, np.maximum) else np.bitwise_or
    bits = u4 if a.dtype == f4 else np.uint64
    return np.where(a == b, combined(a.view(bits), b.view(bits)).view(a.dtype), function(a, b))


def from_f16(encoded):
    return encoded.view(f2).astype(f4)


def to_f16(x):
    return np.where(np.isnan(x), NAN_16, x.astype(f2).view(u2))


def from_bf16(encoded):
    return (encoded.astype(u4) << u4(16)).view(f4)


def to_bf16(x):
    """The upper half of a float32, to the nearest, ties to even: a carry runs into the exponent as it should."""
    encoded = np.ascontiguousarray(x).view(u4)
    return np.where(np.isnan(x), NAN_16, ((encoded + u4(0x7FFF) + ((encoded >> u4(16)) & u4(1))) >> u4(16)).astype(u2))


def integer_to_bf16(x):
    """Rounded once, through a float32 rounded to odd: where it is inexact its last bit is set, which settles all ties."""
    whole = x.astype(f8)
    near = whole.astype(f4)
    inexact = near.astype(f8) != whole
    below = np.where(np.abs(near.astype(f8)) > np.abs(whole), near.view(u4) - u4(1), near.view(u4))
    return to_bf16(np.where(inexact, below | u4(1), near.view(u4)).view(f4))


def to_tf32(encoded, half):
    """A float32 whose last 13 bits are zero; `half` is what is added before they are cut off."""
    special = (encoded & LARGEST_EXPONENT) == LARGEST_EXPONENT
    return np.where(special, encoded, (encoded + half) & u4(0xFFFFE000))


def to_tf32_away(encoded):
    """.rna: ties go away from zero."""
    return to_tf32(encoded, u4(0x1000))


def to_tf32_even(encoded):
    return to_tf32(encoded, u4(0xFFF) + ((encoded >> u4(13)) & u4(1)))


def fma(a, b, c):
    """In float64, where the product is exact; the sum is then rounded twice, wrongly once in 2**29."""
    return (a.astype(f8) * b + c).astype(f4)


def fma_towards(mode, a, b, c):
    """Rounded as `mode` says: "rm" down, "rp" up, "rz" to zero. Exact: what the sum loses in 64 bits is known."""
    product, c = a.astype(np.longdouble) * b, np.asarray(c).astype(np.longdouble)
    total = product + c
    of_c = total - product
    lost = (product - (total - of_c)) + (c - of_c)
    near = total.astype(f4)
    above = near.astype(np.longdouble) - total  # how far it lies above the exact result
    above = np.where(above == 0, -lost, above)
    down = np.where(above > 0, np.nextafter(near, f4(-np.inf)), near)
    up = np.where(above < 0, np.nextafter(near, f4(np.inf)), near)
    return {"rm": down, "rp": up, "rz": np.where(total < 0, up, down)}[mode]


def to_integer(x, kind, width):
    """A float that is whole already as an integer type of so many bytes, clamped; NaN as PTX has it, in `width` bytes."""
    letter, size = ("i" if kind[0] == "s" else "u"), int(kind[1:]) // 8
    dtype = np.dtype(f"{letter}{size}").type
    limits = np.iinfo(dtype)
    x = x.astype(f8)
    nan, high, low = np.isnan(x), x >= float(limits.max), x <= float(limits.min)
    inside = np.where(nan | high | low, 0.0, x).astype("u8" if kind == "u64" else "i8").astype(dtype)
    of_nan = 0 if size < 8 else dtype(2**63) if letter == "u" else limits.min
    result = np.where(nan, dtype(of_nan), np.where(high, limits.max, np.where(low, limits.min, inside))).astype(dtype)
    return result.astype(f"{letter}{width}").view(f"u{width}")
