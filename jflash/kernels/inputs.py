"""What the backward kernels compute from."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jflash.kernels import memory
from jflash.kernels.memory import Vector
from jflash.score.ranges import Index, Span
from jflash.tile import Rows


class Inputs(NamedTuple):
    """What the logits and their cotangents are computed from: whole arrays, their block specs, or refs to them."""

    q: Any
    k: Any
    v: Any
    do: Any
    rows: Rows
    score: Any

    @property
    def specs(self) -> Inputs:
        """Block specs with which each program sees all of everything."""
        whole = lambda shape: pl.BlockSpec(shape, lambda *grid: (0,) * len(shape))
        matrix = lambda x: whole((*x.shape[:3], sum(memory.chunks(x.shape[3], x.dtype))))
        rows, score = jax.tree.map(lambda x: whole(x.shape), (self.rows, self.score))
        return Inputs(*map(matrix, self[:4]), rows=rows, score=score)

    def load_rows(
        self, rows: Span, keep: Array | None, axis: int, batch: Index | None = None, head: Index | None = None
    ) -> Rows:
        """What is known of some rows, with a new `axis` for the keys. A row that is not there has p = 0."""
        load = lambda ref, other: jnp.expand_dims(Vector(ref, batch, head).load(rows, keep, other), axis)
        return Rows(*(None if ref is None else load(ref, other) for ref, other in zip(self.rows, (0, jnp.inf, 0), strict=True)))
