"""The GPT of benchmarks.models in flax.linen."""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from benchmarks.models import BYTES, Attend, Model, Size, attended


def linear(features: int, name: str) -> nn.Dense:
    return nn.Dense(features, use_bias=False, name=name)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual: `[batch, length, width]` to the same."""

    heads: int

    @nn.compact
    def __call__(self, x: Array, positions: Array, attend: Attend) -> Array:
        width = x.shape[-1]
        qkv = linear(3 * width, "qkv")(nn.RMSNorm(name="attention_norm")(x))
        x = x + linear(width, "out")(attended(qkv, positions, self.heads, attend))
        up = linear(4 * width, "up")(nn.RMSNorm(name="mlp_norm")(x))
        return x + linear(width, "down")(nn.gelu(up))


class GPT(nn.Module):
    """The logits of each next byte: int32 `[batch, length]` to `[batch, length, BYTES]`."""

    size: Size

    @nn.compact
    def __call__(self, tokens: Array, positions: Array, attend: Attend) -> Array:
        unit = nn.initializers.normal(1.0)  # as large as what a block adds, which would drown a smaller one
        zeros = nn.initializers.zeros  # all bytes are equally likely at first: the loss begins at log(BYTES)
        x = nn.Embed(BYTES, self.size.width, embedding_init=unit, name="embed")(tokens)
        for n in range(self.size.layers):
            x = Block(self.size.heads, name=f"blocks_{n}")(x, positions, attend)
        return nn.Dense(BYTES, use_bias=False, kernel_init=zeros, name="head")(nn.RMSNorm(name="norm")(x))


def make(size: Size) -> Model:
    model = GPT(size)

    def init(key: Array) -> Any:
        one, values_alone = jnp.zeros((1, 1), jnp.int32), lambda q, k, v: v
        return model.init(key, one, one[0], values_alone)["params"]

    def apply(params: Any, tokens: Array, positions: Array, attend: Attend) -> Array:
        return cast(Array, model.apply({"params": params}, tokens, positions, attend))

    return Model(init, apply)
