"""attention(): check the arguments, pack them into a Score, choose an engine."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jflash import gpu, kernels
from jflash.blocks import DEFAULTS, BlockSizes
from jflash.kernels import Triton
from jflash.numerics import accumulator
from jflash.reference import Online, naive_attention
from jflash.score import Score
from jflash.vjp import Engine, attend

IMPLEMENTATIONS = ("triton", "xla", "naive", "interpret")
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)

_logger = logging.getLogger("jflash")


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = ...,
    window: int | tuple[int | None, int | None] | None = ...,
    q_offset: int | ArrayLike = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    precision: lax.PrecisionLike = ...,
    block_sizes: BlockSizes | None = ...,
    implementation: str | None = ...,
) -> Array: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = ...,
    window: int | tuple[int | None, int | None] | None = ...,
    q_offset: int | ArrayLike = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    precision: lax.PrecisionLike = ...,
    block_sizes: BlockSizes | None = ...,
    implementation: str | None = ...,
) -> tuple[Array, Array]: ...
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    q_offset: int | ArrayLike = 0,
    scale: float | None = None,
    return_lse: bool = False,
    precision: lax.PrecisionLike = None,
    block_sizes: BlockSizes | None = None,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """Exact attention, softmax(scale · q·kᵀ) · v, in memory linear in the lengths.

    Query i stands at position q_offset + i, key j at position j. With 3 queries and 5 keys (1: visible)::

        causal=True       causal=True,       window=(1, 1)     causal=True, window=(1, None),
                          q_offset=2                           q_offset=2
        1 0 0 0 0         1 1 1 0 0          1 1 0 0 0         0 1 1 0 0
        1 1 0 0 0         1 1 1 1 0          1 1 1 0 0         0 0 1 1 0
        1 1 1 0 0         1 1 1 1 1          0 1 1 1 0         0 0 0 1 1

    All given conditions hold together. A query that sees no key gives o = 0, lse = -inf and zero gradients.

    Args:
      q: `[batch, q_len, heads, head_dim]` or `[q_len, heads, head_dim]`; float16, bfloat16, float32 or (not in the
        GPU kernels) float64. Any length, 0 included; head_dim from 1 to 256 in the GPU kernels.
      k: `[batch, kv_len, kv_heads, head_dim]` like q. heads is a multiple of kv_heads: query head h reads kv head
        h // (heads // kv_heads).
      v: `[batch, kv_len, kv_heads, v_dim]` like q. v_dim may differ from head_dim.
      causal: a query sees no key behind its own position.
      window: how many keys a query sees (before, behind) its own position; an int w means (w, w), None on a side
        means no limit. 0 is that position alone.
      q_offset: where the first query stands: an int, or an int32 scalar or `[batch]` array, traced or not. For a chunk
        of a longer sequence, where the chunk begins; for a cache, kv_len - q_len. Positions stay within ±2**29.
      scale: what q·kᵀ is multiplied by; 1 / sqrt(head_dim) by default. A Python number, not a traced value.
      return_lse: return (o, lse), both differentiable.
      precision: of the matrix products, as in `jnp.einsum`, with the same default.
      block_sizes: tile sizes, see BlockSizes; chosen by jflash where not given.
      implementation: "triton" (the Pallas kernels; NVIDIA GPUs of compute capability 8.0 and newer), "xla" (online
        softmax in plain JAX), "naive" (dense, any derivative), or "interpret" (the kernels, interpreted: for tests).
        None takes the kernels where the program is lowered for an NVIDIA GPU that supports them and "xla" elsewhere.
        All but "naive" support reverse mode only, once.

    Returns:
      o `[batch, q_len, heads, v_dim]` with q's dtype, without batch where q has none; with return_lse also lse
      `[batch, heads, q_len]`, the natural log-sum-exp of each query's logits, float32 (float64 for float64).

    Raises:
      TypeError, ValueError: with the argument, what was expected and what came.

    Sources: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4; Dao 2023 (arXiv:2307.08691), section 3.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    _check(q, k, v)
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise TypeError(f"block_sizes must be a jflash.BlockSizes or None, got {block_sizes!r}")
    batched = q.ndim == 4
    if not batched:
        q, k, v = q[None], k[None], v[None]
    score = Score.of(q, k, causal=causal, window=window, q_offset=q_offset, scale=scale)
    engine = _engine(implementation, block_sizes or DEFAULTS, precision, q, v)

    if q.size == 0 or k.size == 0 or v.size == 0:  # no query or no key: nothing to launch a kernel for
        o = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, accumulator(q.dtype))
    elif engine is None:
        o, lse = naive_attention(q, k, v, score, precision=precision)
    else:
        o, lse = _attend(engine, q, k, v, score)
    o, lse = (o, lse) if batched else (o[0], lse[0])
    return (o, lse) if return_lse else o


_attend = jax.jit(attend, static_argnums=0)  # so that a call outside of jit compiles once, not operation by operation


@dataclasses.dataclass(frozen=True)
class ByPlatform:
    """The engine of implementation=None: the platform decides when the program is lowered, not when it is traced."""

    triton: Triton
    elsewhere: Online

    def forward(self, *args: Any) -> Any:
        return lax.platform_dependent(*args, cuda=self.triton.forward, default=self.elsewhere.forward)

    def backward(self, *args: Any) -> Any:
        return lax.platform_dependent(*args, cuda=self.triton.backward, default=self.elsewhere.backward)


def _engine(implementation: str | None, blocks: BlockSizes, precision, q: Array, v: Array) -> Engine | None:
    """The engine of an implementation; None for "naive", which is ordinary JAX."""
    if implementation is None:
        why_not = kernels.unsupported(q, v) or gpu.too_old()
        if why_not is None:
            return ByPlatform(Triton(blocks, precision), Online(blocks, precision))
        if gpu.is_default():
            _log_once(why_not)
        return Online(blocks, precision)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation in ("triton", "interpret") and (why_not := kernels.unsupported(q, v)):
        error = TypeError if q.dtype not in kernels.DTYPES else ValueError
        raise error(f"implementation={implementation!r} cannot do this: {why_not}")
    if implementation == "naive":
        return None
    if implementation == "xla":
        return Online(blocks, precision)
    return Triton(blocks, precision, interpret=implementation == "interpret")


@functools.cache
def _log_once(why_not: str) -> None:
    _logger.warning('attention runs as implementation="xla" on this GPU: %s', why_not)


def _check(q: Array, k: Array, v: Array) -> None:
    """Ranks, dtypes and shapes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} must be [batch, length, heads, width] or [length, heads, width], got shape {x.shape}")
        if x.ndim != q.ndim:
            raise ValueError(f"{name} must have the rank of q, {q.ndim}, got shape {x.shape}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.shape[-1] == 0:
            raise ValueError(f"{name} must have a width of at least 1, got shape {x.shape}")
    for name, x in (("k", k), ("v", v)):
        if x.shape[:-3] != q.shape[:-3]:
            raise ValueError(f"{name} must have the batch size of q, {q.shape[0]}, got shape {x.shape}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the head_dim of q, {q.shape[-1]}, got shape {k.shape}")
    if v.shape[-3:-1] != k.shape[-3:-1]:
        raise ValueError(f"v must have the kv_len and kv_heads of k, {k.shape[-3:-1]}, got shape {v.shape}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"the heads of q must be a multiple of the kv_heads of k and v, {kv_heads}, got {heads}")
