"""The table of cases that the tests, `python -m jflash` and the benchmarks share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Functions of a logit as models use them, by name; score_args() makes their arrays.
BUCKETS = 8
SCORE_FNS = {
    "alibi": lambda s, b, h, i, j, slopes: s - slopes[h] * jnp.abs(i - j),
    "t5": lambda s, b, h, i, j, table: s + table[h, jnp.minimum(jnp.abs(i - j) // 4, BUCKETS - 1)],
    "tanh": lambda s, b, h, i, j: 3.0 * jnp.tanh(s / 3.0),
    # A distance decay, exact only where it is visible: behind the query its logarithm is NaN.
    "decay": lambda s, b, h, i, j, rates, power: s - jnp.exp(rates[h]) * jnp.log((i - j + 1).astype(s.dtype)) * power,
}
MASK_FNS = {
    "thirds": lambda b, h, i, j: (i + j + h + b) % 3 != 0,
    "nothing": lambda b, h, i, j: i + j < 0,
    # A prefix that all of a batch element sees, and which blocks of keys which block of queries sees beside it.
    "prefix": lambda b, h, i, j, prefix, blocks: (j < prefix[b]) | blocks[i // 16, j // 16],
}


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
    segments: str | None = None  # "packed": sorted ids, four documents; "unsorted": ids at random; "one": all the same
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    mask: str | None = None  # its dimensions, right ones first to go: "bhqk", "b11k", "qk", ...
    mask_fn: str | None = None  # a name in MASK_FNS
    softcap: float | None = None
    bias: str | None = None  # like mask
    bias_holes: bool = False  # a tenth of the bias is -inf
    score_fn: str | None = None  # a name in SCORE_FNS
    sinks: bool = False
    dropout_rate: float = 0.0

    @property
    def name(self) -> str:
        """What differs from the defaults, short."""
        text = f"{self.q_len}x{self.kv_len} d{self.head_dim}"
        text += "" if self.v_dim is None else f"/{self.v_dim}"
        text += "" if self.heads == self.kv_heads else f" {self.heads}over{self.kv_heads}"
        shapes = ("q_len", "kv_len", "head_dim", "v_dim", "heads", "kv_heads", "batch")
        for field in (f.name for f in dataclasses.fields(self) if f.name not in shapes):
            value, default = getattr(self, field), getattr(Case, field)
            if value != default:
                bare = field in ("dtype", "values", "score_fn") and isinstance(value, str)
                text += f" {value}" if bare else f" {field}" if value is True else f" {field} {value}"
        return text

    def options(self) -> dict[str, Any]:
        """The keyword arguments of attention() but those that have gradients."""
        random = np.random.default_rng(1)
        options: dict[str, Any] = {name: getattr(self, name) for name in ("causal", "window", "scale", "softcap")}
        options["q_offset"] = jnp.array(self.q_offset, jnp.int32) if isinstance(self.q_offset, tuple) else self.q_offset
        for name in ("q_lengths", "kv_lengths"):
            if getattr(self, name) is not None:
                options[name] = jnp.array(getattr(self, name), jnp.int32)
        if self.segments:
            ids = [random.integers(0, 1 if self.segments == "one" else 4, (self.batch, n)) for n in (self.q_len, self.kv_len)]
            if self.segments == "packed":
                ids = [np.sort(x, axis=1) for x in ids]
            options["segment_ids"] = tuple(jnp.array(x, jnp.int32) for x in ids)
        if self.mask is not None:
            options["mask"] = jnp.array(random.random(self._dimensions(self.mask)) < 0.7)
        if self.mask_fn is not None:
            options["mask_fn"] = MASK_FNS[self.mask_fn]
        if self.mask_fn == "prefix":
            prefix = jnp.array(random.integers(0, self.kv_len, self.batch), jnp.int32)
            options["mask_args"] = prefix, jnp.array(random.random((self.q_len // 16 + 1, self.kv_len // 16 + 1)) < 0.4)
        if self.score_fn is not None:
            options["score_fn"] = SCORE_FNS[self.score_fn]
        if self.dropout_rate:
            options |= {"dropout_rate": self.dropout_rate, "dropout_key": jax.random.key(5)}
        return options

    def _dimensions(self, names: str) -> tuple[int, ...]:
        sizes = {"b": self.batch, "h": self.heads, "q": self.q_len, "k": self.kv_len, "1": 1}
        return tuple(sizes[name] for name in names)

    def parameters(self, seed: int = 2, holes: bool = True) -> dict[str, Any]:
        """The keyword arguments of attention() that have gradients, as float64 that the case's dtype can hold exactly.

        `holes`: whether a bias has those that it has; tangents have none.
        """
        random = np.random.default_rng(seed)
        parameters: dict[str, Any] = {}
        if self.bias is not None:
            shape = self._dimensions(self.bias)
            empty = random.random(shape) < 0.1 * (self.bias_holes and holes)
            parameters["bias"] = np.where(empty, -np.inf, random.standard_normal(shape))
        if self.sinks:
            parameters["sinks"] = random.standard_normal(self.heads)
        if self.score_fn in ("alibi", "t5"):
            shape = {"alibi": (self.heads,), "t5": (self.heads, BUCKETS)}[self.score_fn]
            parameters["score_args"] = (random.standard_normal(shape) / 8,)
        if self.score_fn == "decay":
            parameters["score_args"] = random.standard_normal(self.heads) - 1, random.standard_normal()
        dtype = jnp.dtype(self.dtype)
        return jax.tree.map(lambda x: np.asarray(np.asarray(x).astype(dtype), np.float64), parameters)

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
    # Each option of the score alone.
    Case(100, 140, head_dim=32, segments="packed", dtype="bfloat16", heads=4, kv_heads=2),
    Case(70, 45, head_dim=16, segments="unsorted"),
    Case(64, 64, head_dim=16, segments="one", causal=True),
    Case(75, 75, head_dim=16, q_lengths=(0, 50), causal=True),
    Case(40, 100, head_dim=16, kv_lengths=(33, 0), dtype="float16", heads=3, kv_heads=1),
    Case(40, 75, head_dim=16, mask="bhqk", heads=4, kv_heads=2),
    Case(40, 75, head_dim=16, mask="1hq1", dtype="bfloat16"),
    Case(40, 75, head_dim=16, mask="b11k", heads=2, kv_heads=1),
    Case(40, 75, head_dim=16, mask="qk"),
    Case(40, 75, head_dim=16, mask="1"),
    Case(40, 75, head_dim=16, mask_fn="thirds", heads=4, kv_heads=2, dtype="float16"),
    Case(40, 75, head_dim=16, mask_fn="nothing"),
    Case(40, 75, head_dim=16, mask_fn="prefix", heads=4, kv_heads=2, dtype="bfloat16"),
    Case(40, 75, head_dim=32, softcap=1.5),
    Case(40, 75, head_dim=32, softcap=30.0, values="large", dtype="float16"),
    Case(40, 75, head_dim=16, bias="bhqk", bias_holes=True, heads=4, kv_heads=2),
    Case(40, 75, head_dim=16, bias="1h1k", dtype="bfloat16", heads=4, kv_heads=2),
    Case(70, 40, head_dim=16, bias="q1", dtype="float16"),
    Case(40, 75, head_dim=16, bias="b1qk", heads=3, kv_heads=1),
    Case(40, 75, head_dim=16, bias="b11k", bias_holes=True, heads=2, kv_heads=1),
    Case(40, 75, head_dim=16, bias="h11"),
    Case(40, 75, head_dim=16, bias=""),
    Case(1, 20, head_dim=16, bias="bhqk"),
    Case(40, 75, head_dim=16, score_fn="alibi", heads=6, kv_heads=2),
    Case(40, 75, head_dim=16, score_fn="t5", dtype="bfloat16", q_offset=7, heads=3, kv_heads=3),
    Case(40, 75, head_dim=16, score_fn="tanh", dtype="float16"),
    Case(75, 75, head_dim=16, score_fn="decay", causal=True, heads=2, kv_heads=1),
    Case(40, 75, head_dim=16, sinks=True, heads=4, kv_heads=2),
    Case(75, 40, head_dim=16, sinks=True, causal=True, q_offset=-20, scale=-0.4, dtype="bfloat16"),
    Case(40, 75, head_dim=16, dropout_rate=0.3, heads=4, kv_heads=2),
    Case(75, 75, head_dim=16, dropout_rate=0.9, causal=True, dtype="bfloat16"),
    # As models combine them, and all together.
    Case(150, 150, head_dim=64, segments="packed", causal=True, window=(40, 0), dtype="bfloat16", heads=4, kv_heads=2),
    Case(75, 75, head_dim=32, bias="1hqk", mask="b11k", heads=4, kv_heads=4),
    Case(75, 75, head_dim=64, softcap=5.0, sinks=True, causal=True, window=(20, 0), dtype="float16"),
    Case(
        75, 75, head_dim=16, segments="packed", q_lengths=(70, 75), kv_lengths=(75, 66), mask="b1qk", mask_fn="thirds",
        softcap=4.0, bias="1hqk", bias_holes=True, score_fn="decay", sinks=True, dropout_rate=0.2, causal=True,
        window=(60, None), heads=4, kv_heads=2,
    ),
)  # fmt: skip

# A few of them, and lengths at which memory shows: what `python -m jflash` runs.
SELF_TEST = (
    *CASES[::4],
    Case(1024, 1024, batch=1, heads=4, kv_heads=4, causal=True),
    Case(2048, 2048, batch=1, heads=4, kv_heads=4, dtype="bfloat16"),
)
