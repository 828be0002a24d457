"""What the backward kernels compute from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jflash import tile
from jflash.kernels import memory
from jflash.kernels.memory import Matrix, Place, Vector
from jflash.numerics import Arithmetic
from jflash.score.ranges import Index, Span
from jflash.score.score import Pairs, Score
from jflash.tile import Cotangents, Matrices


class Inputs(NamedTuple):
    """What the logits and their cotangents are computed from: whole arrays, their block specs, or refs to them.

    `moving` holds their tangents, where a kernel computes those of gradients; None in place of those that are zero.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    rows: Any  # tile.Rows, or tile.RowTangents
    score: Any
    moving: Any = None  # Inputs, or None

    def map(self, matrix_q: Callable, matrix_k: Callable, row: Callable, score: Callable) -> Inputs:
        """The Inputs of something else: a function for what queries have, keys have, rows have, and for the Score."""
        of = lambda fn, x: None if x is None else fn(x)
        moving = of(lambda x: x.map(matrix_q, matrix_k, row, score), self.moving)
        matrices = of(matrix_q, self.q), of(matrix_k, self.k), of(matrix_k, self.v), of(matrix_q, self.do)
        return Inputs(*matrices, self.rows.map(row), score(self.score), moving)

    @property
    def specs(self) -> Inputs:
        """Block specs with which each program sees all of everything."""
        whole = lambda shape: pl.BlockSpec(shape, lambda *grid: (0,) * len(shape))
        matrix = lambda x: whole((*x.shape[:3], sum(memory.chunks(x.shape[3], x.dtype))))
        return self.map(matrix, matrix, lambda x: whole(x.shape), lambda x: jax.tree.map(lambda x: whole(x.shape), x))

    @property
    def suffix(self) -> str:
        """What the name of a kernel ends with."""
        return "" if self.moving is None else "_tangent"

    @property
    def widths(self) -> Widths:
        return Widths(self.q.shape[3], self.v.shape[3])


class Widths(NamedTuple):
    """Of the heads: what block specs, padded, do not tell."""

    head_dim: int
    v_dim: int


class Loader(NamedTuple):
    """Reads the tiles of a kernel from refs: of each thing a list, of the Inputs and, where they move, of their tangents."""

    inputs: Inputs
    widths: Widths

    @property
    def _all(self) -> list[Inputs]:
        return [self.inputs] if self.inputs.moving is None else [self.inputs, self.inputs.moving]

    def scores(self, place: Place) -> list[Score]:
        """Of a batch element, see memory.score_at()."""
        return [memory.score_at(inputs.score, place) for inputs in self._all]

    def queries(self, rows: Span, keep: Array | None, batch: Index | None = None, head: Index | None = None) -> list[tuple]:
        """(q, do) of some rows."""
        load = functools.partial(_load, rows=rows, keep=keep, batch=batch, head=head)
        return [(load(x.q, self.widths.head_dim), load(x.do, self.widths.v_dim)) for x in self._all]

    def keys(self, cols: Span, keep: Array | None, batch: Index | None = None, head: Index | None = None) -> list[tuple]:
        """(k, v) of some columns."""
        load = functools.partial(_load, rows=cols, keep=keep, batch=batch, head=head)
        return [(load(x.k, self.widths.head_dim), load(x.v, self.widths.v_dim)) for x in self._all]

    def rows(self, rows: Span, keep: Array | None, axis: int, batch: Index | None = None, head: Index | None = None) -> list:
        """What is known of some rows, with a new `axis` for the keys. A row that is not there has p = 0."""
        load = lambda ref, other: jnp.expand_dims(Vector(ref, batch, head).load(rows, keep, other), axis)
        of = lambda x, others: type(x)(*(None if ref is None else load(ref, n) for ref, n in zip(x, others, strict=True)))
        return [of(x.rows, others) for x, others in zip(self._all, ((0, jnp.inf, 0), (0, 0)), strict=False)]


def terms(
    queries: list[tuple], keys: list[tuple], rows: list[Any], scores: list[Score], at: Pairs, visible: Array | None,
    arith: Arithmetic, across: bool = False,
) -> list[tuple[Cotangents, Matrices]]:  # fmt: skip
    """tile.terms() of what a Loader has read."""
    matrices = [Matrices(q, k, v, do) for (q, do), (k, v) in zip(queries, keys, strict=True)]
    known, *moving = zip(matrices, rows, scores, strict=True)
    return tile.terms(*known, tile.Moving(*moving[0]) if moving else None, at, visible, arith, across)


def _load(ref: Any, width: int, rows: Span, keep: Array | None, batch: Any, head: Any) -> Any:
    return None if ref is None else Matrix(ref, width, batch, head).load(rows, keep)
