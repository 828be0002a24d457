"""The table of cases that the tests, `python -m jflash` and the benchmarks share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, dtype, options and the kind of values of one call of attention()."""

    q_len: int
    kv_len: int
    head_dim: int = 64
    v_dim: int | None = None  # None: head_dim
    heads: int = 2
    kv_heads: int = 2
    batch: int = 2
    dtype: str = "float32"
    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    q_offset: int | tuple[int, ...] = 0  # a tuple: one a batch element, given as an array
    scale: float | None = None
    values: str = "normal"  # "large": logits of ±1e4; "identical": all logits of a row are equal

    @property
    def name(self) -> str:
        """What differs from the defaults, short."""
        text = f"{self.q_len}x{self.kv_len} d{self.head_dim}"
        text += "" if self.v_dim is None else f"/{self.v_dim}"
        text += "" if self.heads == self.kv_heads else f" {self.heads}over{self.kv_heads}"
        for field in ("dtype", "causal", "window", "q_offset", "scale", "values"):
            value, default = getattr(self, field), getattr(Case, field)
            if value != default:
                text += f" {field}" if value is True else f" {value}" if isinstance(value, str) else f" {field} {value}"
        return text

    def options(self) -> dict[str, Any]:
        """The keyword arguments of attention()."""
        offset = jnp.array(self.q_offset, jnp.int32) if isinstance(self.q_offset, tuple) else self.q_offset
        return {"causal": self.causal, "window": self.window, "q_offset": offset, "scale": self.scale}

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """q, k, v and the cotangents do and dlse, as float64 numbers that the case's dtype can hold exactly."""
        random = np.random.default_rng(seed)
        v_dim = self.v_dim or self.head_dim
        q = random.standard_normal((self.batch, self.q_len, self.heads, self.head_dim))
        k = random.standard_normal((self.batch, self.kv_len, self.kv_heads, self.head_dim))
        v = random.standard_normal((self.batch, self.kv_len, self.kv_heads, v_dim))
        do = random.standard_normal((self.batch, self.q_len, self.heads, v_dim))
        dlse = random.standard_normal((self.batch, self.heads, self.q_len))
        if self.values == "large":
            # |logit| = |q · k| * scale; the largest of a few hundred standard normal products is about 3 sqrt(head_dim).
            q, k = q * (1e4 / 3) ** 0.5, k * (1e4 / 3) ** 0.5
        elif self.values == "identical":
            q, k = np.ones_like(q), np.ones_like(k)
        dtype = jnp.dtype(self.dtype)
        return *(np.asarray(x.astype(dtype), np.float64) for x in (q, k, v, do)), dlse.astype(np.float32).astype(np.float64)


CASES = (
    # The plain thing, in each dtype.
    Case(64, 64),
    Case(257, 257, causal=True),
    Case(257, 257, causal=True, dtype="float16"),
    Case(257, 257, causal=True, dtype="bfloat16"),
    Case(100, 257, dtype="bfloat16", heads=6, kv_heads=2),
    # Lengths: none, one, ragged, q_len != kv_len both ways.
    Case(0, 7),
    Case(7, 0),
    Case(1, 1, head_dim=1),
    Case(1, 257, head_dim=128, q_offset=256, causal=True, heads=8, kv_heads=1),
    Case(7, 100, head_dim=5),
    Case(257, 7, head_dim=40, causal=True),
    Case(100, 64, head_dim=80, dtype="float16"),
    # Widths that are no power of two, and v_dim != head_dim.
    Case(100, 100, head_dim=96, causal=True),
    Case(64, 100, head_dim=72, v_dim=40, heads=3, kv_heads=1),
    Case(64, 64, head_dim=160, v_dim=192, dtype="bfloat16"),
    Case(100, 100, head_dim=256, causal=True),
    Case(64, 257, head_dim=32, v_dim=128, dtype="float16", heads=8, kv_heads=1, causal=True, q_offset=193),
    # Windows on each side, and offsets both ways.
    Case(257, 257, head_dim=32, window=(30, 0)),
    Case(257, 257, head_dim=32, window=(0, 30), dtype="float16"),
    Case(257, 257, head_dim=16, window=64, heads=4, kv_heads=2),
    Case(100, 257, head_dim=32, window=(None, 5), q_offset=100),
    Case(257, 100, head_dim=32, window=(5, None), causal=True, q_offset=-20),
    Case(257, 257, head_dim=32, window=0),
    Case(64, 64, head_dim=32, window=(1000, 1000)),
    Case(100, 100, head_dim=32, causal=True, q_offset=(-30, 57)),
    Case(100, 257, head_dim=32, window=(17, 40), q_offset=(150, -60), heads=3, kv_heads=1),
    # Rows that see nothing: some, and all.
    Case(100, 64, head_dim=32, causal=True, q_offset=-50, dtype="bfloat16"),
    Case(64, 64, head_dim=32, causal=True, q_offset=-1000),
    Case(100, 64, head_dim=32, window=(3, 3), q_offset=-10, dtype="float16"),
    # Values: large logits, identical ones, scales that are zero or negative.
    Case(100, 100, values="large"),
    Case(100, 100, values="large", dtype="float16", causal=True),
    Case(100, 100, values="large", dtype="bfloat16"),
    Case(100, 257, values="identical", dtype="bfloat16"),
    Case(64, 100, head_dim=32, scale=0.0, causal=True),
    Case(64, 100, head_dim=32, scale=-0.3),
    Case(64, 100, head_dim=32, scale=1.7, dtype="float16"),
)

# A few of them, and lengths at which memory shows: what `python -m jflash` runs.
SELF_TEST = (
    *CASES[::4],
    Case(1024, 1024, batch=1, heads=4, kv_heads=4, causal=True),
    Case(2048, 2048, batch=1, heads=4, kv_heads=4, dtype="bfloat16"),
)
