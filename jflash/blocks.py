"""Tile sizes and launch parameters: what the caller may choose, and what is chosen otherwise."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json

import jax.numpy as jnp

from jflash import gpu

WIDTHS = (64, 128, 256)  # the classes of max(head_dim, v_dim) for which tuned/ has entries


@dataclasses.dataclass(frozen=True)
class Launch:
    """How one kernel is launched."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile sizes, warps and pipeline stages of the three kernels; None leaves a choice to jflash.

    block_q and block_kv are the forward's; the suffixes _dkv and _dq mean the two backward kernels, _dkv also those for
    the gradients of bias and score_args. All sizes and warps are powers of two. implementation="xla" uses block_q and
    block_kv, and in the backward those of dkv.
    """

    block_q: int | None = None
    block_kv: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    num_warps_dkv: int | None = None
    num_stages_dkv: int | None = None
    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    num_warps_dq: int | None = None
    num_stages_dq: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"BlockSizes.{field.name} must be an int or None, got {value!r}")
            least = 16 if field.name.startswith("block") else 1
            if value < least or (not field.name.startswith("num_stages") and value & (value - 1)):
                kind = "at least 1" if field.name.startswith("num_stages") else f"a power of two, at least {least}"
                raise ValueError(f"BlockSizes.{field.name} must be {kind}, got {value}")

    def launch(self, kernel: str, default: Launch) -> Launch:
        """The Launch of "forward", "dkv", "dq" or "dscore": what was chosen here, `default` for the rest."""
        suffix = {"forward": "", "dkv": "_dkv", "dq": "_dq", "dscore": "_dkv"}[kernel]
        chosen = {f.name: getattr(self, f.name + suffix) for f in dataclasses.fields(Launch)}
        return dataclasses.replace(default, **{name: value for name, value in chosen.items() if value is not None})


DEFAULTS = BlockSizes()


def default(kernel: str, dtype, width: int, options_class: str = "plain") -> Launch:
    """The Launch of a kernel for the GPU that is traced for, a head_dim or v_dim of `width`, and Score.options_class.

    The kernels are "forward", "dkv", "dq", "dscore" (which is dbias and dargs) and "delta".
    """
    itemsize = jnp.dtype(dtype).itemsize
    if kernel == "delta":
        return Launch(block_q=4096 // max(32, 1 << (width - 1).bit_length()), block_kv=16, num_warps=4, num_stages=1)
    if kernel == "dscore":
        block = 64 if itemsize == 2 else 32
        return Launch(block_q=block, block_kv=block, num_warps=4 if width <= 64 else 8, num_stages=1)
    least_that_fits = min(w for w in WIDTHS if w >= width)
    table = _table(gpu.family(gpu.kind()))
    entry = kernel, itemsize, least_that_fits
    return table.get((*entry, options_class)) or table[*entry, "plain"]


@functools.cache
def _table(family: str) -> dict[tuple[str, int, int, str], Launch]:
    """The launches of tuned/<family>.json by kernel, bytes an element, width and options class."""
    text = (importlib.resources.files("jflash") / "tuned" / f"{family}.json").read_text()
    return {
        (entry.pop("kernel"), entry.pop("itemsize"), entry.pop("width"), entry.pop("options", "plain")): Launch(**entry)
        for entry in json.loads(text)["launches"]
    }
