"""Which axes of a device mesh cut which dimension of attention, from how its arrays are sharded.

Batch, heads and the axes of jax.vmap may be cut, and then nothing has to move: each part is attention by itself. Lengths
may not: a query needs all the keys that it sees. Nor may widths, of which each product needs all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

Axes = tuple[str, ...]  # of a mesh, by name

LENGTHS = {"i": "q_len", "j": "kv_len"}
WIDTHS = {"d": "head_dim", "e": "v_dim"}


@dataclasses.dataclass(frozen=True)
class Cut:
    """The axes of a mesh that cut each dimension, by the words of primitive.Call; a dimension without any is whole."""

    axes: dict[str, Axes]
    mesh: Mapping[str, int]  # the size of each axis

    @classmethod
    def of(
        cls, names: Sequence[str], dims: Sequence[str], arrays: Sequence[tuple[tuple[int, ...], Any]], mesh: Mapping[str, int],
        strict: bool = False,
    ) -> Cut:  # fmt: skip
        """The Cut of arrays with these names, dimensions, and pairs of shape and PartitionSpec (None: unknown).

        The first array that says something about a dimension decides, so that q, k and v go before what belongs to them.
        `strict`: no other may contradict it.

        Raises:
          ValueError: if a length or a width of an argument is cut, or the heads so that a part would need parts of groups.
        """
        cut = cls({}, mesh)
        sizes: dict[str, int] = {}
        for name, text, (shape, spec) in zip(names, dims, arrays, strict=True):
            for axis, (dim, size, axes) in enumerate(zip(text.split(), shape, _entries(spec, len(shape)), strict=True)):
                sizes[dim] = size
                if dim in LENGTHS or dim in WIDTHS:
                    # The others are of the program's own making and follow the arguments.
                    if name and cut._count(axes) > 1:
                        raise ValueError(_refusal(name, axis, dim, size, axes))
                    continue
                if not axes or dim == ".":
                    continue
                same = {dim, *("gh" if dim in "gh" else "")}  # heads and kv_heads are cut alike
                taken = {x for other, others in cut.axes.items() if other not in same for x in others}
                if dim not in cut.axes and taken.isdisjoint(axes):
                    cut.axes[dim] = cut._that_divide(size, axes)
                elif strict and cut.axes.get(dim) != axes:
                    raise ValueError(
                        f"{name} must be sharded along dimension {axis} as the arguments before it or not at all, over the "
                        f"mesh axes {cut.axes.get(dim, ())}, got {axes}"
                    )
        if "g" in sizes:
            cut.axes["h"] = cut.axes.get("h") or cut.axes.get("g", ())
            cut.axes["g"] = cut._that_divide(sizes["g"], cut.axes["h"])
            group, heads = sizes["h"] // sizes["g"], sizes["h"] // cut.parts("h")
            if cut.group_parts > 1 and group % heads:
                raise ValueError(
                    f"{sizes['h']} heads over {sizes['g']} kv_heads are sharded into {cut.parts('h')} parts over the mesh "
                    f"axes {cut.axes['h']}: that must divide the kv_heads, or each part must lie in one group of {group} heads"
                )
        return cut

    def _that_divide(self, size: int, axes: Axes) -> Axes:
        """As many of the axes, from the first on, as cut `size` evenly."""
        return axes[: sum(size % self._count(axes[: n + 1]) == 0 for n in range(len(axes)))]

    def _count(self, axes: Axes) -> int:
        return math.prod(self.mesh[x] for x in axes)

    def spec(self, text: str) -> PartitionSpec:
        """How an array with these dimensions is cut."""
        return PartitionSpec(*(self.axes.get(dim) or None for dim in text.split()))

    def parts(self, dim: str) -> int:
        return self._count(self.axes.get(dim, ()))

    @property
    def group_parts(self) -> int:
        """Into how many parts the heads are cut besides those of the kv_heads: as many devices have the same kv heads."""
        return self.parts("h") // self.parts("g") if "g" in self.axes else 1

    @property
    def group_axes(self) -> Axes:
        """The axes that cut the heads, but not the kv_heads."""
        return self.axes["h"][len(self.axes["g"]) :] if "g" in self.axes else ()

    def summed(self, text: str) -> Axes:
        """The axes over which the parts of a gradient with these dimensions have to be summed."""
        dims = text.split()
        heads = self.group_axes if "g" in dims else () if "h" in dims else self.axes.get("h", ())
        return (() if "b" in dims else self.axes.get("b", ())) + heads


def _entries(spec: Any, ndim: int) -> list[Axes]:
    """The axes of each dimension."""
    entries = [() if x is None else x if isinstance(x, tuple) else (x,) for x in (spec or ())]
    return [*entries, *[()] * (ndim - len(entries))]


def _refusal(name: str, axis: int, dim: str, size: int, axes: Axes) -> str:
    what = f"{name} is sharded along its {(LENGTHS | WIDTHS)[dim]} of {size} (dimension {axis}) over the mesh axes {axes}: "
    if dim in WIDTHS:
        return what + "shard batch and heads, or gather it (jax.lax.with_sharding_constraint, jax.sharding.reshard) before"
    return (
        what + "jflash.attention does not gather a sequence. Shard batch and heads instead, or use jflash.ring_attention, "
        "which passes the parts around"
    )
