"""Attention in Triton itself, called from JAX by jax-triton: a peer that shows what jflash's way through Pallas costs.

FlashAttention-2 in four kernels, forward, delta, dK/dV and dQ, as plain as they can be, and compiled by Triton itself.
`python -m benchmarks.machine_code` puts their machine code beside that of jflash. They have been compiled for A100 and H100
and not been run on a GPU yet: values and gradients are checked against float64 in Triton's interpreter, in float16, by
tests/test_native_triton.py, and on a GPU by `python -m benchmarks.attention`, which reports no path that disagrees.

Source: Dao 2023, algorithms 1 and 2.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import types
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jflash import numerics
from jflash.launch import gpu
from jflash.launch.blocks import Launch
from jflash.score import arguments


def unavailable() -> str | None:
    """Why attention() cannot be called here; None where it can."""
    if missing := [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]:
        return f"not installed: {', '.join(missing)} (extra `triton`, Python 3.12 and newer)"
    if jax.__version_info__[:2] != (0, 11):
        # On 0.12 every lowering is a TypeError: JAX calls jax-triton's rule for dead code with an argument more.
        return f"jax-triton {importlib.metadata.version('jax-triton')} needs JAX 0.11, this is JAX {jax.__version__}"
    return None


if TYPE_CHECKING or unavailable() is None:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from jax_triton import triton_call  # pyright: ignore[reportMissingImports]
else:  # the kernels are there to be read
    triton = tl = types.SimpleNamespace(jit=lambda kernel: kernel, constexpr=lambda value: value)

LOG2E = tl.constexpr(numerics.LOG2E)


# ---------------------------------------------------------------------------------------------------------- the kernels
# A program works for one tile of one head: program_id is (tile, head, batch element). SHAPE is (length, heads, head_dim).


@triton.jit
def tile(x, rows, SHAPE: tl.constexpr):
    """Pointers [rows, head_dim] to some rows of this program's head in x [batch, length, heads, head_dim]."""
    LENGTH: tl.constexpr = SHAPE[0]
    HEADS: tl.constexpr = SHAPE[1]
    HEAD_DIM: tl.constexpr = SHAPE[2]
    head = x + (tl.program_id(2).to(tl.int64) * LENGTH * HEADS + tl.program_id(1)) * HEAD_DIM
    return head + rows[:, None] * (HEADS * HEAD_DIM) + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def vector(x, rows, SHAPE: tl.constexpr):
    """Pointers [rows] to some rows of this program's head in x [batch, heads, length]."""
    LENGTH: tl.constexpr = SHAPE[0]
    HEADS: tl.constexpr = SHAPE[1]
    return x + (tl.program_id(2).to(tl.int64) * HEADS + tl.program_id(1)) * LENGTH + rows


@triton.jit
def forward_kernel(
    q, k, v, o, lse2, SHAPE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """o and the log-sum-exp in base 2 of one tile of queries."""
    LENGTH: tl.constexpr = SHAPE[0]
    HEAD_DIM: tl.constexpr = SHAPE[2]
    SLOPE: tl.constexpr = LOG2E * HEAD_DIM**-0.5  # what a unit of q·kᵀ is in base 2
    # The last queries of a causal mask see the most keys: they start first, so that none is left over at the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    rows = first + tl.arange(0, BLOCK_Q)
    q_tile = tl.load(tile(q, rows, SHAPE))

    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)  # the largest product so far
    l = tl.full([BLOCK_Q], 0.0, tl.float32)  # the sum of exp2(SLOPE * (qk - m)) so far
    acc = tl.full([BLOCK_Q, HEAD_DIM], 0.0, tl.float32)  # the same, times v
    for DIAGONAL in tl.static_range(2 if CAUSAL else 1):  # the keys that all these queries see, then those that some see
        lo = first if DIAGONAL else 0
        hi = first + BLOCK_Q if DIAGONAL else first if CAUSAL else LENGTH
        for start in range(lo, hi, BLOCK_KV):
            cols = start + tl.arange(0, BLOCK_KV)
            k_tile = tl.load(tile(k, cols, SHAPE))
            v_tile = tl.load(tile(v, cols, SHAPE))
            qk = tl.dot(q_tile, tl.trans(k_tile))
            if DIAGONAL:
                qk = tl.where(rows[:, None] >= cols[None, :], qk, -float("inf"))
            m_new = tl.maximum(m, tl.max(qk, 1))
            p = tl.exp2(qk * SLOPE - (m_new * SLOPE)[:, None])  # one multiply-add and one exponential an element
            alpha = tl.exp2((m - m_new) * SLOPE)
            l = l * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
            m = m_new

    tl.store(tile(o, rows, SHAPE), (acc / l[:, None]).to(o.dtype.element_ty))
    tl.store(vector(lse2, rows, SHAPE), m * SLOPE + tl.log2(l))


