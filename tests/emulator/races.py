"""Two warps at one place in shared memory, one of them writing, and no barrier between: who comes first is chance.

For each two bytes: the warp that wrote them last and the one that read them last, both with the number of barriers that
their block had passed by then. What threads of one warp do to each other is not looked at.
"""

import numpy as np

from emulator.report import Report
from emulator.threads import Threads

GRANULE = 2  # bytes
WARPS = 2**8  # a warp and an epoch in one number: the warp in its last bits
SEVERAL = WARPS - 1  # in place of a warp


class Races:
    def __init__(self, threads: Threads, size: int, report: Report):
        self._threads, self._report = threads, report
        self._epoch = np.ones(len(threads.blocks), "u4")
        self._written, self._read = np.zeros(size // GRANULE, "u4"), np.zeros(size // GRANULE, "u4")

    def barrier(self, blocks: np.ndarray | None) -> None:
        """The next epoch of the blocks where `blocks` holds (None: all)."""
        self._epoch += 1 if blocks is None else blocks.astype("u4")

    def read(self, offsets: np.ndarray, size: int, lanes: np.ndarray | None, site: str) -> None:
        places, now = self._places(offsets, size), self._now(lanes, offsets, size)
        self._look(self._written[places], now, f"read after write by another warp, no barrier between: {site}")
        shared = _other_warp(self._read[places], now)
        mark = np.where(shared, now | SEVERAL, now)
        self._read[places] = mark
        self._read[places[self._read[places] != mark]] |= SEVERAL  # several warps of this one instruction

    def write(self, offsets: np.ndarray, size: int, lanes: np.ndarray | None, site: str) -> None:
        places, now = self._places(offsets, size), self._now(lanes, offsets, size)
        self._look(self._written[places], now, f"write after write by another warp, no barrier between: {site}")
        self._look(self._read[places], now, f"write after read by another warp, no barrier between: {site}")
        self._written[places] = now

    def _places(self, offsets: np.ndarray, size: int) -> np.ndarray:
        if size <= GRANULE:
            return offsets.reshape(-1) // GRANULE
        return (offsets.reshape(-1, 1) // GRANULE + np.arange(size // GRANULE)).reshape(-1)

    def _now(self, lanes: np.ndarray | None, offsets: np.ndarray, size: int) -> np.ndarray:
        """The mark of each place's access: epoch and warp."""
        pick = slice(None) if lanes is None else lanes
        mark = self._epoch[self._threads.block_of[pick]] * WARPS + self._threads.warp[pick]
        return np.repeat(mark, offsets.size // mark.size * max(1, size // GRANULE))

    def _look(self, before: np.ndarray, now: np.ndarray, what: str) -> None:
        if count := int(np.count_nonzero(_other_warp(before, now))):
            self._report.problems[what] += count


def _other_warp(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Where two marks are of one epoch and of different warps."""
    apart = before ^ now
    return (apart != 0) & (apart < WARPS)
