"""dot_product_attention(): the signature of jax.nn.dot_product_attention, translated into that of attention()."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from jflash.attention import attention
from jflash.numerics import accumulator


class _Options(TypedDict, total=False):
    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: str | None


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    return_residual: Literal[False] = ..., **options: Unpack[_Options],
) -> Array: ...  # fmt: skip
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    return_residual: Literal[True], **options: Unpack[_Options],
) -> tuple[Array, Array]: ...  # fmt: skip
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """jax.nn.dot_product_attention, with its signature as of JAX 0.12, in memory linear in the lengths.

    In shapes, as there: B batch, T and S the lengths of queries and keys, N and K their heads, H head_dim. Arrays of rank
    3 are one batch element, and query, key and value may be of different rank then.

    What differs from jax.nn:

    - A query that sees no key gives 0 and the residual -inf, and adds nothing to a gradient; there the mean of the values
      and about -2e38. With a bias of -inf for all of its keys, the same here; there NaN.
    - What no query sees may hold anything; there a NaN in it reaches every query.
    - The residual is float32 (float64 for float64 inputs) and has a gradient; there it has the dtype of key and none.
    - Probabilities and sums are float64 for float64 inputs; there float32.
    - value may be wider or narrower than key; the result then is too.
    - Lengths may be integers of any width, or one for all of the batch; None is a side of local_window_size without limit.
    - The sizes of local_window_size are Python ints, not negative; the bias is not wider than float32 (float64 beside
      float64); a traced scale does not go together with a bias. Each of these raises.
    - No jax.jvp of jax.jvp and no third derivatives; implementation="naive" has every derivative.
    - There is no implementation="cudnn", which raises, and there are those of attention().

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32, float64.
      key: `[B, S, K, H]` or `[S, K, H]` like query. N is a multiple of K: query head n reads key head n // (N // K).
      value: like key.
      bias: added to the scaled logits; broadcastable to `[B, N, T, S]`, float, integer or bool. A float has a gradient.
      mask: bool, broadcastable to `[B, N, T, S]`: True where a query sees a key.
      scale: what q·kᵀ is multiplied by; 1 / sqrt(H) by default. Has a gradient where it is traced.
      is_causal: query t sees the keys up to t: the diagonal starts in the top left corner, whatever T and S are.
      query_seq_lengths: int32 `[B]`: how many queries are there; the others see nothing.
      key_value_seq_lengths: int32 `[B]`: how many keys are there.
      local_window_size: how many keys a query sees (before, behind) its own position; an int w means (w, w).
      implementation: None chooses by platform, "xla" is plain JAX (online softmax here), and the other names of attention().
      return_residual: return (output, residual).

    Returns:
      The output `[B, T, N, H]`, shaped like query, with its dtype; with return_residual also the log-sum-exp of each
      query's logits, `[B, T, N]`, without B where query has none.

    Raises:
      TypeError, ValueError: with the argument, by its name in attention(), what was expected and what came.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    if implementation == "cudnn":
        raise ValueError("implementation='cudnn' is not there: jflash has kernels of its own, which None chooses on a GPU")
    if bias is not None:
        bias = jnp.asarray(bias)
        bias = bias if jnp.issubdtype(bias.dtype, jnp.floating) else bias.astype(accumulator(query.dtype))
    try:
        o, lse = attention(
            *map(_rank_4, (query, key, value)),
            bias=None if bias is None else _rank_4(bias),
            mask=None if mask is None else _rank_4(mask),
            causal=bool(is_causal),
            q_lengths=query_seq_lengths,
            kv_lengths=key_value_seq_lengths,
            window=local_window_size,
            implementation=implementation,
            return_lse=True,
            **_scaling(scale, bias is not None, query.dtype),
        )
    except (TypeError, ValueError) as error:
        error.add_note(_NAMES)
        raise
    o, residual = o.reshape(*query.shape[:-1], value.shape[-1]), lse.swapaxes(1, 2).reshape(query.shape[:-1])
    return (o, residual) if return_residual else o


_NAMES = (
    "Called by jflash.dot_product_attention(), where q, k, v are query, key, value; causal is is_causal; q_lengths and "
    "kv_lengths are query_seq_lengths and key_value_seq_lengths; window is local_window_size."
)


def _rank_4(x: ArrayLike) -> Array:
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _scaling(scale: ArrayLike | None, biased: bool, dtype) -> dict[str, Any]:
    """The options of attention() that scale q·kᵀ. Its own scale is a number; a traced one is a function of the logit."""
    if not isinstance(scale, Tracer):
        return {"scale": scale}
    if scale.shape:
        raise ValueError(f"scale must be a number, got shape {scale.shape}")
    if biased:  # score_fn comes after the bias
        raise TypeError("scale must be a Python number beside a bias, got a traced value: multiply query by it instead")
    return {"scale": 1.0, "score_fn": _times, "score_args": (scale.astype(accumulator(dtype)),)}


def _times(s: Array, b: Array, h: Array, i: Array, j: Array, scale: Array) -> Array:
    return s * scale
