"""The arguments of attention(), one by one: checked, and brought into the one form that Score holds.

Each error names the argument, what was expected and what came.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from jflash.numerics import accumulator, known
from jflash.score import dropout, segments

# No position lies farther from 0, so that sums of three of them (an offset, an index, a window) fit into int32.
FARTHEST = 2**29

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)

_PROBE = (8, 16)  # the shape of the tile on which functions are tried out
_INDICES = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (), (8, 1), (1, 16)))  # b, h, i, j

ScoreFn = Callable[..., Array]  # (s, b, h, i, j, *score_args) -> s
MaskFn = Callable[..., Array]  # (b, h, i, j, *mask_args) -> bool


class ScoreOptions(TypedDict, total=False):
    """What attention() may be told about the score of a pair."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    q_offset: int | ArrayLike
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None
    q_lengths: ArrayLike | None
    kv_lengths: ArrayLike | None
    mask: ArrayLike | None
    mask_fn: MaskFn | None
    mask_args: Sequence[ArrayLike]
    scale: float | None
    softcap: float | None
    bias: ArrayLike | None
    score_fn: ScoreFn | None
    score_args: Sequence[ArrayLike]
    sinks: ArrayLike | None
    dropout_rate: float
    dropout_key: ArrayLike | None


def arrays(q: Array, k: Array, v: Array) -> None:
    """Ranks, dtypes and shapes of what attention is computed from."""
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
        if not known(x.shape[-3], x.shape[-1]):
            raise ValueError(f"{name} must have a known length and width (jax.export: the batch may be open), got {x.shape}")
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
    for name, x in (("q", q), ("k", k)):
        if x.shape[-3] > FARTHEST:
            raise ValueError(f"{name} must be at most {FARTHEST} long, got {x.shape[-3]}")


# ------------------------------------------------------------------------------------------------------ visibility


def causal(value) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"causal must be a bool, got {value!r}")
    return bool(value)


def window(value) -> tuple[int | None, int | None]:
    """(left, right), None where there is no limit."""
    if value is None or isinstance(value, (int, np.integer)):
        value = (value, value)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"window must be an int, a pair (left, right) or None, got {value!r}")
    sides = []
    for side in value:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, np.integer))):
            raise TypeError(f"window must hold ints or None, got {value!r}")
        if side is not None and side < 0:
            raise ValueError(f"window must not be negative, got {value!r}: None on a side is no limit")
        sides.append(None if side is None or side >= FARTHEST else int(side))
    return sides[0], sides[1]


def q_offset(value, batch: int) -> tuple[int, Array | None]:
    """(static offset, None), or (0, int32 [batch]) for an array."""
    if isinstance(value, bool):
        raise TypeError(f"q_offset must be an int or an integer array, got {value!r}")
    if isinstance(value, (int, np.integer)):
        if abs(value) > FARTHEST:
            raise ValueError(f"q_offset must lie within ±{FARTHEST}, got {value}")
        return operator.index(value), None
    return 0, _one_for_each("q_offset", value, batch, -FARTHEST, FARTHEST)


def lengths(name: str, value, batch: int, longest: int) -> Array | None:
    """int32 [batch], from 0 to `longest`."""
    return None if value is None else _one_for_each(name, value, batch, 0, longest)


def _one_for_each(name: str, value, batch: int, least: int, most: int) -> Array:
    """int32 [batch] of an integer scalar or [batch] array."""
    x = jnp.asarray(value)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be an int or an integer array, got {x.dtype}")
    if x.shape not in ((), (batch,)):
        raise ValueError(f"{name} must be a scalar or have the shape [batch], ({batch},), got shape {x.shape}")
    return jnp.broadcast_to(jnp.clip(x, least, most).astype(jnp.int32), (batch,))


def segment_ids(value, batch: int, q_len: int, kv_len: int, batched: bool) -> tuple[Array | None, Array | None]:
    """The ids of the queries and of the keys, int32 [batch, length], equal where those that were given are."""
    if value is None:
        return None, None
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise TypeError(f"segment_ids must be one array or a pair (q, kv), got {len(value)} of them")
        names, pair = ("segment_ids[0]", "segment_ids[1]"), value
    else:
        if q_len != kv_len:
            raise ValueError(f"segment_ids must be a pair (q, kv) where q_len, {q_len}, and kv_len, {kv_len}, differ")
        names, pair = ("segment_ids", "segment_ids"), (value, value)
    ids = []
    for name, x, length in zip(names, pair, (q_len, kv_len), strict=True):
        x = x if isinstance(x, np.ndarray) else jnp.asarray(x)  # of 64 bits, JAX would cut it to 32 without a word
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be an integer array, got {x.dtype}")
        expected = (batch, length) if batched else (length,)
        if x.shape != expected:
            raise ValueError(
                f"{name} must have the shape {'[batch, length]' if batched else '[length]'}, {expected}, got {x.shape}"
            )
        ids.append(x.reshape(batch, length))
    return segments.in_32_bits(*ids)


def pairwise(name: str, value, shape: tuple[int, ...], batched: bool) -> Array:
    """An array that broadcasts to [batch, heads, q_len, kv_len], as one of rank 4."""
    x = jnp.asarray(value)
    batch, wanted = shape[0], shape if batched else shape[1:]
    fits = x.ndim <= len(wanted) and all(n in (1, size) for n, size in zip(x.shape[::-1], wanted[::-1], strict=False))
    if not fits:
        dimensions = "[batch, heads, q_len, kv_len]" if batched else "[heads, q_len, kv_len]"
        instead = ""
        if batched and x.ndim in (2, 3) and x.shape[0] == batch and _broadcasts(x.shape[1:], shape[2:]):
            instead = f": write {name}[:, None, None, :]" if x.ndim == 2 else f": write {name}[:, None]"
        raise ValueError(f"{name} must broadcast to {dimensions}, {wanted}, got shape {x.shape}{instead}")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def mask(value, shape: tuple[int, ...], batched: bool) -> Array | None:
    if value is None:
        return None
    x = pairwise("mask", value, shape, batched)
    if x.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be bool, True where a query sees a key, got {x.dtype}: give what is added to logits as bias"
        )
    return x