@triton.jit
def delta_kernel(o, do, delta, SHAPE: tl.constexpr, BLOCK_Q: tl.constexpr):
    """rowsum(o · do) of one tile of queries."""
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    products = tl.load(tile(o, rows, SHAPE)).to(tl.float32) * tl.load(tile(do, rows, SHAPE)).to(tl.float32)
    tl.store(vector(delta, rows, SHAPE), tl.sum(products, 1))


@triton.jit
def dkv_kernel(
    q, k, v, do, lse2, delta, dk, dv,
    SHAPE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys. The first keys of a causal mask are seen by the most queries, and start first."""
    LENGTH: tl.constexpr = SHAPE[0]
    HEAD_DIM: tl.constexpr = SHAPE[2]
    SLOPE: tl.constexpr = LOG2E * HEAD_DIM**-0.5
    first = tl.program_id(0) * BLOCK_KV
    cols = first + tl.arange(0, BLOCK_KV)
    k_tile = tl.load(tile(k, cols, SHAPE))
    v_tile = tl.load(tile(v, cols, SHAPE))

    dk_tile = tl.full([BLOCK_KV, HEAD_DIM], 0.0, tl.float32)
    dv_tile = tl.full([BLOCK_KV, HEAD_DIM], 0.0, tl.float32)
    for DIAGONAL in tl.static_range(1 if CAUSAL else 0, -1, -1):  # the queries that see some of these keys, then all others
        lo = first if DIAGONAL else first + BLOCK_KV if CAUSAL else 0
        hi = first + BLOCK_KV if DIAGONAL else LENGTH
        for start in range(lo, hi, BLOCK_Q):
            rows = start + tl.arange(0, BLOCK_Q)
            q_tile = tl.load(tile(q, rows, SHAPE))
            do_tile = tl.load(tile(do, rows, SHAPE))
            # Keys run down and queries across: p and ds then enter their products from registers, as they are.
            p = tl.exp2(tl.dot(k_tile, tl.trans(q_tile)) * SLOPE - tl.load(vector(lse2, rows, SHAPE))[None, :])
            if DIAGONAL:
                p = tl.where(rows[None, :] >= cols[:, None], p, 0.0)
            dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile)
            ds = p * (tl.dot(v_tile, tl.trans(do_tile)) - tl.load(vector(delta, rows, SHAPE))[None, :])
            dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile)

    tl.store(tile(dk, cols, SHAPE), (dk_tile * HEAD_DIM**-0.5).to(dk.dtype.element_ty))
    tl.store(tile(dv, cols, SHAPE), dv_tile.to(dv.dtype.element_ty))


@triton.jit
def dq_kernel(
    q, k, v, do, lse2, delta, dq,
    SHAPE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, which go through the keys as in the forward."""
    LENGTH: tl.constexpr = SHAPE[0]
    HEAD_DIM: tl.constexpr = SHAPE[2]
    SLOPE: tl.constexpr = LOG2E * HEAD_DIM**-0.5
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    rows = first + tl.arange(0, BLOCK_Q)
    q_tile = tl.load(tile(q, rows, SHAPE))
    do_tile = tl.load(tile(do, rows, SHAPE))
    lse2_tile = tl.load(vector(lse2, rows, SHAPE))
    delta_tile = tl.load(vector(delta, rows, SHAPE))

    dq_tile = tl.full([BLOCK_Q, HEAD_DIM], 0.0, tl.float32)
    for DIAGONAL in tl.static_range(2 if CAUSAL else 1):
        lo = first if DIAGONAL else 0
        hi = first + BLOCK_Q if DIAGONAL else first if CAUSAL else LENGTH
        for start in range(lo, hi, BLOCK_KV):
            cols = start + tl.arange(0, BLOCK_KV)
            k_tile = tl.load(tile(k, cols, SHAPE))
            v_tile = tl.load(tile(v, cols, SHAPE))
            p = tl.exp2(tl.dot(q_tile, tl.trans(k_tile)) * SLOPE - lse2_tile[:, None])
            if DIAGONAL:
                p = tl.where(rows[:, None] >= cols[None, :], p, 0.0)
            ds = p * (tl.dot(do_tile, tl.trans(v_tile)) - delta_tile[:, None])
            dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile)

    tl.store(tile(dq, rows, SHAPE), (dq_tile * HEAD_DIM**-0.5).to(dq.dtype.element_ty))


# -------------------------------------------------------------------------------------------------------- their launch

