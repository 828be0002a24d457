"""Score: what the score of one (query, key) pair is."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from jflash.numerics import LOG2E, smaller

# No position lies farther from 0, so that sums of three of them (an offset, an index, a window) fit into int32.
FARTHEST = 2**29


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Score:
    """Which keys a query sees, and with what logit. Options are static fields, arrays are leaves (None where absent).

    One Score travels from attention() through custom_vjp into every implementation. On the host its leaves are arrays
    with a leading batch axis; a kernel's block specs are a Score too, and so are the refs inside it; select() turns
    either into the Score of one batch element, and only then do the questions below have an answer.

    Query i stands at position offset + i and sees the keys from `left` before that position to `right` behind it
    (None: no limit), of which there are kv_len. causal=True has become right = 0.
    """

    q_len: int = dataclasses.field(metadata={"static": True})
    kv_len: int = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    left: int | None = dataclasses.field(default=None, metadata={"static": True})
    right: int | None = dataclasses.field(default=None, metadata={"static": True})
    static_offset: int = dataclasses.field(default=0, metadata={"static": True})
    q_offset: Any = None  # int32 [batch] on the host, a ref in a kernel, a scalar after select()

    @classmethod
    def of(
        cls,
        q: Array,
        k: Array,
        *,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        q_offset: int | ArrayLike = 0,
        scale: float | None = None,
    ) -> Score:
        """The Score of q `[batch, q_len, heads, head_dim]` and k `[batch, kv_len, ...]`; options as in attention()."""
        for name, length in (("q", q.shape[1]), ("k", k.shape[1])):
            if length > FARTHEST:
                raise ValueError(f"{name} must be at most {FARTHEST} long, got {length}")
        left, right = _window(window)
        if not isinstance(causal, (bool, np.bool_)):
            raise TypeError(f"causal must be a bool, got {causal!r}")
        if causal:
            right = 0
        static_offset, offsets = _offset(q_offset, len(q))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else _scale(scale)
        return cls(q.shape[1], k.shape[1], scale, left, right, static_offset, offsets)

    # ------------------------------------------------------------------------------------------- one batch element

    def select(self, read=lambda leaf: leaf[0]) -> Score:
        """The Score of one batch element; `read` takes a leaf's value out of its block or ref."""
        return self if self.q_offset is None else dataclasses.replace(self, q_offset=read(self.q_offset))

    @property
    def offset(self) -> int | Array:
        return self.static_offset if self.q_offset is None else self.q_offset

    # ------------------------------------------------------------------------------------------- is it visible?

    def key_bounds(self, rows):
        """(first, last) of the keys that the queries `rows` see, last included; first > last where there are none."""
        first = 0 if self.left is None else rows + (self.offset - self.left)
        last = self.kv_len - 1 if self.right is None else smaller(rows + (self.offset + self.right), self.kv_len - 1)
        return first, last

    def query_bounds(self, cols):
        """(first, last) of the queries that see the keys `cols`: key_bounds with the two sides exchanged."""
        first = 0 if self.right is None else cols - (self.offset + self.right)
        last = self.q_len - 1 if self.left is None else smaller(cols - (self.offset - self.left), self.q_len - 1)
        return first, last

    def visible(self, rows: Array, cols: Array) -> Array:
        """True where the queries `rows` see the keys `cols`; the two broadcast against each other."""
        first, last = self.key_bounds(rows)
        below = cols <= last
        return below if self.left is None else below & (cols >= first)

    # ------------------------------------------------------------------------------------------- what is its logit?

    @property
    def plain(self) -> bool:
        """True where the logit is just scale * qk with a positive scale, which then costs nothing an element."""
        return self.scale > 0

    @property
    def unit(self) -> float:
        """What one unit of logit() is in natural units."""
        return self.scale if self.plain else 1.0

    @property
    def slope(self) -> float:
        """What one unit of logit() is in base-2 units."""
        return self.unit * LOG2E

    def logit(self, qk: Array, rows: Array, cols: Array) -> Array:
        """The logit of each pair in multiples of `unit`, from the raw product qk."""
        return qk if self.plain else qk * self.scale


def _window(window) -> tuple[int | None, int | None]:
    """(left, right), None where there is no limit."""
    if window is None or isinstance(window, (int, np.integer)):
        window = (window, window)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be an int, a pair (left, right) or None, got {window!r}")
    sides = []
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, np.integer))):
            raise TypeError(f"window must hold ints or None, got {window!r}")
        if side is not None and side < 0:
            raise ValueError(f"window must not be negative, got {window!r}")
        sides.append(None if side is None or side >= FARTHEST else int(side))
    return sides[0], sides[1]


def _offset(q_offset, batch: int) -> tuple[int, Array | None]:
    """(static offset, None), or (0, int32 [batch]) for an array."""
    if isinstance(q_offset, bool):
        raise TypeError(f"q_offset must be an int or an integer array, got {q_offset!r}")
    if isinstance(q_offset, (int, np.integer)):
        if abs(q_offset) > FARTHEST:
            raise ValueError(f"q_offset must lie within ±{FARTHEST}, got {q_offset}")
        return operator.index(q_offset), None
    offsets = jnp.asarray(q_offset)
    if not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise TypeError(f"q_offset must be an int or an integer array, got {offsets.dtype}")
    if offsets.shape not in ((), (batch,)):
        raise ValueError(f"q_offset must be a scalar or have the shape [batch], ({batch},), got shape {offsets.shape}")
    return 0, jnp.broadcast_to(jnp.clip(offsets, -FARTHEST, FARTHEST).astype(jnp.int32), (batch,))


def _scale(scale) -> float:
    if isinstance(scale, Tracer):
        raise TypeError("scale must be a Python number, got a traced value: multiply q by it instead and give scale=1.0")
    try:
        scale = float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"scale must be a Python number, got {scale!r}") from None
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale
