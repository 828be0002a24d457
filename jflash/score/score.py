"""Score: what the score of one (query, key) pair is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from jflash.numerics import LOG2E, smaller
from jflash.score import arguments, dropout
from jflash.score.arguments import MaskFn, ScoreFn, ScoreOptions
from jflash.score.table import Table


class Pairs(NamedTuple):
    """Which pairs a tile holds: integers, scalars or arrays that broadcast to the tile. i and j count from 0."""

    b: Array
    h: Array
    i: Array
    j: Array


class Operands(NamedTuple):
    """What the logits of a tile are computed from, all as large as the tile; of tangents None where one is zero."""

    qk: Any
    bias: Any = None
    values: tuple[Any, ...] = ()  # what score_fn reads from its floating-point arrays, in order

    def where(self, visible: Array) -> Operands:
        """Zero where not visible, so that nothing that a hidden pair holds can reach a sum."""
        return jax.tree.map(lambda x: jnp.where(visible, x, 0), self)


class MaskTable(NamedTuple):
    """What mask_fn is told of one of its arrays. Kernels hold bools as integers: of bytes they read too little or too much."""

    shape: tuple[int, ...]
    boolean: bool

    @classmethod
    def of(cls, x: Array) -> MaskTable:
        return cls(x.shape, x.dtype == jnp.bool_)

    def flattened(self, x: Array) -> Array:
        return jnp.ravel(x).astype(jnp.int32 if self.boolean else x.dtype)

    def seen_by_mask_fn(self, x: Any) -> Any:
        """A number, or a Table, of the flattened array; what is read of floats is float32 (float64) as in score_fn."""

        def read(index):
            value = x[index]
            if self.boolean:
                return value.astype(jnp.bool_)
            floating = jnp.issubdtype(value.dtype, jnp.floating)
            return value.astype(jnp.promote_types(value.dtype, jnp.float32)) if floating else value

        return Table(self.shape, read) if self.shape else read(0)


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field that is part of the program, not of its data."""
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Score:
    """Which keys a query sees, with what logit, and which probabilities are kept. Options are static fields, arrays leaves.

    One Score travels from attention() through JAX's derivatives into every implementation. On the host its leaves are whole
    arrays; a kernel's block specs are a Score too, and so are the refs inside it. select() turns either into the Score of
    one batch element, which answers what ranges.py asks; and an engine makes of that the Score of one tile, whose leaves
    broadcast to the tile, and which answers what tile.py asks: what is visible, what is the logit, what is kept.

    Query i stands at position offset + i and sees the keys from `left` before that position to `right` behind it
    (None: no limit), of which there are kv_len. causal=True has become right = 0.
    """

    q_len: int = static()
    kv_len: int = static()
    scale: float = static()
    left: int | None = static(None)
    right: int | None = static(None)
    static_offset: int = static(0)
    softcap: float | None = static(None)
    mask_fn: MaskFn | None = static(None)  # noqa: RUF009
    score_fn: ScoreFn | None = static(None)  # noqa: RUF009
    arg_shapes: tuple[tuple[int, ...], ...] = static(())
    mask_tables: tuple[MaskTable, ...] = static(())
    dropout_rate: float = static(0.0)
    unasked: tuple[str, ...] = static(())  # in the backward: arrays whose gradients nobody asks for, q, k and v among them

    # One for each batch element: int32 [batch] on the host, scalars after select().
    q_offset: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    # One for each query or key: int32 [batch, length].
    q_segments: Any = None
    kv_segments: Any = None
    # Which tiles are visited, see visits.py, and what is reached at all, see kernels/reach.py: int32 [batch, heads, tiles,
    # ...], int8 [batch, kv_heads, kv_len] and [batch, heads, q_len].
    visits: Any = None
    key_seen: Any = None
    query_sees: Any = None
    # One for each pair: [batch, heads, q_len, kv_len], each of these or 1.
    mask: Any = None
    bias: Any = None
    # One for each head: float [heads], and uint32 [batch, heads, 2].
    sinks: Any = None
    dropout_keys: Any = None
    # Which batch element and head are the first of this part of a sharded whole: int32 [2]. For functions only.
    first: Any = None
    # What score_fn reads, and what mask_fn reads, flattened.
    args: tuple[Any, ...] = ()
    mask_args: tuple[Any, ...] = ()

    @classmethod
    def of(cls, q: Array, k: Array, *, batched: bool = True, **options: Unpack[ScoreOptions]) -> Score:
        """The Score of q `[batch, q_len, heads, head_dim]` and k `[batch, kv_len, ...]`; options as in attention().

        `batched`: whether the arrays among the options have a batch axis, or may have.
        """
        batch, q_len, heads, head_dim = q.shape
        kv_len = k.shape[1]
        get = options.get
        shape = (batch, heads, q_len, kv_len)
        left, right = arguments.window(get("window"))
        if arguments.causal(get("causal", False)):
            right = 0
        static_offset, q_offset = arguments.q_offset(get("q_offset", 0), batch)
        q_segments, kv_segments = arguments.segment_ids(get("segment_ids"), batch, q_len, kv_len, batched)
        score_fn, args = arguments.score_fn(get("score_fn"), get("score_args", ()), q.dtype, on_arrays)
        mask_fn, mask_args = arguments.mask_fn(get("mask_fn"), get("mask_args", ()), mask_on_arrays)
        rate, dropout_keys = arguments.dropout_keys(get("dropout_rate", 0.0), get("dropout_key"), batch, heads)
        return cls(
            q_len=q_len,
            kv_len=kv_len,
            scale=arguments.scale(get("scale"), head_dim),
            left=left,
            right=right,
            static_offset=static_offset,
            softcap=arguments.softcap(get("softcap")),
            mask_fn=mask_fn,
            score_fn=score_fn,
            arg_shapes=tuple(x.shape for x in args),
            mask_tables=tuple(map(MaskTable.of, mask_args)),
            dropout_rate=rate,
            q_offset=q_offset,
            q_lengths=arguments.lengths("q_lengths", get("q_lengths"), batch, q_len),
            kv_lengths=arguments.lengths("kv_lengths", get("kv_lengths"), batch, kv_len),
            q_segments=q_segments,
            kv_segments=kv_segments,
            mask=arguments.mask(get("mask"), shape, batched),
            bias=arguments.bias(get("bias"), shape, batched, q.dtype),
            sinks=arguments.sinks(get("sinks"), heads, q.dtype),
            dropout_keys=dropout_keys,
            args=tuple(jnp.ravel(x) for x in args),
            mask_args=tuple(table.flattened(x) for table, x in zip(map(MaskTable.of, mask_args), mask_args, strict=True)),
        )

    def replace(self, **leaves: Any) -> Score:
        return dataclasses.replace(self, **leaves)

    def map_leaves(self, fn: Callable[[str, Any], Any]) -> Score:
        """The Score with fn(name, leaf) in place of each leaf that is there; `args` is one of them, `mask_args` too."""
        leaves = {name: getattr(self, name) for name in LEAVES}
        return self.replace(
            **{
                name: fn(name, leaf)
                for name, leaf in leaves.items()
                if not (leaf is None or (isinstance(leaf, tuple) and not leaf))
            }
        )

    def only(self, *names: str) -> Score:
        """This Score with no other leaves than these."""
        return self.map_leaves(lambda name, leaf: leaf if name in names else jax.tree.map(lambda _: None, leaf))

    @property
    def options_class(self) -> str:
        """For the choice of tile sizes: "plain" where a pair costs no more than a comparison or two, else "general"."""
        return "plain" if self.plain and self.banded and self.dropout_keys is None else "general"

    # ------------------------------------------------------------------------------------------- one batch element

    def select(self, read=lambda leaf: leaf[0]) -> Score:
        """The Score of one batch element, for ranges.py; `read` takes its number out of a leaf that has one for each."""
        return self.map_leaves(lambda name, leaf: read(leaf) if name in ONE_FOR_EACH else leaf)

    @property
    def offset(self) -> int | Array:
        return self.static_offset if self.q_offset is None else self.q_offset

    @property
    def queries(self) -> int | Array:
        """How many queries are there: those behind them see nothing."""
        return self.q_len if self.q_lengths is None else self.q_lengths

    @property
    def keys(self) -> int | Array:
        """How many keys are there."""
        return self.kv_len if self.kv_lengths is None else self.kv_lengths

    # ------------------------------------------------------------------------------------------- is it visible?

    @property
    def patterned(self) -> bool:
        """True where any pair may be hidden, so that no tile can be known to be visible everywhere."""
        return self.mask is not None or self.mask_fn is not None

    @property
    def banded(self) -> bool:
        """True where key_bounds and query_bounds tell all about visibility."""
        return not self.patterned and self.q_segments is None

    def key_bounds(self, rows):
        """(first, last) of the keys that the queries `rows` may see, last included; first > last where there are none.

        Of segments, masks and functions the bounds know nothing.
        """
        first = 0 if self.left is None else rows + (self.offset - self.left)
        last = self.keys - 1 if self.right is None else smaller(rows + (self.offset + self.right), self.keys - 1)
        return first, last

    def query_bounds(self, cols):
        """(first, last) of the queries that may see the keys `cols`: key_bounds with the two sides exchanged."""
        first = 0 if self.right is None else cols - (self.offset + self.right)
        last = self.queries - 1 if self.left is None else smaller(cols - (self.offset - self.left), self.queries - 1)
        return first, last

    def visible(self, at: Pairs) -> Array:
        """True where a pair's query sees its key."""
        first, last = self.key_bounds(at.i)
        seen = at.j <= last
        if self.left is not None:
            seen = seen & (at.j >= first)
        if self.q_lengths is not None or not self.banded:
            seen = seen & (at.i < self.queries)
        if self.q_segments is not None:
            seen = seen & (self.q_segments == self.kv_segments)
        if self.mask is not None:
            seen = seen & self.mask
        if self.mask_fn is not None:
            seen = seen & self.mask_fn(*self._arguments(at), *self.seen_by_mask_fn)
        return seen

    @property
    def seen_by_mask_fn(self) -> list[Any]:
        """What mask_fn reads of mask_args."""
        return [table.seen_by_mask_fn(x) for table, x in zip(self.mask_tables, self.mask_args, strict=True)]

    # ------------------------------------------------------------------------------------------- what is its logit?

    @property
    def plain(self) -> bool:
        """True where the logit is just scale * qk with an ordinary scale, which then costs nothing an element."""
        return LEAST_UNIT <= self.scale <= MOST_UNIT and self.softcap is None and self.bias is None and self.score_fn is None

    @property
    def unit(self) -> float:
        """What one unit of logit() is in natural units."""
        return self.scale if self.plain else 1.0

    @property
    def slope(self) -> float:
        """What one unit of logit() is in base-2 units."""
        return self.unit * LOG2E

    def operands(self, qk: Array, at: Pairs) -> Operands:
        """All that the logits of a tile depend on, from the raw product qk."""
        values = [jnp.broadcast_to(value, qk.shape) for _, _, value in self.lookups(qk, at)]
        bias = None if self.bias is None else jnp.broadcast_to(self.bias.astype(qk.dtype), qk.shape)
        return Operands(qk, bias, tuple(values))

    def logit(self, operands: Operands, at: Pairs) -> Array:
        """The logit of each pair in multiples of `unit`."""
        if self.plain:
            return operands.qk
        if self.softcap is None:
            s = operands.qk * self.scale
        else:
            s = self.softcap * jnp.tanh(operands.qk * (self.scale / self.softcap))
        if operands.bias is not None:
            s = s + operands.bias
        if self.score_fn is not None:
            values = iter(operands.values)
            read = lambda arg, index: next(values) if self.differentiable_args[arg] else self.args[arg][index]
            s = self._apply_score_fn(s, at, read)
        return s

    def lookups(self, qk: Array, at: Pairs) -> list[tuple[int, Array | int, Array]]:
        """What score_fn reads of its floating-point arrays, in order: (which, index into it, flattened, and the value).

        Values have the dtype of qk, whatever the array's, and so have their cotangents: those are summed in it.
        """
        if not any(self.differentiable_args):
            return []
        found = []

        def read(arg, index):
            value = self.args[arg][index]
            if self.differentiable_args[arg]:
                value = value.astype(qk.dtype)
                found.append((arg, index, value))
            return value

        self._apply_score_fn(qk, at, read)
        return found

    @property
    def differentiable_args(self) -> tuple[bool, ...]:
        return tuple(jnp.issubdtype(arg.dtype, jnp.floating) for arg in self.args)

    @property
    def floating_args(self) -> tuple[Any, ...]:
        """`args`, None in place of integers."""
        return tuple(arg if yes else None for arg, yes in zip(self.args, self.differentiable_args, strict=True))

    def _apply_score_fn(self, s: Array, at: Pairs, read: Callable[[int, Array | int], Array]) -> Array:
        """score_fn(s, b, h, i, j, *args), i and j being positions; read(arg, index) gives what an array holds."""
        assert self.score_fn
        reads = [lambda index, arg=arg: read(arg, index) for arg in range(len(self.arg_shapes))]
        args = _tables(self.arg_shapes, reads)
        return self.score_fn(s, *self._arguments(at), *args)

    def _arguments(self, at: Pairs) -> Pairs:
        """What a function is told of its pairs: batch element and head of the whole, and positions."""
        b, h = (at.b, at.h) if self.first is None else (at.b + self.first[0], at.h + self.first[1])
        return Pairs(b, h, at.i + self.offset, at.j)

    # ------------------------------------------------------------------------------------------- is it kept?

    def kept(self, at: Pairs) -> Array | None:
        """True where dropout keeps a probability; None where it keeps all."""
        return None if self.dropout_keys is None else dropout.keep(self.dropout_keys, at.i, at.j, self.dropout_rate)

    @property
    def upscale(self) -> float:
        """What a probability that is kept is multiplied by."""
        return 1 / (1 - self.dropout_rate)


