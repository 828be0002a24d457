"""attention(): check the arguments, pack them into a Score, choose an engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jflash import kernels
from jflash.derivatives import attend
from jflash.kernels import Triton
from jflash.launch import gpu
from jflash.launch.blocks import BlockSizes, Options
from jflash.launch.blocks import given as blocks_of
from jflash.parallel.partition import Everywhere
from jflash.reference import Online, naive_attention
from jflash.reference.online import unseen
from jflash.score import arguments, redefined
from jflash.score.arguments import MaskFn, ScoreFn
from jflash.score.score import Score

IMPLEMENTATIONS = ("triton", "xla", "naive", "interpret")

_logger = logging.getLogger("jflash")


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Array: ...
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Array, Array]: ...
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    q_offset: int | ArrayLike = 0,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    mask_fn: MaskFn | None = None,
    mask_args: Sequence[ArrayLike] = (),
    scale: float | None = None,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    score_fn: ScoreFn | None = None,
    score_args: Sequence[ArrayLike] = (),
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
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

        segment_ids=(     kv_lengths=3       q_lengths=2       mask_fn=lambda b, h, i, j:
          [0, 0, 1],                                             (i + j) % 2 == 0
          [0, 1, 1, 1, 2])
        1 0 0 0 0         1 1 1 0 0          1 1 1 1 1         1 0 1 0 1
        1 0 0 0 0         1 1 1 0 0          1 1 1 1 1         0 1 0 1 0
        0 1 1 1 0         1 1 1 0 0          0 0 0 0 0         1 0 1 0 1

    All given conditions hold together. A query that sees no key gives o = 0, lse = -inf (or its sink) and zero
    gradients. What no query sees may hold anything, NaN included. Logits may be as large as the largest float32. Past 1e7 the
    backward, which computes them anew, may round them otherwise than the forward did, by more than an exponential reaches:
    the gradient of such a query may vanish then, but stays finite. Where sums of products are exact, or a bias or a mask of
    finfo.min outweighs them, it does not; but in GPU kernels with nothing but a scale it may where keys share the largest.

    The logit of a pair is built in this order: `scale` · q·k, `softcap`, plus `bias`, `score_fn`, then visibility. In
    shapes below, heads and lengths are those of q and k; inputs without batch leave `batch` out everywhere.

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
        of a longer sequence, where the chunk begins; for a cache, kv_len - q_len. A new int means a new compilation: where
        it changes from call to call, as from one step of decoding to the next, give an array. Positions stay within ±2**29.
      segment_ids: integers, `[batch, length]` for queries and keys, or a pair of them, `[batch, q_len]` and `[batch,
        kv_len]`: a query sees the keys that have its id. For packed documents; tiles that cannot match are skipped,
        whatever the order of the ids: all such tiles where ids are sorted or lie less than 32 apart, and else nearly all.
        Ids of 64 bits are told apart by all of them, and cost a sort of the ids in each call; those of 32 bits and fewer do
        not.
      q_lengths: an integer or `[batch]`: how many queries are there; the others see nothing.
      kv_lengths: an integer or `[batch]`: how many keys are there.
      mask: bool, broadcastable to `[batch, heads, q_len, kv_len]`: True where a query sees a key.
      mask_fn: mask_fn(b, h, i, j, *mask_args) -> bool, the same as a function of batch element, head and the positions of
        query and key, int32 scalars or arrays that broadcast against each other. Elementwise JAX, traced into each tile;
        closes over no arrays. b and h count in the whole of sharded arrays, but inside jax.shard_map on each device. A
        new function means a new compilation: define it once, not in each call. Tiles in which it hides all pairs
        are not visited, and those in which it hides none have no mask: it is evaluated on intervals of positions, one for
        each tile, through comparisons, integer arithmetic, minima and maxima, jnp.where, logic, shifts and look-ups. Where
        it does something else, a tile is visited and its pairs are looked at.
      mask_args: a tuple of small arrays for mask_fn: bools, integers or floats, without gradients. Inside mask_fn they are
        what score_args are inside score_fn. A prefix for each batch element, seen by all of it, before a causal rest::

            attention(q, k, v, mask_fn=lambda b, h, i, j, prefix: (j <= i) | (j < prefix[b]), mask_args=(prefix,))
      scale: what q·kᵀ is multiplied by; 1 / sqrt(head_dim) by default. A Python number, not a traced value.
      softcap: c > 0, a Python number: logits become c · tanh(logit / c), smoothly limited to ±c.
      bias: float of at most 32 bits (64 for float64), broadcastable to `[batch, heads, q_len, kv_len]`, added to the
        logits; may hold -inf, which hides a pair as a mask does while what it hides is finite: a NaN or an infinity in
        q, k or v still reaches o and gradients (0 · NaN is NaN), and only the conditions above keep it out. finfo.min is a
        number like any other: a query for which all keys have it sees their mean, as in dense softmax; the sum of two of
        them is -inf. +inf makes its query's results NaN, as there. The gradient of the bias has its own shape and dtype and is
        summed, in a fixed order, where it is broadcast: on a GPU by several programs where its tiles alone would leave most
        of it idle, in some 12 MiB of memory besides.
      score_fn: score_fn(s, b, h, i, j, *score_args) -> s, any elementwise JAX function of a logit, traced into each
        tile and differentiated there. s is float32 (float64), the integers are those of mask_fn. It may return -inf as
        a bias may hold it. ALiBi::

            attention(q, k, v, score_fn=lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i - j),
                      score_args=(jflash.alibi_slopes(heads),))

        Closes over no arrays: those travel in score_args. As with mask_fn, define it once.
      score_args: a tuple of small arrays for score_fn, floats (with gradients) or integers. Inside score_fn one without
        dimensions is a number, and the others can be indexed with one integer or integer array for each dimension
        (`table[h, i - j]`; an index outside means the nearest inside) and nothing else. What is read of floats is
        float32 (float64 beside float64), whatever the array's dtype. Their gradients are summed in that, on a GPU in a
        fixed order, and rounded once: look-ups by a number (`slopes[h]`) cost next to nothing, one by an array costs, for
        each tile, a pass over it for each index between the least and the largest that occur in it, so a table
        `[heads, buckets]` is cheaper than `[buckets, heads]`.
      sinks: float `[heads]`: a logit that takes part in the softmax of each row and has no value. Has a gradient.
      dropout_rate: the probability, in [0, 1), that a probability is dropped; the others are divided by 1 - rate. A
        Python number.
      dropout_key: a `jax.random` key, new style or raw, which decides with (b, h, i, j) alone what is kept: whatever the
        tile sizes, the device, the direction. `jflash.dropout_mask` writes it out. i counts queries from 0.
      return_lse: return (o, lse), both differentiable.
      precision: of the matrix products, as in `jnp.einsum`, with the same default.
      block_sizes: tile sizes, see BlockSizes; chosen by jflash where not given.
      implementation: "triton" (the Pallas kernels; NVIDIA GPUs of compute capability 8.0 and newer), "xla" (online
        softmax in plain JAX), "naive" (dense), or "interpret" (the kernels, interpreted: for tests).
        None takes the kernels where the program is lowered for an NVIDIA GPU that supports them and "xla" elsewhere.
        All have the derivatives of first and second order in all inputs that have gradients, in linear memory but for
        "naive": jax.grad, jax.jvp and each of the other, but not jax.jvp of jax.jvp. That, and third derivatives, are a
        TypeError for all but "naive".

    Returns:
      o `[batch, q_len, heads, v_dim]` with q's dtype, without batch where q has none; with return_lse also lse
      `[batch, heads, q_len]`, the natural log-sum-exp of each query's logits, sink included and dropout not, float32
      (float64 for float64).

    Raises:
      TypeError, ValueError: with the argument, what was expected and what came.

    Sources: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4; Dao 2023 (arXiv:2307.08691), section 3. ALiBi: Press et
    al. 2022 (arXiv:2108.12409). Sinks: Xiao et al. 2024 (arXiv:2309.17453) and gpt-oss. softcap: Gemma 2
    (arXiv:2408.00118). The form of score_fn and mask_fn: PyTorch's FlexAttention (arXiv:2412.05496).
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    arguments.arrays(q, k, v)
    blocks = blocks_of(block_sizes)
    batched = q.ndim == 4
    if not batched:
        q, k, v = q[None], k[None], v[None]
    score = Score.of(
        q, k, batched=batched, causal=causal, window=window, q_offset=q_offset, segment_ids=segment_ids, q_lengths=q_lengths,
        kv_lengths=kv_lengths, mask=mask, mask_fn=mask_fn, mask_args=mask_args, scale=scale, softcap=softcap, bias=bias,
        score_fn=score_fn, score_args=score_args, sinks=sinks, dropout_rate=dropout_rate, dropout_key=dropout_key,
    )  # fmt: skip
    engine = engine_of(implementation, blocks, precision, q, v)
    for name, fn in (("mask_fn", mask_fn), ("score_fn", score_fn)):
        redefined.look_out(name, fn, q)

    if q.size == 0 or k.size == 0 or v.size == 0:  # no query or no key: nothing to launch a kernel for
        o, norm = unseen(q, v, score, q.dtype)
        lse = norm.lse(score.unit)
    elif engine is None:
        o, lse = naive_attention(q, k, v, score, precision=precision)
    else:
        o, lse = attend(engine, q, k, v, score)
    o, lse = (o, lse) if batched else (o[0], lse[0])
    return (o, lse) if return_lse else o


def engine_of(implementation: str | None, blocks: BlockSizes, precision, q: Array, v: Array) -> Everywhere | None:
    """The engine of an implementation; None for "naive", which is ordinary JAX."""
    if implementation is None:
        why_not = kernels.unsupported(q, v) or gpu.too_old()
        if why_not is None:
            return Everywhere(Triton(blocks, precision), Online(blocks, precision))
        if gpu.is_default():
            _log_once(why_not)
        return _everywhere(Online(blocks, precision))
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation in ("triton", "interpret") and (why_not := kernels.unsupported(q, v)):
        error = TypeError if q.dtype not in kernels.DTYPES else ValueError
        raise error(f"implementation={implementation!r} cannot do this: {why_not}")
    if implementation == "naive":
        return None
    if implementation == "xla":
        return _everywhere(Online(blocks, precision))
    return _everywhere(Triton(blocks, precision, interpret=implementation == "interpret"))


def _everywhere(engine: Triton | Online) -> Everywhere:
    return Everywhere(engine, engine)


@functools.cache
def _log_once(why_not: str) -> None:
    _logger.warning('attention runs as implementation="xla" on this GPU: %s', why_not)
