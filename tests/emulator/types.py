"""The types of PTX, and how numpy holds a register: as an array of one value a thread, seen through a view.

A view is the name of a numpy dtype, "u4" or "f4"; "?" is a predicate. A register has no type but its width: what an
instruction calls it decides the view. 16-bit floats are "u2", for numpy computes in none of them as a GPU does.
"""

import numpy as np

from emulator.errors import Unknown

BITS = {
    "pred": 1,
    **dict.fromkeys(("b8", "u8", "s8"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 64),
}
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
VIEWS = {f"{kind}{size}": np.dtype(f"{kind}{size}").type for kind in "ui" for size in (1, 2, 4, 8)}
VIEWS |= {"f2": np.float16, "f4": np.float32, "f8": np.float64}


def bits(kind: str) -> int:
    """The width of a type."""
    if kind not in BITS:
        raise Unknown(f"the type {kind}")
    return BITS[kind]


def bytes_of(kind: str) -> int:
    return bits(kind) // 8


def view(kind: str) -> str:
    """How values of a type are seen."""
    if kind == "pred":
        return "?"
    letter = "u" if kind in HALVES or kind == "tf32" else {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]]
    return f"{letter}{bytes_of(kind)}"


def raw(size: int) -> str:
    """The view of so many bits that nobody interprets."""
    return "?" if size == 1 else f"u{size // 8}"


def signed(kind: str) -> bool:
    return kind[0] == "s"


def floating(kind: str) -> bool:
    return kind in HALVES or kind in ("f32", "f64")
