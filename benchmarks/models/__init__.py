"""A small byte-level GPT, written in three libraries: the same function, and parameters drawn from the same distributions.

Pre-norm blocks (RMSNorm) of causal attention with rotary embeddings and of a perceptron with GELU, no biases, an embedding
and a head of their own. What does not depend on the library is here; each of the modules beside is one library's GPT.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

BYTES = 256
NAMES = ("flax-linen", "flax-nnx", "equinox")

Attend = Callable[[Array, Array, Array], Array]  # q, k, v [batch, length, heads, head_dim] -> the same shape


class Size(NamedTuple):
    """How large a GPT is."""

    layers: int
    width: int
    heads: int


class Batch(NamedTuple):
    """Sequences, their bytes in any order that `positions` tells."""

    tokens: Any  # int32 [batch, length]
    targets: Any  # int32 [batch, length]: the bytes that follow
    positions: Any  # int32 [length]


@dataclasses.dataclass(frozen=True)
class Model:
    """What training knows of a model: functions of its parameters, a tree of arrays."""

    init: Callable[[Array], Any]  # key -> parameters
    apply: Callable[[Any, Array, Array, Attend], Array]  # parameters, tokens, positions, attend -> [batch, length, BYTES]

    def loss(self, params: Any, batch: Batch, attend: Attend) -> Array:
        """The mean cross-entropy of the targets, nats a byte."""
        logits = self.apply(params, batch.tokens, batch.positions, attend)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean()


def make(name: str, size: Size) -> Model:
    """The GPT of that library, one of NAMES; no other library is imported."""
    return importlib.import_module(f"benchmarks.models.{name.replace('-', '_')}").make(size)


def attended(qkv: Array, positions: Array, heads: int, attend: Attend) -> Array:
    """`[batch, length, width]`: attention between projections `[batch, length, 3 * width]`."""
    batch, length, features = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, -1), 2, 0)
    return attend(rotated(q, positions), rotated(k, positions), v).reshape(batch, length, features // 3)


def rotated(x: Array, positions: Array) -> Array:
    """Rotary position embedding of x `[batch, length, heads, head_dim]` (Su et al. 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = (positions[:, None] * frequency)[:, None, :]  # [length, 1, half]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
