"""What jflash wants to reach on an H100: the figures of its peers as data, and what was measured beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from benchmarks.attention import Shape

# TFLOPS of tokamax's Pallas-Triton attention by (head_dim, causal): forward, and backward alone. Source: the tuning caches
# that tokamax ships; H100 SXM, bfloat16, hidden size 2048, 16384 tokens, length 8192.
TOKAMAX = {(64, True): (287, 244), (64, False): (313, 260), (128, True): (366, 332), (128, False): (394, 327)}
TIMES_TOKAMAX = {"forward": 1.25, "backward": 1.15}
OF_CUDNN = 0.65  # in the same run
SHORTEST = 4096  # goals are for this length and beyond
JUDGED_ON = {"H100", "H200"}
TOKENS, HIDDEN = 16384, 2048  # of the shapes that tokamax's figures are for


class Rates(NamedTuple):
    """TFLOPS of each attention at one shape, forward or backward alone."""

    shape: Shape  # its `backward` tells which
    tflops: dict[str, float]

    @property
    def direction(self) -> str:
        return "backward" if self.shape.backward else "forward"

    def __str__(self) -> str:
        batch, length, heads, head_dim, dtype, causal, _ = self.shape
        return f"{self.direction}, {batch} x {length}, {heads} heads of {head_dim}, {'causal' if causal else 'full'}, {dtype}"


class Goal(NamedTuple):
    """What was to be reached at one shape, and what was."""

    rates: Rates
    name: str
    least: float  # TFLOPS
    got: float

    @property
    def met(self) -> bool:
        return self.got >= self.least


def side_by_side(lines: Iterable[dict[str, Any]]) -> list[Rates]:
    """The lines of benchmarks.attention.measure(), shape by shape.

    The backward alone is what forward and backward took beyond the forward: five products against two, so 2.5 times its
    operations. An attention of which only one of the two was measured has no such rate.
    """
    seconds: dict[Shape, dict[str, float]] = {}
    for line in lines:
        shape = Shape(*(line[field] for field in Shape._fields))
        seconds.setdefault(shape, {})[line["attention"]] = line["milliseconds"] / 1e3
    found = []
    for shape, both in seconds.items():
        forward = shape._replace(backward=False)
        if not shape.backward:
            alone, flops = both, shape.flops
        else:
            before = seconds.get(forward, {})
            alone, flops = {name: both[name] - before[name] for name in both if name in before}, shape.flops - forward.flops
        tflops = {name: 1e-12 * flops / time for name, time in alone.items() if time > 0}
        if tflops:
            found.append(Rates(shape, tflops))
    return found


def judged_on(device_kind: str) -> bool:
    """Whether the goals are for this device."""
    return not JUDGED_ON.isdisjoint(re.findall(r"\w+", device_kind))


def goals(rates: Rates) -> Iterator[Goal]:
    """Those for one shape; none where there is nothing of jflash or no peer's figure."""
    shape, ours = rates.shape, rates.tflops.get("jflash")
    if ours is None or shape.length < SHORTEST:
        return
    size = shape.batch * shape.length, shape.heads * shape.head_dim, shape.dtype
    published = TOKAMAX.get((shape.head_dim, shape.causal))
    if published and size == (TOKENS, HIDDEN, "bfloat16"):
        times = TIMES_TOKAMAX[rates.direction]
        figure = published[shape.backward]
        yield Goal(rates, f"{times} of tokamax's published {figure}", times * figure, ours)
    if (cudnn := rates.tflops.get("cuDNN")) is not None:
        yield Goal(rates, f"{OF_CUDNN} of cuDNN's {cudnn:.0f} in this run", OF_CUDNN * cudnn, ours)