# Where the scale is folded into the exponent, products of it must be ordinary numbers of float32: scales that are 0,
# negative, or of the size of what is to be scaled, multiply each logit.
LEAST_UNIT, MOST_UNIT = 2.0**-60, 2.0**20

ONE_FOR_EACH = ("q_offset", "q_lengths", "kv_lengths")  # the leaves with one number for each batch element
PAIRWISE = ("mask", "bias")  # those with one for each pair
WITH_GRADIENTS = ("bias", "sinks", "args")  # those that have gradients, where they are floats
OF_VISIBILITY = (*ONE_FOR_EACH, "q_segments", "kv_segments", "visits", "mask", "mask_args", "first")  # what visible() reads
LEAVES = tuple(field.name for field in dataclasses.fields(Score) if not field.metadata.get("static"))


def _tables(shapes: Sequence[tuple[int, ...]], reads: Sequence[Callable]) -> list[Any]:
    """What score_fn sees of its arrays: a number of those without dimensions, a Table of the others."""
    return [Table(shape, read) if shape else read(0) for shape, read in zip(shapes, reads, strict=True)]


def on_arrays(score_fn: ScoreFn, shapes: Sequence[tuple[int, ...]]) -> ScoreFn:
    """score_fn as a function of its arrays, flattened. What it reads of floating-point ones has the dtype of the logits."""

    def fn(s, b, h, i, j, *args):
        args = [x.astype(s.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
        return score_fn(s, b, h, i, j, *_tables(shapes, [x.__getitem__ for x in args]))

    return fn


def mask_on_arrays(mask_fn: MaskFn, arrays: Sequence[Array]) -> MaskFn:
    """mask_fn as a function of flattened arrays like these."""
    tables = list(map(MaskTable.of, arrays))

    def fn(b, h, i, j, *args):
        return mask_fn(b, h, i, j, *(table.seen_by_mask_fn(x) for table, x in zip(tables, args, strict=True)))

    return fn