DTYPES = (jnp.float16, jnp.bfloat16)
LARGEST_BLOCK = 128
HOPPER = {  # by kernel and head_dim
    ("forward", 64): Launch(128, 128, num_warps=4, num_stages=2),
    ("forward", 128): Launch(128, 128, num_warps=8, num_stages=2),
    ("forward", 256): Launch(128, 64, num_warps=8, num_stages=2),
    ("dkv", 64): Launch(64, 64, num_warps=4, num_stages=2),
    ("dkv", 128): Launch(64, 64, num_warps=4, num_stages=1),
    ("dkv", 256): Launch(32, 32, num_warps=4, num_stages=1),
    ("dq", 64): Launch(128, 64, num_warps=4, num_stages=2),
    ("dq", 128): Launch(128, 64, num_warps=8, num_stages=2),
    ("dq", 256): Launch(64, 64, num_warps=4, num_stages=2),
}
AMPERE = {
    ("forward", 64): Launch(128, 64, num_warps=4, num_stages=3),
    ("forward", 128): Launch(128, 64, num_warps=8, num_stages=2),
    ("forward", 256): Launch(64, 64, num_warps=8, num_stages=2),
    ("dkv", 64): Launch(64, 64, num_warps=4, num_stages=2),
    ("dkv", 128): Launch(32, 64, num_warps=4, num_stages=2),
    ("dkv", 256): Launch(32, 32, num_warps=4, num_stages=2),
    ("dq", 64): Launch(64, 64, num_warps=4, num_stages=2),
    ("dq", 128): Launch(64, 64, num_warps=4, num_stages=2),
    ("dq", 256): Launch(64, 32, num_warps=4, num_stages=2),
}
COMPILER = {
    "enable_fp_fusion": True,  # multiply and add in one instruction; Triton 3.10 will not do so unasked
    "ptx_version": 90,  # that of CUDA 13.0: XLA's assembler may be older than Triton's, and refuse a later one
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """softmax(q·kᵀ / √head_dim)·v on an NVIDIA GPU, differentiable in q, k and v (reverse mode).

    Args:
      q, k, v: `[batch, length, heads, head_dim]`, of one shape and one dtype, float16 or bfloat16; head_dim 64, 128 or 256,
        length a multiple of 128, and a batch element of less than 2**31 entries.
      causal: whether query i sees the keys 0 to i only.

    Returns:
      `[batch, length, heads, head_dim]` in the dtype of q.

    Raises:
      RuntimeError: where unavailable() says why.
      TypeError, ValueError: for arguments that are none of these.
    """
    return _forward(q, k, v, causal)[0]


def _forward(q, k, v, causal):
    if reason := unavailable():
        raise RuntimeError(f"attention in Triton itself cannot be called here: {reason}")
    causal = arguments.causal(causal)
    _check(q, k, v)
    batch, length, heads, head_dim = q.shape
    launch, lse2 = _launch("forward", head_dim), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    o, lse2 = _call(forward_kernel, (q, k, v), (q, lse2), launch, launch.block_q, **_tiling(launch, causal))
    return o, (q, k, v, o, lse2)


def _backward(causal, residuals, do):
    q, k, v, o, lse2 = residuals
    dkv, dq = _launch("dkv", q.shape[-1]), _launch("dq", q.shape[-1])
    delta = _call(delta_kernel, (o, do), lse2, dq, dq.block_q, BLOCK_Q=dq.block_q)
    operands = q, k, v, do, lse2, delta
    dk, dv = _call(dkv_kernel, operands, (k, v), dkv, dkv.block_kv, **_tiling(dkv, causal))
    return _call(dq_kernel, operands, q, dq, dq.block_q, **_tiling(dq, causal)), dk, dv


attention.defvjp(_forward, _backward)


def _check(q: Array, k: Array, v: Array) -> None:
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be float16 or bfloat16, got {q.dtype}")
    if q.ndim != 4:
        raise ValueError(f"q must be [batch, length, heads, head_dim], got shape {q.shape}")
    for name, x in (("k", k), ("v", v)):
        if (x.shape, x.dtype) != (q.shape, q.dtype):
            raise ValueError(f"{name} must have the shape and dtype of q, {q.shape} {q.dtype}, got {x.shape} {x.dtype}")
    widths = sorted({head_dim for _, head_dim in HOPPER})
    if q.shape[3] not in widths:
        raise ValueError(f"head_dim must be one of {widths}, got {q.shape[3]}")
    if q.shape[1] % LARGEST_BLOCK:
        raise ValueError(f"length must be a multiple of {LARGEST_BLOCK}, got {q.shape[1]}")
    if 0 in q.shape:
        raise ValueError(f"q must not be empty, got shape {q.shape}")
    if math.prod(q.shape[1:]) >= 2**31:  # offsets within a batch element are 32 bits wide
        raise ValueError(f"a batch element of q must have less than 2**31 entries, got {math.prod(q.shape[1:])}")


def _launch(kernel: str, head_dim: int) -> Launch:
    """How a kernel is launched on the GPU that is traced for: as on an H100, or as on an A100."""
    return (HOPPER if gpu.family(gpu.kind()) == "hopper" else AMPERE)[kernel, head_dim]


def _tiling(launch: Launch, causal: bool) -> dict[str, int]:
    return {"CAUSAL": causal, "BLOCK_Q": launch.block_q, "BLOCK_KV": launch.block_kv}


def _call(kernel, arrays, like, launch: Launch, block: int, **constants):
    """The results of a kernel, shaped like `like`, from one program for each `block` rows of each head."""
    batch, length, heads, head_dim = arrays[0].shape
    return triton_call(
        *arrays,
        kernel=kernel,
        out_type=like,
        grid=(length // block, heads, batch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        backend_options=COMPILER,
        SHAPE=(length, heads, head_dim),
        **constants,
    )
