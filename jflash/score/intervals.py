"""What a mask_fn hides of a whole tile: the function is interpreted on intervals of positions in place of positions.

mask_fn is traced once, for a single pair. Then each of its operations answers for all pairs of a tile together: all that
is known of an operand is from where to where it reaches, and all that comes of it is from where to where results may
reach. A bool reaches from False to True where it may be either, so what mask_fn returns says of each tile whether all of
its pairs are visible (from True to True), none (from False to False), or perhaps some.

It errs to one side only. A value is unknown, and may be anything that its dtype holds, where an integer might wrap around,
where a float might not be finite, and where an operation has no rule here. A tile of which nothing is known is visited,
and its pairs are looked at one by one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from jflash.numerics import known
from jflash.score.score import Pairs, Score

Rule = Callable[..., "Interval"]  # (*operands, **parameters of the operation)


class Interval(NamedTuple):
    """All numbers from lo to hi, both included: an interval for each tile, in arrays that broadcast to the tiles."""

    lo: Any
    hi: Any

    @classmethod
    def point(cls, x: Any) -> Interval:
        return cls(x, x)

    @property
    def dtype(self) -> np.dtype:
        return self.lo.dtype

    def where(self, condition: Any) -> Interval:
        """Unknown where the condition does not hold."""
        return _either(condition, self, _anything(self.dtype))

    def holds(self, x: Any) -> Array:
        return (self.lo <= x) & (x <= self.hi)


class Summary(NamedTuple):
    """What is known of each tile. Where neither holds, some of its pairs may be visible and others not."""

    none: Array  # no pair is visible
    all: Array  # every pair is


def positions(length: int, block: int) -> Interval:
    """The first and the last position of each tile; of one that hangs over the end, the last that is there."""
    start = jnp.arange(0, length, block, dtype=jnp.int32)
    return Interval(start, jnp.minimum(start + block, length) - 1)


def of_mask_fn(score: Score, b: Any, h: Any, rows: Interval, cols: Interval) -> Summary:
    """What mask_fn shows of the tiles rows x cols, [..., q_tiles, kv_tiles]; an axis that it does not look at is 1.

    It has an axis that mask_fn looks at where nothing is known too: pairs differ there, though what is known does not.

    `score` is that of one batch element, or of any number of them that share an offset. Queries `rows`, int32 [q_tiles],
    and keys `cols`, [kv_tiles], count from 0, as in Pairs; b and h are integers, or arrays with the leading axes. Of a tile
    without positions, lo > hi, anything may be said.
    """
    b, h = (jnp.asarray(x, jnp.int32)[..., None, None] for x in (b, h))
    first, last = (score._arguments(Pairs(b, h, i[:, None], j)) for i, j in zip(rows, cols, strict=True))
    program = _traced(score)
    (seen,) = _interpreted(program, [*map(Interval, first, last), *score.mask_args])
    _, looked_at = dce_jaxpr(program.jaxpr, [True])
    shapes = [x.shape for x, used in zip(first, looked_at, strict=False) if used]
    lo, hi = (jnp.broadcast_to(x, jnp.broadcast_shapes(x.shape, (1, 1), *shapes)) for x in seen)
    return Summary(none=~hi, all=lo)


def _traced(score: Score) -> Any:
    """The program of mask_fn for one pair; of arrays of the ranks that it was tried out on, see arguments.mask_fn."""
    mask_fn = score.mask_fn
    assert mask_fn
    pair = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (), (1, 1), (1, 1))]
    fn = lambda b, h, i, j, *args: mask_fn(b, h, i, j, *score.replace(mask_args=args).seen_by_mask_fn)
    return jax.make_jaxpr(fn)(*pair, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in score.mask_args))


# ------------------------------------------------------------------------------------------- the interpreter

# Of a variable is known an Interval, if it is one number; or all, if it is one of mask_args: Ranges; or nothing: None.


@np.errstate(over="ignore")  # of literals, which numpy adds up
def _interpreted(program: Any, operands: Sequence[Any]) -> list[Any]:
    """What is known of the results of a jaxpr, closed or not."""
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], map(_known, [*consts, *operands]), strict=True))

    def read(v: Any) -> Any:
        dtype = v.aval.dtype
        return _finite(Interval.point(np.asarray(v.val, dtype))) if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, _results(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _known(x: Any) -> Any:
    if x is None or isinstance(x, Interval | Ranges):
        return x
    if not _is_plain(x.dtype):
        return None
    if known(x.size) and x.size == 1:
        return _finite(Interval.point(jnp.reshape(x, ())))
    return Ranges(jnp.asarray(x)) if x.ndim == 1 else None


def _results(eqn: Any, operands: list[Any]) -> list[Any]:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in CALLS else None
    rule = _helper(eqn, inner) if inner else RULES.get(eqn.primitive.name)
    if inner and not rule:
        return _interpreted(inner, operands)
    one = [math.prod(v.aval.shape) == 1 and _is_plain(v.aval.dtype) for v in eqn.outvars]
    numbers = operands[rule in (_element, _look_up) :]
    if rule and all(one) and None not in operands and all(isinstance(x, Interval) for x in numbers):
        return [_finite(rule(*operands, **eqn.params))]
    return [_anything(v.aval.dtype) if is_one else None for v, is_one in zip(eqn.outvars, one, strict=True)]


def _helper(eqn: Any, program: Any) -> Rule | None:
    """The rule for what jax.numpy makes of i // n and i % n: several operations, each of which knows too little.

    Known by its name, and by being what jax.numpy makes of such operands: others may have functions of that name too.
    """
    fn, rule = HELPERS.get(eqn.params.get("name"), (None, None))
    avals, dtype = [v.aval for v in eqn.invars], eqn.outvars[0].aval.dtype
    if fn is None or not jnp.issubdtype(dtype, jnp.signedinteger) or any(x.dtype != dtype for x in avals):
        return None
    made = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals)).eqns
    return rule if len(made) == 1 and str(made[0].params.get("jaxpr")) == str(program) else None


def _is_plain(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))


def _anything(dtype: Any) -> Interval:
    """What is unknown. A float may be NaN too then, which no other interval holds."""
    ends = (False, True) if dtype == jnp.bool_ else (-np.inf, np.inf)
    if jnp.issubdtype(dtype, jnp.integer):
        ends = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return Interval(*(np.array(x, dtype) for x in ends))


def _either(condition: Any, a: Interval, b: Interval) -> Interval:
    return Interval(jnp.where(condition, a.lo, b.lo), jnp.where(condition, a.hi, b.hi))


def _finite(x: Interval) -> Interval:
    return x.where(jnp.isfinite(x.lo) & jnp.isfinite(x.hi)) if jnp.issubdtype(x.dtype, jnp.floating) else x


# ------------------------------------------------------------------------------------------- rules

NEAR = 0.99  # float32 tells whether a result fits into its dtype, if it is no nearer than this to the last that does


def _rising(f: Callable) -> Rule:
    """Of a function that never falls where an operand grows."""
    return lambda *xs, **_: Interval(f(*(x.lo for x in xs)), f(*(x.hi for x in xs)))


def _hull(f: Callable, corners: Sequence[tuple]) -> Interval:
    values = [f(*corner) for corner in corners]
    return Interval(functools.reduce(jnp.minimum, values), functools.reduce(jnp.maximum, values))


def _computed(f: Callable, corners: Sequence[tuple]) -> Interval:
    """From the least to the largest of f at corners: unknown where it wraps around, wider by what rounding may be."""
    found = _hull(f, corners)
    if jnp.issubdtype(found.dtype, jnp.floating):
        return _rounded(found)
    if not jnp.issubdtype(found.dtype, jnp.signedinteger):
        return found.where(False)
    sizes = [jnp.abs(f(*(x.astype(jnp.float32) for x in corner))) for corner in corners]
    return found.where(functools.reduce(jnp.maximum, sizes) < NEAR * jnp.iinfo(found.dtype).max)


def _rounded(x: Interval) -> Interval:
    """Wider by what compilers may do otherwise: fuse a product and a sum, divide roughly, flush what is tiny to zero."""
    limits = jnp.finfo(x.dtype)
    if limits.bits < 32:  # compilers may leave out the rounding to it
        return x.where(False)
    lower, upper = (jnp.abs(end) * (8 * float(limits.eps)) + float(limits.tiny) for end in x)
    return Interval(x.lo - lower, x.hi + upper)


def _add(a: Interval, b: Interval, **_) -> Interval:
    return _computed(jnp.add, [(a.lo, b.lo), (a.hi, b.hi)])


def _negative(x: Interval, **_) -> Interval:
    return Interval(-x.hi, -x.lo).where(x.lo > _anything(x.dtype).lo)


def _abs(x: Interval, **_) -> Interval:
    least = jnp.maximum(jnp.maximum(x.lo, -x.hi), jnp.zeros_like(x.lo))
    return Interval(least, jnp.maximum(-x.lo, x.hi)).where(x.lo > _anything(x.dtype).lo)


def _multiply(a: Interval, b: Interval, **_) -> Interval:
    return _power(a, 2) if a is b else _computed(jnp.multiply, list(itertools.product(a, b)))


def _power(x: Interval, y: int, **_) -> Interval:
    if not 1 <= y <= 4:
        return x.where(False)
    x = x if y % 2 else _abs(x)
    return _computed(lambda end: lax.integer_pow(end, y), [(x.lo,), (x.hi,)])


def _divided(f: Callable) -> Rule:
    """Of a division, by numbers that are all positive or all negative."""
    broadcasting = lambda *xs: f(*jnp.broadcast_arrays(*xs))
    return lambda a, b, **_: _computed(broadcasting, list(itertools.product(a, b))).where(~b.holds(0))


def _modulo(f: Callable, divided: Rule, anywhere: Callable[[Interval, Interval], Interval]) -> Rule:
    """Of what a division leaves: it rises as long as the quotient stays the same, else it may be `anywhere`."""

    def rule(a: Interval, b: Interval, **_) -> Interval:
        if jnp.issubdtype(a.dtype, jnp.floating):
            return a.where(False)
        turns = divided(a, b)
        within = Interval(*(f(*jnp.broadcast_arrays(end, b.lo)) for end in a))
        return _either((turns.lo == turns.hi) & (b.lo == b.hi), within, anywhere(a, b)).where(~b.holds(0))

    return rule


def _with_sign_of_b(a: Interval, b: Interval) -> Interval:
    most = jnp.where(a.lo >= 0, jnp.minimum(a.hi, b.hi - 1), b.hi - 1)
    return Interval(jnp.where(b.lo > 0, 0, b.lo + 1), jnp.where(b.lo > 0, most, 0))


def _with_sign_of_a(a: Interval, b: Interval) -> Interval:
    most = jnp.maximum(b.hi - 1, ~b.lo)
    return Interval(jnp.where(a.lo < 0, jnp.maximum(a.lo, -most), 0), jnp.where(a.hi > 0, jnp.minimum(a.hi, most), 0))


_floor_divide = _divided(jnp.floor_divide)
_remainder = _modulo(jnp.remainder, _floor_divide, _with_sign_of_b)


def _not(x: Interval, **_) -> Interval:
    return Interval(~x.hi, ~x.lo)


def _bitwise(f: Callable, on_bools: Rule) -> Rule:
    """Of bits: above the highest one in which the ends of an interval differ, all that lies between has the same."""

    def rule(a: Interval, b: Interval, **_) -> Interval:
        if a.dtype == jnp.bool_:
            return on_bools(a, b)
        free = (a.lo ^ a.hi) | (b.lo ^ b.hi)
        for n in range(jnp.iinfo(free.dtype).bits.bit_length() - 1):
            free = free | (free >> 2**n)
        common = f(a.lo, b.lo) & ~free
        return Interval(common, common | free).where(free >= 0)

    return rule


def _and(a: Interval, b: Interval, **_) -> Interval:
    x, mask = (b, a) if isinstance(a.lo, np.ndarray) else (a, b)
    if x.dtype != jnp.bool_ and isinstance(mask.lo, np.ndarray):  # a literal
        modulus = int(mask.lo) + 1
        if 0 < modulus <= jnp.iinfo(x.dtype).max and modulus & (modulus - 1) == 0:
            return _remainder(x, Interval.point(np.array(modulus, x.dtype)))  # i & 7 is i % 8
    return _bitwise(jnp.bitwise_and, _rising(jnp.bitwise_and))(a, b)


def _shifted_left(x: Interval, by: Interval, **_) -> Interval:
    factor = Interval(*(jnp.left_shift(jnp.ones_like(n), n) for n in by))
    return _multiply(x, factor).where((by.lo >= 0) & (by.hi < jnp.iinfo(x.dtype).bits - 1))


def _shifted_right(f: Callable, least: int | None) -> Rule:
    def rule(x: Interval, by: Interval, **_) -> Interval:
        found = _hull(lambda *xs: f(*jnp.broadcast_arrays(*xs)), list(itertools.product(x, by)))
        sound = (by.lo >= 0) & (by.hi < jnp.iinfo(x.dtype).bits)
        return found.where(sound if least is None else sound & (x.lo >= least))

    return rule


def _less(a: Interval, b: Interval, **_) -> Interval:
    return Interval(a.hi < b.lo, a.lo < b.hi)


def _less_equal(a: Interval, b: Interval, **_) -> Interval:
    return Interval(a.hi <= b.lo, a.lo <= b.hi)


def _equal(a: Interval, b: Interval, **_) -> Interval:
    return Interval((a.lo == b.hi) & (a.hi == b.lo), (a.lo <= b.hi) & (b.lo <= a.hi))


def _differs(a: Interval, b: Interval, **_) -> Interval:
    return _not(_equal(a, b))


def _select(which: Interval, *cases: Interval, **_) -> Interval:
    least, most = _anything(cases[0].dtype)
    reached = [(which.holds(np.array(n, which.dtype)), case) for n, case in enumerate(cases)]
    lo = functools.reduce(jnp.minimum, [jnp.where(may, case.lo, most) for may, case in reached])
    return Interval(lo, functools.reduce(jnp.maximum, [jnp.where(may, case.hi, least) for may, case in reached]))


def _converted(x: Interval, new_dtype: Any, **_) -> Interval:
    if new_dtype == jnp.bool_:
        return _differs(x, Interval.point(np.zeros((), x.dtype)))
    found = _rising(lambda end: end.astype(new_dtype))(x)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if jnp.issubdtype(new_dtype, jnp.floating):
        bits = jnp.finfo(new_dtype).bits
        exact = bits >= 32 and not (floating and jnp.finfo(x.dtype).bits > bits)  # of integers, all agree on the nearest
        return found if exact else _rounded(found)
    if not floating and np.can_cast(x.dtype, new_dtype):
        return found
    least, most = (float(end) * NEAR for end in _anything(new_dtype))
    return found.where((x.lo.astype(jnp.float32) >= least) & (x.hi.astype(jnp.float32) <= most))


# ------------------------------------------------------------------------------------------- tables


class Ranges:
    """A table, of which is asked from where to where what it holds in a range of indices reaches."""

    def __init__(self, x: Any):
        self.x = x

    def reach(self, first: Any, last: Any) -> Interval:
        """A range takes about two nodes of each height: those at its ends, and then those above what lies between."""
        if not known(self.x.size):  # jax.export: as many as batch elements
            return _either(first == last, Interval.point(self.x[first]), Interval(self.x.min(), self.x.max()))
        tree, leaves = self._tree, self._tree.shape[1] // 2
        node = lambda n: jnp.take(tree, n, axis=1, mode="clip")

        def climb(state):
            first, last, least = state
            lower = jnp.minimum(least, jnp.minimum(node(first), node(last)))
            return (first + 1) >> 1, (last - 1) >> 1, jnp.where(first <= last, lower, least)

        state = first + leaves, last + leaves, node(first + leaves)
        least, most = lax.while_loop(lambda state: (state[0] <= state[1]).any(), climb, state)[2]
        return Interval(least, _reversed(most))

    @functools.cached_property
    def _tree(self) -> Array:
        """The minimum of each subtree, of the table and of what orders it the other way: node n is above 2n and 2n + 1.

        From the leaves up, always all of a level and something before it, which the next levels overwrite.
        """
        depth = (self.x.size - 1).bit_length()
        leaves = jnp.pad(self.x, (0, 2**depth - self.x.size), mode="edge")
        leaves = jnp.stack([leaves, _reversed(leaves)])

        def put(n, state):
            level, tree = state
            half = jnp.minimum(level[:, ::2], level[:, 1::2])
            level = jnp.concatenate([half, half], axis=1)
            return level, lax.dynamic_update_slice_in_dim(tree, level, 2**depth >> n, axis=1)

        return lax.fori_loop(0, depth, put, (leaves, jnp.tile(leaves, 3)))[1][:, 2**depth :]


def _reversed(x: Array) -> Array:
    return -x if jnp.issubdtype(x.dtype, jnp.floating) else ~x


def _element(table: Any, start_indices: tuple[int, ...], **_) -> Interval:
    return table if isinstance(table, Interval) else Interval.point(table.x[start_indices[0]])


def _look_up(table: Any, *indices: Interval, **_) -> Interval:
    if isinstance(table, Interval):  # of one element
        return table
    (index,) = indices
    count = table.x.shape[0]
    first, last = (jnp.clip(end, 0, count - 1) for end in jnp.broadcast_arrays(*_converted(index, jnp.dtype(jnp.int32))))
    return table.reach(first, last).where((index.lo >= 0) & (index.hi < count))


# ------------------------------------------------------------------------------------------- which rule is whose

_same: Rule = lambda x, **_: x

RULES: dict[str, Rule] = {
    "add": _add,
    "sub": lambda a, b, **_: _add(a, _negative(b)),
    "mul": _multiply,
    "square": lambda x, **_: _power(x, 2),
    "integer_pow": _power,
    "neg": _negative,
    "abs": _abs,
    "sign": lambda x, **_: _rising(jnp.sign)(x).where(jnp.isfinite(x.lo)),
    "sqrt": lambda x, **_: _computed(jnp.sqrt, [(x.lo,), (x.hi,)]),
    "div": _divided(lax.div),
    "rem": _modulo(lax.rem, _divided(lax.div), _with_sign_of_a),
    "max": _rising(jnp.maximum),
    "min": _rising(jnp.minimum),
    "clamp": _rising(lambda least, x, most: jnp.minimum(jnp.maximum(x, least), most)),
    "floor": _rising(jnp.floor),
    "ceil": _rising(jnp.ceil),
    "lt": _less,
    "le": _less_equal,
    "gt": lambda a, b, **_: _less(b, a),
    "ge": lambda a, b, **_: _less_equal(b, a),
    "eq": _equal,
    "ne": _differs,
    "not": _not,
    "and": _and,
    "or": _bitwise(jnp.bitwise_or, _rising(jnp.bitwise_or)),
    "xor": _bitwise(jnp.bitwise_xor, _differs),
    "shift_left": _shifted_left,
    "shift_right_arithmetic": _shifted_right(lax.shift_right_arithmetic, None),
    "shift_right_logical": _shifted_right(lax.shift_right_logical, 0),
    "select_n": _select,
    "convert_element_type": _converted,
    "slice": _element,
    "dynamic_slice": _look_up,
    "gather": _look_up,
    "dim_as_value": lambda dim, **_: Interval.point(jnp.asarray(dim)),  # of jax.export
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "copy"), _same),
}
HELPERS = {"floor_divide": (jnp.floor_divide, _floor_divide), "remainder": (jnp.remainder, _remainder)}
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
