"""Functions and their derivatives, which are linear maps of tangents, as a primitive of JAX.

Forward mode applies such a map, reverse mode transposes it. jax.custom_vjp has no forward mode;
jax.custom_derivatives.linear_call has neither jax.vmap nor a derivative; and the rule of a jax.custom_jvp is forgotten where
JAX 0.10 takes the gradient of a jax.lax.scan, so that a derivative of that gradient does not find it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


class Map(Protocol):
    """A linear map of a tree of tangents, which also depends on a tree of residuals. Hashable.

    None in place of a tangent stands for zero, and costs nothing. Which ones are None is part of the map's structure.
    """

    def like(self, residuals: Any) -> Any:
        """The tree of results, each of them by a residual. Of residuals it knows dtypes alone."""
        ...

    def apply(self, residuals: Any, tangents: Any) -> Any:
        """The results, as in like()."""
        ...

    def transpose(self, residuals: Any, cotangents: Any, asked: Any) -> Any:
        """The cotangents of the tangents from those of the results.

        `asked` is the tree of tangents. There may be None for zero, and cotangents of more than what is asked for.
        """
        ...

    def derivative(self, residuals: Any, tangents: Any, results: Any) -> tuple[Map, Any]:
        """(map, its residuals): the derivative of apply() by the residuals, a map of a tree of their tangents.

        Puts together its arguments in another tree, and does not look at them. The map has results like these, or None in
        place of one that is zero.
        """
        ...

    def named(self, results: Any) -> Any:
        """The results, where derivatives are taken: with names for policies of jax.checkpoint."""
        return results


class Function(Map, Protocol):
    """A map of no tangents is a function of its residuals. What it has are derivatives."""

    def apply(self, residuals: Any, tangents: tuple[()] = ()) -> Any: ...

    def transpose(self, residuals: Any, cotangents: Any, asked: tuple[()]) -> tuple[()]:
        return ()


def call(function: Function, *residuals: Any) -> Any:
    """function.apply(residuals), differentiable."""
    return linear(function, residuals, ())


def linear(of: Map, residuals: Any, tangents: Any) -> Any:
    """of.apply(residuals, tangents), differentiable."""
    known, moving = jax.tree.flatten(residuals), jax.tree.flatten(tangents)
    results = _bind(_Call(of, known[1], moving[1]), *known[0], *moving[0])
    return jax.tree.unflatten(jax.tree.structure(of.like(residuals)), results)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for one of the flat arrays."""

    n: int
    dtype: Any


@dataclasses.dataclass(frozen=True)
class _Call:
    """A map as a function of flat arrays, first residuals, then tangents."""

    of: Map
    residuals: Any  # the structures of the trees
    tangents: Any
    vmaps: tuple[tuple[bool, ...], ...] = ()  # of each jax.vmap, the innermost first: which residuals are mapped

    def split(self, arrays: Any) -> tuple[tuple, tuple]:
        """(residuals, the rest), flat."""
        return tuple(arrays[: self.residuals.num_leaves]), tuple(arrays[self.residuals.num_leaves :])

    def places(self, arrays: Any) -> Any:
        """The tree of residuals with their places among the arrays."""
        return self.residuals.unflatten([_Place(n, x.dtype) for n, x in enumerate(self.split(arrays)[0])])

    def mapped(self, fn: Callable, *arrays: Array) -> list[Array]:
        """fn(residuals, the rest), flat, under each jax.vmap, in which all but residuals are mapped."""
        of_arrays = lambda *arrays: fn(*self.split(arrays))
        for mapped in self.vmaps:
            of_arrays = jax.vmap(of_arrays, in_axes=[0 if yes else None for yes in mapped] + [0] * (len(arrays) - len(mapped)))
        return of_arrays(*arrays)

    def run(self, *arrays: Array) -> list[Array]:
        apply = lambda *flat: self.of.apply(self.residuals.unflatten(flat[0]), self.tangents.unflatten(flat[1]))
        return self.mapped(lambda *flat: jax.tree.leaves(apply(*flat)), *arrays)

    def widened(self, x: Array, n: int, lead: tuple[int, ...]) -> Array:
        """A residual, or its tangent, with all axes of jax.vmap, whose sizes are `lead`."""
        missing = [axis for axis, mapped in enumerate(reversed(self.vmaps)) if not mapped[n]]
        own = x.shape[len(self.vmaps) - len(missing) :]
        return jnp.broadcast_to(jnp.expand_dims(x, missing), (*lead, *own)) if missing else x


linear_p = Primitive("jflash_linear")
linear_p.multiple_results = True


def _bind(call: _Call, *arrays: Array) -> list[Array]:
    """The results. The map's program goes along, as in other primitives that hold one: JAX looks into it."""
    program = jax.make_jaxpr(call.run)(*map(jax.typeof, arrays))
    return linear_p.bind(*arrays, call=call, program=program)


def _run(*arrays: Array, call: _Call, program: Any):
    return jaxpr_as_fun(program)(*arrays)


