"""What the backward kernels compute from."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from jflash.kernels import memory


class Inputs(NamedTuple):
    """What the logits and their cotangents are computed from: whole arrays, their block specs, or refs to them."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse2: Any
    delta: Any
    score: Any

    @property
    def specs(self) -> Inputs:
        """Block specs with which each program sees all of everything."""
        whole = lambda shape: pl.BlockSpec(shape, lambda *grid: (0,) * len(shape))
        matrix = lambda x: whole((*x.shape[:3], sum(memory.chunks(x.shape[3], x.dtype))))
        rest = jax.tree.map(lambda x: whole(x.shape), (self.lse2, self.delta, self.score))
        return Inputs(*map(matrix, self[:4]), *rest)
