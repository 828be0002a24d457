"""Equinox: MultiheadAttention, Equinox's own layer with another call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jflash.attention import attention
from jflash.numerics import accumulator
from jflash.score import arguments

Heads = tuple[Array, Array, Array]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """`eqx.nn.MultiheadAttention` in memory linear in the lengths, with grouped heads and rotary embeddings.

    Constructor, fields and parameters are Equinox's, and the same key gives the same parameters::

        layer = jflash.equinox.MultiheadAttention(num_heads=8, query_size=512, num_kv_heads=2, causal=True, key=key)
        y = jax.vmap(lambda x: layer(x, x, x))(batch)  # one sequence a call, as everywhere in Equinox

    A layer that is there already lends its parameters::

        where = lambda layer: (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj)
        layer = eqx.tree_at(where, layer, where(trained))

    Fields beside Equinox's, all static:
      num_kv_heads: how many heads keys and values have, a divisor of num_heads; num_heads by default. Query head h reads
        kv head h // (num_heads // num_kv_heads).
      causal, window: as in `jflash.attention`.
      rope_theta: None, or the base of the frequencies of rotary embeddings, 10000 in the paper, which turn queries and keys
        as `eqx.nn.RotaryPositionalEmbedding` does. qk_size must then be even.
    """

    num_kv_heads: int = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    window: tuple[int | None, int | None] = eqx.field(static=True)
    rope_theta: float | None = eqx.field(static=True)

    def __init__(
        self,
        *args: Any,
        num_kv_heads: int | None = None,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        rope_theta: float | None = None,
        key: Array,
        **kwargs: Any,
    ):
        """Arguments as in `eqx.nn.MultiheadAttention(num_heads, query_size, ...)`, and the fields above by name.

        Raises:
          TypeError, ValueError: with the argument, what was expected and what came.
        """
        super().__init__(*args, key=key, **kwargs)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else num_kv_heads
        self.causal, self.window, self.rope_theta = arguments.causal(causal), arguments.window(window), rope_theta
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must be a divisor of num_heads, {self.num_heads}, got {num_kv_heads}")
        if rope_theta is not None and (rope_theta <= 0 or self.qk_size % 2):
            raise ValueError(
                f"rope_theta must be positive and beside an even qk_size, got {rope_theta} and a qk_size of {self.qk_size}"
            )
        if self.num_kv_heads < self.num_heads:
            _, key_of_key, key_of_value, _ = jax.random.split(key, 4)
            self.key_proj = _narrowed(self.key_proj, self.num_kv_heads * self.qk_size, key_of_key)
            self.value_proj = _narrowed(self.value_proj, self.num_kv_heads * self.vo_size, key_of_value)

    @jax.named_scope("jflash.equinox.MultiheadAttention")
    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Array | None = None,
        *,
        key: Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[Array, Array, Array], Heads] | None = None,
        **options: Any,
    ) -> Array:
        """The call of `eqx.nn.MultiheadAttention`, with the options of `jflash.attention`.

        Args:
          query: `[q_len, query_size]`.
          key_: `[kv_len, key_size]`.
          value: `[kv_len, value_size]`.
          mask: bool, broadcastable to `[num_heads, q_len, kv_len]`, True where a query sees a key.
          key: decides what dropout drops, see dropout_key of `jflash.attention`. Under `jax.vmap` give each element its own.
            Needed where dropout is at work.
          inference: True switches dropout off, False on; by default what `self.dropout.inference` says.
          deterministic: the old name of inference; warns, as in Equinox.
          process_heads: process_heads(q, k, v) -> (q, k, v), of the same shapes `[length, heads, size]`; before rope_theta.
          **options: those of `jflash.attention`, instead of the causal and window of the constructor or beside them:
            segment_ids, kv_lengths, softcap, q_offset (which rotary embeddings heed too), implementation, ...

        Returns:
          `[q_len, output_size]`. A query that sees no key gives what output_proj makes of 0, where Equinox takes the mean of
          the values.

        Raises:
          TypeError, ValueError: with the argument, what was expected and what came.
        """
        if deterministic is not None:
            warnings.warn("MultiheadAttention()(deterministic=...) is deprecated: give inference instead", stacklevel=3)
            inference = deterministic
        q = _heads(self.query_proj, query, self.num_heads)
        k = _heads(self.key_proj, key_, self.num_kv_heads)
        v = _heads(self.value_proj, value, self.num_kv_heads)
        if process_heads is not None:
            before = q.shape, k.shape, v.shape
            q, k, v = process_heads(q, k, v)
            if (q.shape, k.shape, v.shape) != before:
                raise ValueError(f"process_heads must keep the shapes {before}, got {(q.shape, k.shape, v.shape)}")
        if self.rope_theta is not None:
            q = rotate(q, self.rope_theta, options.get("q_offset", 0))
            k = rotate(k, self.rope_theta)
        options = {"causal": self.causal, "window": self.window, **options}
        o = attention(q, k, v, mask=mask, dropout_key=key, dropout_rate=self._dropout_rate(key, inference), **options)
        return jax.vmap(self.output_proj)(o.reshape(query.shape[0], self.num_heads * self.vo_size))

    def _dropout_rate(self, key: Array | None, inference: bool | None) -> float:
        inference = self.dropout.inference if inference is None else inference
        rate = 0.0 if inference else self.dropout.p
        if key is None and rate:
            raise ValueError(f"key must be given where dropout_p, {rate}, is not 0 and inference is False, got None")
        return rate


def rotate(x: Array, theta: float, offset: ArrayLike = 0) -> Array:
    """Rotary embeddings: x `[length, heads, size]` with the pair (n, n + size / 2) turned by position · theta^(-2n / size).

    Row i stands at position offset + i. Su et al. 2021 (arXiv:2104.09864), section 3.4.2; the pairs are GPT-NeoX's and
    Equinox's. Angles are float32 (float64 for float64); the result has x's dtype.
    """
    length, _, size = x.shape
    dtype = accumulator(x.dtype)
    positions = (jnp.asarray(offset, jnp.int32) + jnp.arange(length, dtype=jnp.int32)).astype(dtype)
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=dtype) / size)
    angles = positions[:, None, None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _heads(proj: eqx.nn.Linear, x: Array, heads: int) -> Array:
    """[length, heads, size] of x [length, features]."""
    return jax.vmap(proj)(x).reshape(x.shape[0], heads, -1)


def _narrowed(proj: eqx.nn.Linear, out_features: int, key: Array) -> eqx.nn.Linear:
    return eqx.nn.Linear(proj.in_features, out_features, proj.use_bias, dtype=proj.weight.dtype, key=key)
