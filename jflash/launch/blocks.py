"""Tile sizes and launch parameters: what the caller may choose, and what is chosen otherwise."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import logging
from collections.abc import Mapping
from typing import Any

from jax import lax

from jflash.launch import gpu, user_cache
from jflash.launch import table as launch_table
from jflash.launch.table import Entry, Key, Launch
from jflash.score.arguments import ScoreOptions

_logger = logging.getLogger("jflash")


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile sizes, warps and pipeline stages of the three kernels; None leaves a choice to jflash.

    block_q and block_kv are the forward's; the suffixes _dkv and _dq mean the two backward kernels, _dkv also those for
    the gradients of bias and score_args, and each the kernels of their tangents. All sizes and warps are powers of two.
    implementation="xla" uses block_q and block_kv, and in the backward those of dkv.
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
            if value is not None:
                launch_table.check(f"BlockSizes.{field.name}", value, "an int or None")

    def over(self, entry: Entry) -> Entry:
        """What was chosen here for the entry's kernel, and the rest from the entry."""
        kernel = entry.key.kernel
        if kernel == "delta":
            return entry
        suffix = {"forward": "", "tangent": "", "dq": "_dq", "dq_tangent": "_dq"}.get(kernel, "_dkv")
        chosen = {f.name: getattr(self, f.name + suffix) for f in dataclasses.fields(Launch)}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        if not chosen:
            return entry
        return Entry(entry.key, dataclasses.replace(entry.launch, **chosen), origin="block_sizes")


DEFAULTS = BlockSizes()


class Options(ScoreOptions, total=False):
    """All options of attention() but return_lse."""

    precision: lax.PrecisionLike
    block_sizes: BlockSizes | None
    implementation: str | None


def of_score(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of attention()'s options that are a Score's; raises where there are others than attention() takes."""
    own = ScoreOptions.__annotations__
    if unknown := set(options) - set(Options.__annotations__) - set(own):
        raise TypeError(f"options must be those of attention() but return_lse, got {', '.join(sorted(unknown))}")
    return {name: value for name, value in options.items() if name in own}


def given(block_sizes: Any) -> BlockSizes:
    """The argument of that name, checked; the defaults where it is None."""
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise TypeError(f"block_sizes must be a jflash.BlockSizes or None, got {block_sizes!r}")
    return block_sizes or DEFAULTS


def default(key: Key) -> Entry:
    """What is known for a kernel on the GPU that is traced for: the first of these that there is.

    1. What jflash.tune() measured on GPUs of this kind (user_cache.py), at the nearest lengths.
    2. The shipped table of the GPU's family, tuned/<gpu.family>.json: the least widths that are large enough.
    3. rule().
    """
    kind = gpu.kind()
    entry = (
        launch_table.tuned_for(user_cache.entries(kind), key)
        or launch_table.large_enough_for(shipped(gpu.family(kind)), key)
        or Entry(key, rule(key), origin="rule")
    )
    _logger.debug("traced for %s: %s", kind or "no GPU", entry)
    return entry


def kernels_of_keys(key: Key) -> tuple[str, ...]:
    """What computes dk and dv: "dkv", or "dk" and "dv" where only for these the family's table has an entry.

    Of their tangents "dkv" up to a width of 64, since beside the operands' tangents there is no room for more.
    """
    if key.kernel == "dkv_tangent":
        return ("dkv",) if max(key.head_dim, key.v_dim) <= 64 else ("dk", "dv")
    table = shipped(gpu.family(gpu.kind()))
    has = lambda kernel: launch_table.large_enough_for(table, dataclasses.replace(key, kernel=kernel)) is not None
    return ("dk", "dv") if not has("dkv") and has("dk") and has("dv") else ("dkv",)


def rule(key: Key) -> Launch:
    """A launch that fits on every GPU: square tiles of 64, of 32 for float32 and for widths over 128."""
    width = max(key.head_dim, key.v_dim)
    if key.kernel in launch_table.TANGENT_KERNELS:
        return _rule_of_tangents(key, width)
    if key.kernel == "delta":  # it multiplies no matrices: 4096 elements of o, in whole rows
        return Launch(block_q=4096 // max(32, 1 << (width - 1).bit_length()), block_kv=16, num_warps=4, num_stages=1)
    if key.kernel == "dscore":
        block = 64 if key.bits == 16 else 32
        return Launch(block_q=block, block_kv=block, num_warps=4 if width <= 64 else 8, num_stages=1)
    block = 64 if key.bits == 16 and width <= 128 else 32
    return Launch(block_q=block, block_kv=block, num_warps=4, num_stages=1)


def _rule_of_tangents(key: Key, width: int) -> Launch:
    """The same with twice the operands, so that one side of a tile is shorter: the one that is looped over."""
    block = 64 if key.bits == 16 else 32
    narrow = width > 128 or (width > 64 and (key.kernel == "dk_tangent" or key.bits == 32))
    shorter = 16 if narrow else 32
    block_q, block_kv = (shorter, block) if key.kernel in ("dkv_tangent", "dk_tangent", "dv_tangent") else (block, shorter)
    return Launch(block_q, block_kv, num_warps=4, num_stages=1)


@functools.cache
def shipped(family: str) -> tuple[Entry, ...]:
    """The entries of tuned/<family>.json."""
    name = f"tuned/{family}.json"
    return launch_table.read((importlib.resources.files("jflash.launch") / name).read_text(), f"jflash/launch/{name}")
