"""The search for the fastest launch of a kernel: which are tried, and which is taken."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jflash.kernels.dkv import PARTS
from jflash.launch.table import Key, Launch
from jflash.tuning.probe import Built, Refused

BLOCKS, WARPS, STAGES = (32, 64, 128, 256), (4, 8), (1, 2, 3, 4)
REGISTERS = 255  # the most that a thread may have
NOISE = 0.02  # a launch must beat the default by more than this share of its time
REPEATS = 5  # timings of each launch in each round
LEAST = 0.01  # seconds that one timing lasts at least, by running the kernel several times
COMPILING = 0.75  # share of the time after which no further launch is compiled


def candidates(key: Key, default: Launch, shared_bytes: int) -> list[Launch]:
    """Launches that may be better than the default, the most similar to it first; none that surely cannot be run well.

    Source of the space: powers of two around what FlashAttention-2 uses (Dao 2023, arXiv:2307.08691, section 3.3).
    """
    launches = itertools.starmap(Launch, itertools.product(BLOCKS, BLOCKS, WARPS, STAGES))
    good = [launch for launch in launches if launch != default and _may_fit(key, launch, shared_bytes)]

    def steps(launch: Launch) -> float:
        pairs = zip(dataclasses.astuple(launch)[:3], dataclasses.astuple(default)[:3], strict=True)
        return sum(abs(math.log2(x / y)) for x, y in pairs) + abs(launch.num_stages - default.num_stages) / 2

    return sorted(good, key=steps)


def _may_fit(key: Key, launch: Launch, shared_bytes: int) -> bool:
    """A bound from below: what the loop loads ahead lies in shared memory, and sums and logits in registers."""
    own, other = (launch.block_kv, launch.block_q) if key.kernel in PARTS else (launch.block_q, launch.block_kv)
    loaded = max(launch.num_stages - 1, 1) * other * (key.head_dim + key.v_dim) * key.bits // 8
    sums = {"forward": (key.v_dim,), "dq": (key.head_dim,), "dk": (key.head_dim,), "dv": (key.v_dim,), "dscore": ()}
    width = sum(sums.get(key.kernel, (key.head_dim, key.v_dim)))
    numbers = own * width + launch.block_q * launch.block_kv
    return loaded <= shared_bytes and numbers <= REGISTERS * 32 * launch.num_warps


class Timed(NamedTuple):
    """A launch and how long the kernel takes with it."""

    launch: Launch
    seconds: float
    spill_bytes: int


@dataclasses.dataclass(frozen=True)
class Tuner:
    """Builds launches of a kernel, times those that neither spill nor wait for each product, and keeps the fastest."""

    build: Callable[[str, Launch], Built]  # raises Refused
    clock: Callable[[], float]  # seconds
    say: Callable[[str, int, int, str], None]  # (kernel, launches seen, launches in all, what became of the last one)

    def fastest(self, kernel: str, default: Launch, others: Sequence[Launch], seconds: float) -> Timed:
        """The fastest launch that can be found in about this time; the default unless another is faster beyond noise.

        Only the default may spill or be serialized. Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943): all
        are timed in turns, so that the moods of the GPU meet all alike, and the slower half is left out of the next round.
        """
        start = self.clock()
        built = self._buildable(kernel, default, others, start + COMPILING * seconds)
        if not built:
            raise RuntimeError(f"the compiler takes no launch of {kernel}, not even the default, {default}")
        times: dict[Launch, list[float]] = {launch: [] for launch in built}
        runs = {launch: max(1, math.ceil(LEAST / self._time(one, 1))) for launch, one in built.items()}
        running = list(built)
        median = lambda launch: statistics.median(times[launch])
        while True:
            for _, launch in itertools.product(range(REPEATS), running):
                times[launch].append(self._time(built[launch], runs[launch]))
            running.sort(key=median)
            best = running[0]
            self.say(kernel, len(others) + 1, len(others) + 1, f"{_shown(best)}: the fastest of {len(running)}")
            if len(running) <= 2 or self.clock() > start + seconds:
                break
            running = running[: len(running) // 2]
            if default in built and default not in running:
                running.append(default)
        if default in built and median(best) > (1 - NOISE) * median(default):
            best = default
        return Timed(best, median(best), built[best].spill_bytes)

    def _buildable(self, kernel: str, default: Launch, others: Sequence[Launch], until: float) -> dict[Launch, Built]:
        """The launches that the compiler takes, without spills and without serializing the products; warmed up."""
        built = {}
        for n, launch in enumerate((default, *others)):
            if built and self.clock() > until:
                self.say(kernel, n, len(others) + 1, f"no time for the other {len(others) + 1 - n}")
                break
            try:
                one = self.build(kernel, launch)
            except Refused:
                became = "does not fit"
            else:
                faults = [f"spills {one.spill_bytes} bytes"] if one.spill_bytes else []
                faults += [f"waits for each product ({why})" for why in one.serialized]
                became = " and ".join(faults) or "fits"
                if not faults or launch == default:
                    one.run(1)
                    built[launch] = one
            self.say(kernel, n + 1, len(others) + 1, f"{_shown(launch)}: {became}")
        return built

    def _time(self, built: Built, runs: int) -> float:
        """Seconds of one run."""
        start = self.clock()
        built.run(runs)
        return (self.clock() - start) / runs


def _shown(launch: Launch) -> str:
    return f"{launch.block_q} x {launch.block_kv}, {launch.num_warps} warps, {launch.num_stages} stages"
