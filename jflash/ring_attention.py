"""ring_attention(): check the arguments, pack them into a Score, choose an engine, and send the keys round the ring."""

from __future__ import annotations

from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jflash import varying
from jflash.attention import engine_of
from jflash.launch.blocks import BlockSizes
from jflash.launch.blocks import given as blocks_of
from jflash.parallel.ring import Ring, attend
from jflash.reference.online import unseen
from jflash.score import arguments
from jflash.score.score import Score

ORDERS = {"contiguous": 1, "zigzag": 2}  # how many chunks of the sequence each device holds


def ring_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    axis_name: Hashable,
    causal: bool = False,
    order: str = "contiguous",
    window: int | tuple[int | None, int | None] | None = None,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    precision: lax.PrecisionLike = None,
    block_sizes: BlockSizes | None = None,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """jflash.attention over a sequence that is split along a mesh axis: for use inside jax.shard_map.

    Every device calls it with its own share of the tokens and gets the o of its own queries::

        split = jax.P(None, "ring")  # [batch, length, heads, width], the length split over the axis "ring"
        fn = functools.partial(jflash.ring_attention, axis_name="ring", causal=True)
        o = jax.shard_map(fn, mesh=mesh, in_specs=(split, split, split), out_specs=split)(q, k, v)

    Batch and heads may be split over other axes, head_dim may not. Values and gradients are those of attention() on one
    device, up to rounding; o and the gradients are summed in float32 and rounded once. On n devices keys take n steps, or as
    many as the window needs, and a device skips the steps in which it would see nothing. Memory does not depend on n.

    Only named axes are used, so a ring may span hosts: each process calls jax.distributed.initialize() before anything else of
    JAX, makes the mesh of all devices (jax.make_mesh lays those of one host side by side), and runs the same program.

    The options are those of attention() that have a meaning for a share of the tokens. Those that speak of positions or
    pairs by number (q_offset, q_lengths, kv_lengths, mask, mask_fn, bias, score_fn, dropout) are not among them: padding and
    documents are described by segment_ids.

    Args:
      q: this device's queries, `[batch, q_len, heads, head_dim]` or `[q_len, heads, head_dim]`; dtypes, grouped heads and
        widths as in attention().
      k, v: this device's keys and values, `[batch, kv_len, kv_heads, head_dim]` and `[batch, kv_len, kv_heads, v_dim]`.
      axis_name: the mesh axis, or the tuple of them, over which the length is split, manual in the enclosing shard_map.
      causal: a query sees no key behind its own position in the whole sequence.
      order: which tokens a device holds. "contiguous": device d the d-th share. "zigzag": the chunks d and 2n-1-d of 2n, as
        jflash.zigzag() lays them down, so that causal work is balanced; q_len and kv_len must be even.
      window: as in attention(), in positions of the whole sequence.
      segment_ids: integers of at most 32 bits, `[batch, length]` for this device's queries and keys, or a pair of them: a
        query sees the keys that have its id.
      scale, softcap, precision, block_sizes: as in attention().
      sinks: float `[heads]`, the same on all devices of the ring: a logit without a value in the softmax of each row. Its
        gradient is that of this device's rows; where grad is taken outside of shard_map, or with check_vma=True, JAX sums
        them.
      return_lse: return (o, lse), both differentiable.
      implementation: as in attention(), but "naive".

    Returns:
      o `[batch, q_len, heads, v_dim]` with q's dtype, this device's; with return_lse also lse `[batch, heads, q_len]`,
      float32 (float64 for float64). Of a query that sees no key, o = 0 and lse = -inf (or its sink). Reverse mode only, once.

    Raises:
      TypeError, ValueError: with the argument, what was expected and what came.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {tuple(ORDERS)}, got {order!r}")
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    size = _size_of_ring(axis_name)
    arguments.arrays(q, k, v)
    _check_ids(segment_ids)
    _check_split(axis_name, q=q, k=k, v=v)
    blocks = blocks_of(block_sizes)
    batched = q.ndim == 4
    if not batched:
        q, k, v = q[None], k[None], v[None]
    _check_lengths(order, size, q.shape[1], k.shape[1])
    score = Score.of(
        q, k, batched=batched, causal=causal, window=window, segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks
    )  # fmt: skip
    engine = engine_of(implementation, blocks, precision, q, v)
    if engine is None:
        raise ValueError("implementation must not be 'naive' in ring_attention, which merges what tiled ones return")

    if q.size == 0 or k.size == 0:
        o, norm = unseen(q, v, score, q.dtype)
        lse = norm.lse(score.unit)
    else:
        ring = Ring(axis_name, size, ORDERS[order], engine.for_parts())
        axes = varying.axes(q, k, v, score, lax.axis_index(axis_name))
        o, lse = attend(ring, *varying.over(axes, (q, k, v, score)))
    o, lse = (o, lse) if batched else (o[0], lse[0])
    return (o, lse) if return_lse else o


def _size_of_ring(axis_name: Hashable) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise ValueError(f"axis_name must be one of the axes of the enclosing jax.shard_map, {manual}, got {axis_name!r}")
    raise ValueError(
        "ring_attention must be called inside jax.shard_map, by each device on its own share of q, k and v: "
        f"jax.shard_map(lambda q, k, v: jflash.ring_attention(q, k, v, axis_name={axis_name!r}), mesh=mesh, "
        f"in_specs=jax.P(None, {axis_name!r}), out_specs=jax.P(None, {axis_name!r}))(q, k, v)"
    )


def _check_split(axis_name: Hashable, **arrays: Array) -> None:
    """That arrays are split over the ring along their length, as far as their types tell."""
    ring = varying.axes(lax.axis_index(axis_name))  # nothing where the types do not say what varies
    for name, x in arrays.items():
        if same := ring - varying.axes(x):
            raise ValueError(
                f"{name} must be split over {axis_name!r} along its length, but is the same on all devices of {sorted(same)}: "
                "name the axis in shard_map's in_specs"
            )
        for dimension, axis in (("length", -3), ("head_dim" if name != "v" else "v_dim", -1)):
            if over := jax.typeof(x).sharding.spec[axis]:
                raise ValueError(
                    f"the {dimension} of {name} must be whole on each device of the ring, but is split over {over!r} too: "
                    "split batch or heads over that axis"
                )


def _check_ids(segment_ids) -> None:
    for x in jax.tree.leaves(segment_ids):
        if hasattr(x, "dtype") and x.dtype.itemsize > 4:  # a device ranks its own alone, see segments.py
            raise TypeError(
                f"segment_ids must be of at most 32 bits in ring_attention, whose devices compare theirs, got {x.dtype}"
            )


def _check_lengths(order: str, size: int, q_len: int, kv_len: int) -> None:
    for name, length in (("q", q_len), ("k", kv_len)):
        if length % ORDERS[order]:
            raise ValueError(
                f"{name} must have an even length on each device in zigzag order, got {length}: pad the sequence to a multiple "
                f"of {2 * size}, and give the padding a segment id of its own"
            )
        if size * length > arguments.FARTHEST:
            raise ValueError(f"{name} must be at most {arguments.FARTHEST} long, got {size} devices with {length} each")
