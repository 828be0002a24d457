"""Who runs: the threads of some blocks of a grid as one vector, a lane each, and what the threads of a warp do together."""

from __future__ import annotations

import numpy as np

from emulator.errors import Fault

WARP, GROUP = 32, 128  # threads of a warp; of a warpgroup, which runs wgmma
Mask = np.ndarray | None  # bool, one a lane; None: all


class Threads:
    def __init__(self, kernel: str, grid: tuple[int, int, int], blocks: np.ndarray, per_block: int):
        self.kernel, self.grid, self.blocks, self.per_block = kernel, grid, blocks, per_block
        self.count = len(blocks) * per_block
        lanes = np.arange(self.count)
        self.block_of = lanes // per_block  # in `blocks`
        self.block_number = blocks[self.block_of].astype("i4")  # in the grid
        self.lane = (lanes % WARP).astype("i8")
        self.first_of_warp = (lanes - lanes % WARP).astype("i8")
        self.warp = (lanes % per_block // WARP).astype("u4")  # in its block

    def active(self, m: Mask) -> np.ndarray | None:
        """The lanes where m holds; None for all."""
        return None if m is None or m.all() else np.flatnonzero(m)

    def of_blocks(self, m: np.ndarray) -> np.ndarray:
        """m as [blocks, threads of a block]."""
        return m.reshape(len(self.blocks), self.per_block)

    def check_warps(self, m: Mask, site: str) -> None:
        self._check_whole(m, WARP, "a warp", site)

    def groups(self, m: Mask, site: str) -> np.ndarray:
        """Which warpgroups are here."""
        if self.per_block % GROUP:
            raise self.fault(site, 0, f"wgmma in blocks of {self.per_block} threads")
        self._check_whole(m, GROUP, "a warpgroup", site)
        return np.ones(self.count // GROUP, bool) if m is None else m.reshape(-1, GROUP)[:, 0]

    def _check_whole(self, m: Mask, size: int, what: str, site: str) -> None:
        if m is not None:
            teams = m.reshape(-1, size)
            if (partly := teams.any(1) & ~teams.all(1)).any():
                raise self.fault(site, int(np.argmax(partly)) * size, f"not all threads of {what} are here")

    def fault(self, site: str, lane: int, what: str) -> Fault:
        x, y, _ = self.grid
        block = int(self.block_number[lane])
        place = block % x, block // x % y, block // (x * y)
        return Fault(f"{self.kernel}: {site}: thread {lane % self.per_block} of block {place}: {what}")


class Warps:
    """Threads of a warp that look at each other's registers."""

    def __init__(self, threads: Threads):
        self.threads = threads
        self._sources: dict = {}

    def shuffle(self, mode: str, values, lane, clamp, m: Mask, site: str):
        """(the value of another lane, whether there is that lane)"""
        self.threads.check_warps(m, site)
        fixed = isinstance(lane, int) and isinstance(clamp, int)
        key = mode, lane if fixed else None, clamp if fixed else None
        if key not in self._sources or not fixed:
            self._sources[key] = self._source(mode, np.asarray(lane, "i8"), np.asarray(clamp, "i8"))
        source, inside = self._sources[key]
        return values[source], inside

    def _source(self, mode: str, b, c):
        """As the pseudo-code of the PTX ISA has it: c holds the least and the greatest lane within a segment."""
        lane, segment, clamp, b = self.threads.lane, c >> 8 & 31, c & 31, b & 31
        low = lane & segment
        greatest = low | (clamp & ~segment)
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}[mode]
        inside = source >= greatest if mode == "up" else source <= greatest
        return self.threads.first_of_warp + np.where(inside, source, lane), inside

    def vote(self, mode: str, predicate, m: Mask, site: str):
        self.threads.check_warps(m, site)
        votes = predicate.reshape(-1, WARP)
        if mode == "ballot":
            result = (votes.astype("u8") << np.arange(WARP, dtype="u8")).sum(1).astype("u4")
        else:
            result = {"any": votes.any(1), "all": votes.all(1), "uni": votes.all(1) | ~votes.any(1)}[mode]
        return np.repeat(result, WARP)

    def reduce(self, operation: str, values, m: Mask, site: str):
        self.threads.check_warps(m, site)
        names = {"min": "minimum", "max": "maximum", **{name: f"bitwise_{name}" for name in ("and", "or", "xor")}}
        ufunc = getattr(np, names.get(operation, operation))
        return np.repeat(ufunc.reduce(values.reshape(-1, WARP), axis=1, dtype=values.dtype), WARP)
