"""Global memory: the arrays of a launch, each an island, so that an access beyond its end or before its start is seen.

Array n lies at (n + 1) << 40. Nothing but results may be written, and for each of their bytes it is known which block of
the grid wrote it. Results hold ones, NaN as floats, before anybody writes them.
"""

from __future__ import annotations

import numpy as np

from emulator.errors import Unknown
from emulator.report import Report
from emulator.threads import Mask, Threads

ISLAND = 40  # an address's bits below the number of its array
NOBODY = -1
UNIT = 16  # bytes of the widest access: a buffer is as long as a multiple of it


class Array:
    """An array as bytes."""

    def __init__(self, name: str, like: np.ndarray, is_result: bool):
        self.name, self.is_result = name, is_result
        self.size = like.nbytes
        self.bytes = np.full(-(-max(self.size, 1) // UNIT) * UNIT, 0xFF, "u1")
        if not is_result:
            self.bytes[: self.size] = np.frombuffer(np.ascontiguousarray(like).tobytes(), "u1")
        self.writer = np.full(self.bytes.size if is_result else 0, NOBODY, "i4")  # the block that last wrote each byte

    def value(self, like: np.ndarray) -> np.ndarray:
        return self.bytes[: self.size].view(like.dtype).reshape(like.shape)

    @property
    def unwritten(self) -> int:
        """Bytes."""
        return int(np.count_nonzero(self.writer[: self.size] == NOBODY))


class GlobalMemory:
    """The arrays as some threads see them."""

    def __init__(self, arrays: list[Array], threads: Threads, report: Report):
        self._arrays, self._threads, self._report = arrays, threads, report

    def load(self, addresses, m: Mask, size: int, count: int, site: str) -> np.ndarray:
        """[count, threads] unsigned integers of `size` bytes; 0 where m does not hold."""
        lanes = self._threads.active(m)
        if lanes is not None and lanes.size == 0:
            return np.zeros((count, self._threads.count), f"u{size}")
        array, offsets = self.find(addresses, lanes, size * count, site)
        return scattered(array.bytes, offsets, size, count, lanes, self._threads.count)

    def store(self, addresses, m: Mask, size: int, values, site: str) -> None:
        lanes = self._threads.active(m)
        if lanes is not None and lanes.size == 0:
            return
        total = size * len(values)
        array, offsets = self.find(addresses, lanes, total, site)
        if not array.is_result:
            raise self._threads.fault(
                site, 0 if lanes is None else int(lanes[0]), f"{array.name} is written, which is no result"
            )
        blocks = self._threads.block_number if lanes is None else self._threads.block_number[lanes]
        places = offsets[:, None] + np.arange(total)
        before = array.writer[places]
        array.writer[places] = blocks[:, None]
        at_once = array.writer[places] != blocks[:, None]
        if (at_once | (before != NOBODY) & (before != blocks[:, None])).any():
            self._report.problems[f"two blocks write {array.name}: {site}"] += 1
        gathered(array.bytes, offsets, size, values, lanes, site, self._report)

    def find(self, addresses, lanes, size: int, site: str) -> tuple[Array, np.ndarray]:
        """The array that these lanes (None: all) access, and at which of its bytes."""
        addresses = addresses if lanes is None else addresses[lanes]
        # The nearest island: what lies a little before one is out of its bounds too.
        islands = (addresses + np.uint64(1 << ISLAND - 1)) >> np.uint64(ISLAND)
        place = lambda wrong: int(np.argmax(wrong) if lanes is None else lanes[np.argmax(wrong)])
        if (wrong := (islands < 1) | (islands > len(self._arrays))).any():
            what = f"{int(addresses[np.argmax(wrong)]):#x} is the address of nothing"
            raise self._threads.fault(site, place(wrong), what)
        if (islands != islands[0]).any():
            raise Unknown(f"{site}: one instruction reaches several arrays")
        array = self._arrays[int(islands[0]) - 1]
        offsets = (addresses - (islands << np.uint64(ISLAND))).view("i8")
        if (wrong := (offsets < 0) | (offsets + size > array.size)).any():
            what = f"{size} bytes at {int(offsets[np.argmax(wrong)])} are out of bounds of {array.name}, of {array.size} bytes"
            raise self._threads.fault(site, place(wrong), what)
        if (wrong := offsets % size != 0).any():
            what = f"{size} bytes at {int(offsets[np.argmax(wrong)])} of {array.name} are misaligned"
            raise self._threads.fault(site, place(wrong), what)
        return array, offsets


def scattered(memory, offsets, size: int, count: int, lanes, threads: int) -> np.ndarray:
    """[count, threads]: what each of the lanes reads, `count` integers of `size` bytes from its offset on."""
    values = memory.view(f"u{size}").reshape(-1, count)[offsets // (size * count)].T
    if lanes is None:
        return np.ascontiguousarray(values)
    result = np.zeros((count, threads), f"u{size}")
    result[:, lanes] = values
    return result


def gathered(memory, offsets, size: int, values, lanes, site: str, report: Report) -> None:
    """Writes the values of each of the lanes from its offset on."""
    items, index = memory.view(f"u{size}"), offsets // size
    for n, value in enumerate(values):
        value = value if lanes is None else value[lanes]
        items[index + n] = value
        if (items[index + n] != value).any():
            report.problems[f"two threads write different values to one place at once: {site}"] += 1
