"""Where a wgmma's matrix lies in shared memory: descriptors and swizzles.

A descriptor packs, from its lowest bit: start address (14 bits), leading and stride byte offset (14 bits each, from bits 16
and 32), all in units of 16 bytes; a base offset (3 bits from bit 49); and the swizzle (bits 62 and 63). A matrix is cut into
atoms of 8 rows, as wide as the swizzle. In a K-major matrix (not transposed) a row of an atom holds elements of one row of
the matrix, one behind the other along k; in a transposed one, elements of one k along the rows of the matrix.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from emulator.errors import Unknown

UNIT = 16  # bytes: what descriptors count in, and what swizzles move
WIDTHS = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row of an atom, by the swizzle's number; 0: none


@dataclasses.dataclass(frozen=True)
class Descriptor:
    leading: int  # bytes
    stride: int
    swizzle: int

    @classmethod
    def of(cls, encoded: int) -> Descriptor:
        if encoded >> 49 & 7:
            raise Unknown(f"the base offset of the descriptor {encoded:#x}")
        field = lambda first: (encoded >> first & 0x3FFF) * UNIT
        return cls(field(16), field(32), encoded >> 62)

    def offsets(self, rows: int, k: int, size: int, transposed: bool) -> np.ndarray:
        """[rows, k] bytes from the start address, before swizzling, of elements of `size` bytes."""
        r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
        width = WIDTHS[self.swizzle]
        if transposed:
            unit, within = np.divmod(r * size, UNIT)
            if self.swizzle == 0:
                return unit * self.stride + c % 8 * UNIT + c // 8 * self.leading + within
            atom, place = np.divmod(unit, width // UNIT)
            return atom * self.leading + place * UNIT + c % 8 * width + c // 8 * self.stride + within
        unit, within = np.divmod(c * size, UNIT)
        return r % 8 * width + r // 8 * self.stride + unit * (self.leading if self.swizzle == 0 else UNIT) + within

    def swizzled(self, addresses: np.ndarray) -> np.ndarray:
        """In each line of 128 bytes, units of 16 are exchanged: the unit's number xor the line's, as far as an atom is wide."""
        exchanged = WIDTHS[self.swizzle] // UNIT - 1
        return addresses ^ (addresses >> 7 & exchanged) << 4


def start(encoded: np.ndarray) -> np.ndarray:
    """The start addresses."""
    return ((encoded & np.uint64(0x3FFF)) * np.uint64(UNIT)).astype("i8")