# ------------------------------------------------------------------------------------------------------ the logit


def scale(value, head_dim: int) -> float:
    if value is None:
        return 1 / math.sqrt(head_dim)
    return _number("scale", value, ": multiply q by it instead and give scale=1.0")


def softcap(value) -> float | None:
    if value is None:
        return None
    cap = _number("softcap", value)
    if cap <= 0:
        raise ValueError(f"softcap must be positive, got {cap}")
    return cap


def _number(name: str, value, instead: str = "") -> float:
    """A finite Python float."""
    if isinstance(value, Tracer):
        raise TypeError(f"{name} must be a Python number, got a traced value{instead}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a Python number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def bias(value, shape: tuple[int, ...], batched: bool, dtype) -> Array | None:
    if value is None:
        return None
    x = pairwise("bias", value, shape, batched)
    _floating("bias", x, dtype)
    return x


def sinks(value, heads: int, dtype) -> Array | None:
    if value is None:
        return None
    x = jnp.asarray(value)
    _floating("sinks", x, dtype)
    if x.shape != (heads,):
        raise ValueError(f"sinks must have the shape [heads], ({heads},), got shape {x.shape}")
    return x


def _floating(name: str, x: Array, dtype, otherwise: str = "") -> None:
    """Not wider than what logits are computed in: it would be rounded without a word."""
    widest = accumulator(dtype)
    if x.dtype not in FLOATS or x.dtype.itemsize > widest.itemsize:
        raise TypeError(
            f"{name} must be a float of at most {widest.itemsize * 8} bits beside q of {dtype}{otherwise}, got {x.dtype}"
        )


def mask_fn(value, args, on_arrays: Callable) -> tuple[MaskFn | None, tuple[Array, ...]]:
    """(mask_fn, mask_args); on_arrays(mask_fn, mask_args) takes flattened arrays."""
    checked = _tables("mask_args", args)
    for n, x in enumerate(checked):
        if not (x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)):
            raise TypeError(f"mask_args[{n}] must hold bools, integers or floats, got {x.dtype}")
    if value is None:
        if checked:
            raise ValueError("mask_args must be given together with mask_fn, which reads them")
        return None, ()
    _callable("mask_fn", value)
    seen = _trace("mask_fn", "mask_args", on_arrays(value, checked), *_INDICES, *map(jnp.ravel, checked))
    if seen.dtype != jnp.bool_ or not _broadcasts(seen.shape, _PROBE):
        raise TypeError(
            f"mask_fn must return bools that broadcast with i and j, here to {_PROBE}, got {seen.dtype}{list(seen.shape)}"
        )
    return value, tuple(checked)


def _tables(name: str, args) -> list[Array]:
    """The arrays that a function reads."""
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of arrays, got {type(args).__name__}")
    arrays = [jnp.asarray(arg) for arg in args]
    for n, x in enumerate(arrays):
        if x.size == 0:
            raise ValueError(f"{name}[{n}] must not be empty, got shape {x.shape}")
    return arrays


def score_fn(value, args, dtype, on_arrays: Callable) -> tuple[ScoreFn | None, tuple[Array, ...]]:
    """(score_fn, score_args); on_arrays(score_fn, shapes) takes flattened arrays."""
    checked = _tables("score_args", args)
    for n, x in enumerate(checked):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            _floating(f"score_args[{n}]", x, dtype, ", or an integer")
    if value is None:
        if checked:
            raise ValueError("score_args must be given together with score_fn, which reads them")
        return None, ()
    _callable("score_fn", value)
    logits = jax.ShapeDtypeStruct(_PROBE, accumulator(dtype))
    s = _trace(
        "score_fn", "score_args", on_arrays(value, [x.shape for x in checked]), logits, *_INDICES, *map(jnp.ravel, checked)
    )
    if s.shape != _PROBE or s.dtype != logits.dtype:
        raise TypeError(
            f"score_fn must keep the shape and the dtype of s, here {logits.dtype}{list(_PROBE)}, got {s.dtype}{list(s.shape)}"
        )
    return value, tuple(checked)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1], strict=False))


def _callable(name: str, value) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")


def _trace(name: str, instead: str, fn: Callable, *arguments) -> jax.ShapeDtypeStruct:
    """What fn(*arguments) returns, which must be one array; fn must not close over any."""
    jaxpr, result = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    if captured := [x for x in jaxpr.consts if np.ndim(x) or isinstance(x, Array)]:  # Array: traced numbers too
        shapes = ", ".join(str(np.shape(x)) for x in captured)
        raise ValueError(
            f"{name} must not close over arrays, not even traced numbers, got some of shape {shapes}: give them as {instead}"
        )
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise TypeError(f"{name} must return one array, got {result!r}")
    return result


# ------------------------------------------------------------------------------------------------------ dropout


def dropout_keys(rate, key, batch: int, heads: int) -> tuple[float, Array | None]:
    """(rate, the generator's key for each batch element and head)."""
    rate = _number("dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must lie in [0, 1), got {rate}")
    if rate == 0:
        return 0.0, None
    if key is None:
        raise ValueError(f"dropout_key must be given where dropout_rate is not 0, got None beside {rate}")
    return rate, dropout.keys(dropout.words("dropout_key", key), batch, heads)
