"""cp.async: copies from global to shared memory that arrive some time before they are waited for.

Here they arrive as late as they may, when they are waited for, and until then their destination holds ones, NaN as floats:
who forgets to wait, or waits for too few groups, reads NaN.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from emulator.errors import Unknown
from emulator.memory import ISLAND, GlobalMemory
from emulator.shared import SharedMemory
from emulator.threads import Mask, Threads

NO_GROUP = -1


@dataclasses.dataclass
class Copy:
    """One instruction's copies, one a lane."""

    lanes: np.ndarray
    source: np.ndarray  # addresses
    target: np.ndarray  # bytes in shared memory
    present: np.ndarray  # bool: copied; else zeros are written
    group: np.ndarray  # of its thread, by number
    size: int
    site: str

    def where(self, those: np.ndarray) -> Copy:
        fields = (self.lanes, self.source, self.target, self.present, self.group)
        return Copy(*(x[those] for x in fields), self.size, self.site)


class Copies:
    def __init__(self, threads: Threads, arrays: GlobalMemory, shared: SharedMemory):
        self._threads, self._arrays, self._shared = threads, arrays, shared
        self._under_way: list[Copy] = []
        self._committed = np.zeros(threads.count, "i8")  # groups of each thread

    def issue(self, target, source, size: int, present, m: Mask, site: str) -> None:
        lanes = self._threads.active(m)
        lanes = np.arange(self._threads.count) if lanes is None else lanes
        if lanes.size == 0:
            return
        offsets = self._shared.find(target, lanes, size, site)
        length = np.full(lanes.size, size) if present is None else present[lanes]
        if not np.isin(length, (0, size)).all():
            raise Unknown(f"{site}: a part of the bytes")
        if (length > 0).any():
            self._arrays.find(source, lanes[length > 0], size, site)
        self._shared.note_write(offsets, size, lanes, site)
        self._write(offsets, size, 0xFF)
        group = np.full(lanes.size, NO_GROUP)
        self._under_way.append(Copy(lanes, source[lanes], offsets, length > 0, group, size, site))

    def commit(self, m: Mask) -> None:
        for copy in self._under_way:
            new = copy.group == NO_GROUP
            if m is not None:
                new &= m[copy.lanes]
            copy.group[new] = self._committed[copy.lanes[new]]
        self._committed += 1 if m is None else m

    def wait(self, m: Mask, pending: int) -> None:
        """Until at most so many groups of each thread are pending."""
        left = []
        for copy in self._under_way:
            done = (copy.group != NO_GROUP) & (copy.group < self._committed[copy.lanes] - pending)
            if m is not None:
                done &= m[copy.lanes]
            if done.any():
                self._arrive(copy.where(done))
            if not done.all():
                left.append(copy.where(~done))
        self._under_way = left

    def _arrive(self, copy: Copy) -> None:
        data = np.zeros((copy.lanes.size, copy.size), "u1")
        for island in np.unique(copy.source[copy.present] >> np.uint64(ISLAND)):
            those = np.flatnonzero(copy.present & (copy.source >> np.uint64(ISLAND) == island))
            array, offsets = self._arrays.find(copy.source, those, copy.size, copy.site)
            data[those] = array.bytes.reshape(-1, copy.size)[offsets // copy.size]
        self._shared.note_write(copy.target, copy.size, copy.lanes, copy.site)
        self._write(copy.target, copy.size, data)

    def _write(self, offsets: np.ndarray, size: int, data) -> None:
        self._shared.bytes.reshape(-1, size)[offsets // size] = data
