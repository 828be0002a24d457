"""Flax: attention_fn, for the attention layers of flax.linen and flax.nnx."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jflash.attention import attention

# Options of attention() for which it matters where a query stands.
POSITIONAL = ("causal", "window", "mask_fn", "score_fn")


def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    *,
    # Named one by one because linen passes only what it finds in the signature: a setting that is not here would be
    # dropped without a word.
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    module: Any = None,
    force_fp32_for_softmax: bool = True,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    **options: Any,
) -> Array:
    """What `nn.dot_product_attention` and `nnx.dot_product_attention` compute, in memory linear in the lengths.

    For the argument of that name of `nn.MultiHeadDotProductAttention` and `nnx.MultiHeadAttention`, whose parameters
    stay what they are::

        attention_fn = functools.partial(jflash.flax.attention_fn, causal=True, window=(512, 0))
        nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)
        nnx.MultiHeadAttention(num_heads=8, in_features=512, attention_fn=attention_fn, decode=False, rngs=rngs)

    A mask of `nn.make_causal_mask` is right too, but as large as the scores: with causal=True and no mask, memory is
    linear and the tiles behind the diagonal are skipped. Likewise segment_ids and kv_lengths instead of a mask of
    padding. What the layer passes itself (mask, precision, what concerns dropout) is given to the layer: it would
    override what `functools.partial` says.

    In decode mode a layer passes one query, all keys of its cache, and a mask that shows those that have been written. One
    query beside several keys therefore stands where the last key stands that its mask shows, in any head, unless q_offset
    is given; so a model with causal=True, a window or ALiBi decodes as it was trained.

    Args:
      query: `[batch..., q_len, heads, head_dim]`, with any number of batch dimensions, none included.
      key: `[batch..., kv_len, kv_heads, head_dim]`; heads is a multiple of kv_heads.
      value: `[batch..., kv_len, kv_heads, v_dim]`.
      bias: float, broadcastable to `[batch..., heads, q_len, kv_len]`, added to the logits.
      mask: bool or a number, broadcastable to the same: a key is hidden where it is False or 0. What is to be added to
        logits is a bias. Shared by some of several batch dimensions and not by all, it is repeated for each.
      broadcast_dropout: has no effect. Flax shares one mask of dropout between batch elements and heads, because it
        writes it out; here each probability is drawn on its own, with the same rate, and nothing is written out.
      dropout_rng: the key that decides what is dropped, see dropout_key of `jflash.attention`; a batch element counts as
        its index in the flattened batch. Needed where dropout is at work.
      dropout_rate: the probability, in [0, 1), that a probability is dropped.
      deterministic: True switches dropout off.
      dtype: what query, key and value are cast to; the one that they promote to by default.
      precision: of the matrix products, as in `jnp.einsum`.
      module: must be None: attention weights are never all there at once, and cannot be sown.
      force_fp32_for_softmax: has no effect: softmax is always float32 (float64 for float64).
      qk_attn_weights_einsum, attn_weights_value_einsum: must be None: there is no einsum to replace.
      is_causal: the same as the option causal=True: a query sees no key behind its own position.
      **options: those of `jflash.attention`; the batch of the arrays among them is all batch dimensions, flattened.

    Returns:
      `[batch..., q_len, heads, v_dim]` with the dtype of query or `dtype`. A query that sees no key gives 0, where Flax
      gives the mean of the values.

    Raises:
      TypeError, ValueError: with the argument, what was expected and what came.
    """
    if module is not None:
        raise ValueError(
            "module must be None: attention weights are never all there at once and cannot be sown; leave out sow_weights, "
            f"or take Flax's own attention_fn to look at them, got {type(module).__name__}"
        )
    for name, einsum in (
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise ValueError(f"{name} must be None: there is no einsum to replace, got {einsum!r}")
    dropout_rate = 0.0 if deterministic else dropout_rate
    if dropout_rate and dropout_rng is None:
        raise ValueError(
            f"dropout_rng must be given where dropout_rate is not 0 and deterministic is False, got None beside {dropout_rate}"
        )

    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    mask = None if mask is None else jnp.asarray(mask, jnp.bool_)
    batch = query.shape[:-3]
    if len(batch) > 1:
        query, key, value = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
        bias, mask = _flatten_batch("bias", bias, batch), _flatten_batch("mask", mask, batch)
    options["causal"] = options.get("causal", False) or is_causal
    positional = [name for name in POSITIONAL if options.get(name) is not None and options[name] is not False]
    if query.shape[-3] == 1 < key.shape[-3] and positional and "q_offset" not in options:
        options["q_offset"] = _position_in_cache(mask, query, key, positional)
    options |= {"bias": bias, "mask": mask, "precision": precision, "dropout_rate": dropout_rate, "dropout_key": dropout_rng}
    o = attention(query, key, value, **options)
    return o.reshape(*batch, *o.shape[-3:])


def _flatten_batch(name: str, x: Array | None, batch: tuple[int, ...]) -> Array | None:
    """An array that broadcasts to [*batch, heads, q_len, kv_len], with one batch dimension."""
    if x is None or x.ndim <= 3:
        return x
    one_for_all = math.prod(x.shape[:-3]) == 1 and x.ndim <= len(batch) + 3
    try:
        x = x if one_for_all else jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
    except ValueError:
        raise ValueError(f"{name} must broadcast to the batch dimensions of query, {batch}, got shape {x.shape}") from None
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _position_in_cache(mask: Array | None, query: Array, key: Array, positional: list[str]) -> Array:
    """int32 [batch], or a scalar without batch: the last key that the mask shows the one query."""
    if mask is None:
        raise ValueError(
            f"q_offset must be given where one query without a mask meets {key.shape[-3]} keys, and {', '.join(positional)} "
            "depends on where it stands, got None"
        )
    shown = mask.reshape((1,) * (query.ndim - mask.ndim) + mask.shape).any((-3, -2))
    keys = lax.broadcasted_iota(jnp.int32, shown.shape, shown.ndim - 1)
    last = jnp.where(shown, keys, 0).max(-1)
    return jnp.broadcast_to(last, query.shape[:-3])
