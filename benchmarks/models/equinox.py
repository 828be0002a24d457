"""The GPT of benchmarks.models in Equinox."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.models import BYTES, Attend, Model, Size, attended


class Block(eqx.Module):
    """Attention and a perceptron, each behind a norm and beside a residual: `[batch, length, width]` to the same."""

    attention_norm: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp_norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: Array):
        keys = jax.random.split(key, 4)
        self.heads = heads
        self.attention_norm = norm(width)
        self.qkv = linear(width, 3 * width, keys[0])
        self.out = linear(width, width, keys[1])
        self.mlp_norm = norm(width)
        self.up = linear(width, 4 * width, keys[2])
        self.down = linear(4 * width, width, keys[3])

    def __call__(self, x: Array, positions: Array, attend: Attend) -> Array:
        qkv = each(self.qkv, each(self.attention_norm, x))
        x = x + each(self.out, attended(qkv, positions, self.heads, attend))
        return x + each(self.down, jax.nn.gelu(each(self.up, each(self.mlp_norm, x))))


class GPT(eqx.Module):
    """The logits of each next byte: int32 `[batch, length]` to `[batch, length, BYTES]`."""

    embed: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, size: Size, *, key: Array):
        embed, *keys = jax.random.split(key, 1 + size.layers)
        # As large as what a block adds, which would drown a smaller one.
        self.embed = eqx.nn.Embedding(weight=jax.random.normal(embed, (BYTES, size.width)))
        self.blocks = [Block(size.width, size.heads, key=key) for key in keys]
        self.norm = norm(size.width)
        # All bytes are equally likely at first: the loss begins at log(BYTES).
        self.head = with_weight(eqx.nn.Linear(size.width, BYTES, use_bias=False, key=embed), jnp.zeros((BYTES, size.width)))

    def __call__(self, tokens: Array, positions: Array, attend: Attend) -> Array:
        x = each(self.embed, tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        return each(self.head, each(self.norm, x))


def each(layer: Callable, x: Array) -> Array:
    """The layer, which takes one token as everywhere in Equinox, of every token of every sequence."""
    return jax.vmap(jax.vmap(layer))(x)


def norm(width: int) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(width, eps=1e-6, use_bias=False)  # Flax's epsilon


def linear(in_features: int, out_features: int, key: Array) -> eqx.nn.Linear:
    """Without bias, and with weights drawn as Flax draws them."""
    layer = eqx.nn.Linear(in_features, out_features, use_bias=False, key=key)
    draw = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
    return with_weight(layer, draw(key, (out_features, in_features)))


def with_weight(layer: eqx.nn.Linear, weight: Array) -> eqx.nn.Linear:
    return eqx.tree_at(lambda layer: layer.weight, layer, weight)


def make(size: Size) -> Model:
    """All leaves of the module are arrays, so that it is its own parameters."""
    return Model(lambda key: GPT(size, key=key), lambda params, *inputs: params(*inputs))