@linear_p.def_impl
def _impl(*arrays: Array, call: _Call, program: Any):
    with jax.disable_jit(False):  # else the jitted primitive would be this function again
        return _jitted(call)(*arrays)


@functools.lru_cache(maxsize=64)
def _jitted(call: _Call) -> Callable:
    return jax.jit(functools.partial(_bind, call))


def forget_programs() -> None:
    """Forgets what calls outside of jax.jit were compiled to."""
    _jitted.cache_clear()


@linear_p.def_abstract_eval
def _abstract_eval(*avals, call: _Call, program: Any):
    return program.out_avals


def _batch(arrays, axes, *, call: _Call, program: Any):
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    first = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    (residuals, tangents), (of_residuals, of_tangents) = call.split(first), call.split(axes)
    # All tangents are mapped, so that a transposed map need not sum: the transposed broadcast does.
    widen = lambda x, axis: jnp.broadcast_to(x, (size, *x.shape)) if axis is None else x
    tangents = map(widen, tangents, of_tangents)
    mapped = tuple(axis is not None for axis in of_residuals)
    results = _bind(dataclasses.replace(call, vmaps=(*call.vmaps, mapped)), *residuals, *tangents)
    return results, [0] * len(results)


def _jvp(primals, tangents, *, call: _Call, program: Any):
    results = linear_p.bind(*primals, call=call, program=program)
    at_residuals = call.places(primals)
    structure = jax.tree.structure(call.of.like(at_residuals))
    results = jax.tree.leaves(call.of.named(structure.unflatten(results)))
    residuals, _ = call.split(primals)
    of_residuals, of_moving = ([None if isinstance(t, ad.Zero) else t for t in part] for part in call.split(tangents))
    sums: list[Any] = [None] * len(results)

    def add(terms):
        terms = structure.flatten_up_to(terms)
        sums[:] = [y if x is None else x if y is None else x + y for x, y in zip(sums, terms, strict=True)]

    if there := [t for t in of_moving if t is not None]:
        moving_tree = jax.tree.structure(call.tangents.unflatten(of_moving))
        add(structure.unflatten(_bind(dataclasses.replace(call, tangents=moving_tree), *residuals, *there)))
    if any(t is not None for t in of_residuals):
        # Everything is put together as places in this list, for their arrays and for which of these are mapped.
        everything, known = (*primals, *results), len(residuals)
        place = [_Place(n, x.dtype) for n, x in enumerate(everything)]
        rest = call.tangents.unflatten(place[known : len(primals)]), structure.unflatten(place[len(primals) :])
        derivative, of_places = call.of.derivative(at_residuals, *rest)
        places, tree = jax.tree.flatten(of_places)
        vmaps = tuple(tuple(x.n >= known or mapped[x.n] for x in places) for mapped in call.vmaps)
        lead = results[0].shape[: len(call.vmaps)]
        changes = [None if t is None else call.widened(t, n, lead) for n, t in enumerate(of_residuals)]
        changes, changes_tree = jax.tree.flatten(call.residuals.unflatten(changes))
        arrays = [everything[x.n] for x in places]
        terms = _bind(_Call(derivative, tree, changes_tree, vmaps), *arrays, *changes)
        add(jax.tree.unflatten(jax.tree.structure(derivative.like(of_places)), terms))
    zero = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return results, [z if total is None else total for total, z in zip(sums, zero, strict=True)]


def _transpose(cotangents, *arrays, call: _Call, program: Any):
    residuals, moving = call.split(arrays)
    structure = jax.tree.structure(call.of.like(call.places(arrays)))
    asked = call.tangents.unflatten(range(len(moving)))
    there: list[int] = []  # which of the tangents have a cotangent

    def fn(residuals, cotangents):
        results = call.of.transpose(call.residuals.unflatten(residuals), structure.unflatten(cotangents), asked)
        only_asked = jax.tree.map(lambda yes, x: None if yes is None else x, asked, results, is_leaf=lambda x: x is None)
        results = call.tangents.flatten_up_to(only_asked)
        there[:] = [n for n, x in enumerate(results) if x is not None]
        return [results[n] for n in there]

    results = call.mapped(fn, *residuals, *map(ad.instantiate_zeros, cotangents))
    found = dict(zip(there, results, strict=True))
    return [*[None] * len(residuals), *(found.get(n, ad.Zero(x.aval)) for n, x in enumerate(moving))]


ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_run, multiple_results=True))


def missing(message: str, like: Any) -> Any:
    """Results typed `like` these that nobody can compute: a TypeError where a program is compiled that has them.

    Most programs that name them do not: reverse mode transposes what it needs, and leaves out what is stopped.
    """
    return jax.tree.map(lambda x: _missing_p.bind(x, message=message), like)


def _refuse(*_, message: str):
    raise TypeError(message)


_missing_p = Primitive("jflash_missing")
_missing_p.def_abstract_eval(lambda x, message: x)
_missing_p.def_impl(_refuse)
batching.defvectorized(_missing_p)
mlir.register_lowering(_missing_p, _refuse)
