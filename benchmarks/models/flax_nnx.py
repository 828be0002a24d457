"""The GPT of benchmarks.models in flax.nnx."""

from __future__ import annotations

import functools

from flax import nnx
from jax import Array

from benchmarks.models import BYTES, Attend, Model, Size, attended


class Block(nnx.Module):
    """Attention and a perceptron, each behind a norm and beside a residual: `[batch, length, width]` to the same."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def __call__(self, x: Array, positions: Array, attend: Attend) -> Array:
        x = x + self.out(attended(self.qkv(self.attention_norm(x)), positions, self.heads, attend))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    """The logits of each next byte: int32 `[batch, length]` to `[batch, length, BYTES]`."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs):
        unit = nnx.initializers.normal(1.0)  # as large as what a block adds, which would drown a smaller one
        zeros = nnx.initializers.zeros  # all bytes are equally likely at first: the loss begins at log(BYTES)
        self.embed = nnx.Embed(BYTES, size.width, embedding_init=unit, rngs=rngs)
        self.blocks = nnx.List([Block(size.width, size.heads, rngs=rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, rngs=rngs)
        self.head = nnx.Linear(size.width, BYTES, use_bias=False, kernel_init=zeros, rngs=rngs)

    def __call__(self, tokens: Array, positions: Array, attend: Attend) -> Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.head(self.norm(x))


def make(size: Size) -> Model:
    new = lambda key: GPT(size, rngs=nnx.Rngs(key))
    graph, _ = nnx.split(nnx.eval_shape(lambda: new(0)), nnx.Param)
    apply = lambda params, tokens, positions, attend: nnx.merge(graph, params)(tokens, positions, attend)
    return Model(lambda key: nnx.split(new(key), nnx.Param)[1], apply)
