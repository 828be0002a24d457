"""Shared memory: each block its own, one behind the other in one array of bytes. It begins as ones: NaN as floats."""

from __future__ import annotations

import numpy as np

from emulator.memory import gathered, scattered
from emulator.races import Races
from emulator.report import Report
from emulator.threads import WARP, Mask, Threads

ROW = 16  # bytes of a row of an 8 x 8 matrix, and of what wgmma's descriptors count in
LINE = 128  # bytes that swizzles permute within


class SharedMemory:
    def __init__(self, threads: Threads, size: int, report: Report):
        self._threads, self._report = threads, report
        self.size = size  # bytes of one block's
        self.stride = -(-max(size, 1) // LINE) * LINE  # from one block's to the next
        self.bytes = np.full(self.stride * len(threads.blocks), 0xFF, "u1")
        self.races = Races(threads, self.bytes.size, report)
        self.unfenced = np.zeros(self.bytes.size // ROW, bool)  # written since the last fence.proxy.async: not for wgmma
        self._base = (threads.block_of * self.stride).astype("i8")

    def find(self, addresses, lanes, size: int, site: str) -> np.ndarray:
        """The bytes that these lanes (None: all) access, in all of shared memory."""
        addresses = addresses if lanes is None else addresses[lanes]
        for wrong, what in (
            (addresses + np.uint64(size) > self.size, f"out of bounds of shared memory, of {self.size} bytes"),
            (addresses % np.uint64(size) != 0, "misaligned in shared memory"),
        ):
            if wrong.any():
                n = int(np.argmax(wrong))
                what = f"{size} bytes at {int(addresses[n]):#x} are {what}"
                raise self._threads.fault(site, n if lanes is None else int(lanes[n]), what)
        return addresses.astype("i8") + (self._base if lanes is None else self._base[lanes])

    def load(self, addresses, m: Mask, size: int, count: int, site: str) -> np.ndarray:
        """As GlobalMemory.load."""
        lanes = self._threads.active(m)
        if lanes is not None and lanes.size == 0:
            return np.zeros((count, self._threads.count), f"u{size}")
        offsets = self.find(addresses, lanes, size * count, site)
        self.races.read(offsets, size * count, lanes, site)
        return scattered(self.bytes, offsets, size, count, lanes, self._threads.count)

    def store(self, addresses, m: Mask, size: int, values, site: str) -> None:
        lanes = self._threads.active(m)
        if lanes is not None and lanes.size == 0:
            return
        offsets = self.find(addresses, lanes, size * len(values), site)
        self.note_write(offsets, size * len(values), lanes, site)
        gathered(self.bytes, offsets, size, values, lanes, site, self._report)

    def note_write(self, offsets: np.ndarray, size: int, lanes, site: str) -> None:
        self.races.write(offsets, size, lanes, site)
        self.unfenced[offsets // ROW] = True

    def fence(self, m: Mask) -> None:
        """What the blocks wrote whose threads are all here is there for wgmma too."""
        here = slice(None) if m is None else self._threads.of_blocks(m).all(1)
        self.unfenced.reshape(len(self._threads.blocks), -1)[here] = False

    # -------------------------------------------------------------------------------------------------- 8 x 8 matrices

    def load_matrices(self, addresses, count: int, transposed: bool, m: Mask, site: str) -> np.ndarray:
        """ldmatrix: [count, threads]. Thread 8 n + r of a warp says where row r of matrix n lies."""
        lanes, offsets = self._rows(addresses, count, m, site)
        self.races.read(offsets, ROW, lanes, site)
        rows = _turned(self.bytes.view("u4").reshape(-1, 4)[offsets // ROW].reshape(-1, count, 8, 4), transposed)
        result = np.zeros((count, self._threads.count // WARP, WARP), "u4")
        result[:, self._warps(m)] = rows.reshape(-1, count, WARP).transpose(1, 0, 2)
        return result.reshape(count, -1)

    def store_matrices(self, addresses, values, transposed: bool, m: Mask, site: str) -> None:
        """stmatrix"""
        count = len(values)
        lanes, offsets = self._rows(addresses, count, m, site)
        self.note_write(offsets, ROW, lanes, site)
        registers = np.stack(values).reshape(count, -1, WARP)[:, self._warps(m)]
        rows = _turned(np.ascontiguousarray(registers.transpose(1, 0, 2)).reshape(-1, count, 8, 4), transposed)
        self.bytes.view("u4").reshape(-1, 4)[offsets // ROW] = rows.reshape(-1, 4)

    def _rows(self, addresses, count: int, m: Mask, site: str) -> tuple[np.ndarray, np.ndarray]:
        """The lanes that give a row's address, and where it lies."""
        self._threads.check_warps(m, site)
        giving = self._threads.lane < 8 * count
        lanes = np.flatnonzero(giving if m is None else giving & m)
        return lanes, self.find(addresses, lanes, ROW, site)

    def _warps(self, m: Mask):
        return slice(None) if m is None else np.flatnonzero(m.reshape(-1, WARP)[:, 0])


def _turned(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """8 rows of 8 elements of two bytes each, as 4 registers a row, transposed or not."""
    if not transposed:
        return rows
    elements = rows.view("u2").reshape(*rows.shape[:3], 8)
    return np.ascontiguousarray(elements.transpose(0, 1, 3, 2)).view("u4")
