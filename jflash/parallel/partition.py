"""Attention on many devices: each computes its part of the batch and of the heads, and nothing moves between them.

The compiler decides how arrays are sharded after JAX has traced the program, and asks jax.custom_partitioning for the part
of one device then. What the parts have to exchange are sums that belong to the mathematics: gradients of what several of
them read, a bias that is broadcast over a sharded batch, a sink, a kv head whose query heads are apart.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jflash.derivatives import Engine, Tangents
from jflash.numerics import accumulator
from jflash.parallel.primitive import Call, attend_p, no_mesh
from jflash.parallel.shardings import Cut
from jflash.score.score import Score
from jflash.shapes import K, O, PerQuery, Q, V
from jflash.tile import Norm


@dataclasses.dataclass(frozen=True)
class Everywhere:
    """The engine of attention(): one of two by the platform, on one device or many, under any jax.vmap."""

    gpu: Engine  # for NVIDIA GPUs
    elsewhere: Engine

    def for_parts(self) -> Everywhere:
        return Everywhere(self.gpu.for_parts(), self.elsewhere.for_parts())

    def result_dtype(self, dtype):
        return self.elsewhere.result_dtype(dtype)

    def forward(self, q: Q, k: K, v: V, score: Score) -> tuple[O, Norm]:
        o, *norm = self._call("forward", q, k, v, score)
        return o, Norm(*norm)

    def tangent(self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, tangents: Tangents) -> tuple[O, PerQuery]:
        ot, lset = self._call("tangent", q, k, v, score, o, norm, tangents)
        return ot, lset

    def backward(
        self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery
    ) -> tuple[Q | None, K | None, V | None, Score]:
        return self._call("backward", q, k, v, score, o, norm, do, dlse)

    def backward_tangent(
        self, q: Q, k: K, v: V, score: Score, o: O, norm: Norm, do: O, dlse: PerQuery, tangents: Tangents
    ) -> tuple[Q | None, K | None, V | None, Score]:
        return self._call("backward_tangent", q, k, v, score, o, norm, do, dlse, tangents)

    def _call(self, method: str, *arguments: Any) -> Any:
        """The results; of a method that gives gradients (dq, dk, dv, dscore)."""
        call = Call.of(method, self.gpu, self.elsewhere, *arguments)
        results = _batchable(call)(*jax.tree.leaves(arguments))
        if not call.wanted:
            return results
        gradients = dict(zip(call.wanted, results, strict=True))
        dq, dk, dv, dscore, *_ = jax.tree.map(gradients.get, call.tree.unflatten(range(len(call.dims))))
        return dq, dk, dv, dscore


def _batchable(call: Call):
    """The call with its rule for jax.vmap, which keeps unmapped arrays as they are: each engine maps itself over the rest."""
    context = jax.sharding.get_abstract_mesh()
    bind = functools.partial(attend_p.bind, call=call)
    call_one = custom_vmap(_partitioned(call, context, bind) if _compiler_may_cut(context) else bind)

    @call_one.def_vmap
    def rule(axis_size: int, mapped: list[bool], *arrays: Array):
        results = _batchable(call.vmapped(mapped))(*arrays)
        return results, [True] * len(results)

    return call_one


def _compiler_may_cut(mesh: AbstractMesh) -> bool:
    """Whether arrays may be sharded behind our back: not on one device, nor where shard_map has cut them already."""
    if mesh.empty:
        return True
    rest = [name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in mesh.manual_axes]
    if rest and mesh.manual_axes:
        raise ValueError(
            f"jflash.attention inside jax.shard_map needs all axes of the mesh to be manual, got {mesh.manual_axes} with "
            f"{tuple(rest)} left to the compiler: give axis_names with all of them, or none"
        )
    return bool(rest)


def _partitioned(call: Call, context: AbstractMesh, bind):
    """bind with its rules for the compiler. They close over the call: JAX keeps tracers in place of static arguments."""
    of_this = lambda rule: functools.partial(rule, call, context)
    partitioned = custom_partitioning(bind)
    partitioned.def_partition(
        of_this(_partition), infer_sharding_from_operands=of_this(_infer), sharding_rule=of_this(_sharding_rule)
    )
    return partitioned


def _sharding_rule(call: Call, context: AbstractMesh, mesh: Mesh, arguments, results) -> str:
    """What Shardy may conclude from one array about another: of batch, heads and mapped axes, and of nothing else.

    Each array's length or width is a dimension of its own, so that one which is cut arrives here as it is and is refused.
    """
    count = itertools.count()
    words = lambda text: " ".join(dim if dim[0] in "bhgn" else f"w{next(count)}" for dim in text.split())
    return " -> ".join(", ".join(map(words, side)) for side in (call.dims, call.result_dims))


def _cut(call: Call, mesh: Mesh | AbstractMesh, arguments) -> Cut:
    if mesh.empty:
        raise ValueError("jflash.attention on many devices needs a jax.sharding.NamedSharding of its arrays, or jax.set_mesh")
    specs = [x.sharding.spec if isinstance(x.sharding, NamedSharding) else None for x in arguments]
    return Cut.of(call.names, call.dims, [(x.shape, spec) for x, spec in zip(arguments, specs, strict=True)], mesh.shape)


def _infer(call: Call, context: AbstractMesh, mesh: Mesh, arguments, results) -> Sequence[Sharding]:
    """What GSPMD asks instead of a rule. An exception here would end the process: what _partition refuses is whole here."""
    names = context if mesh.empty else mesh
    whole = [SingleDeviceSharding(jax.devices()[0])] * len(call.result_dims)  # its HLO is that of a replicated array
    try:
        cut = _cut(call, names, arguments)
    except ValueError:
        return whole
    return [NamedSharding(names, cut.spec(text)) for text in call.result_dims]


def _partition(call: Call, context: AbstractMesh, mesh: Mesh, arguments, results):
    """(mesh, the program of one part, how its results and its arguments are sharded)

    `mesh` has the names of the shardings in the program; where there are none, those of the context do as well.
    """
    names = context if mesh.empty else mesh
    cut = _cut(call, names, arguments)
    sharded = lambda dims: [NamedSharding(names, cut.spec(text)) for text in dims]
    return names, functools.partial(_part, call, cut, names), sharded(call.result_dims), tuple(sharded(call.dims))


def _part(call: Call, cut: Cut, mesh: Mesh | AbstractMesh, *arrays: Array) -> list[Array]:
    """What one device computes from its part of each array."""
    index = lambda dim: lax.axis_index(cut.axes[dim]) if cut.axes.get(dim) else jnp.int32(0)
    flat: Any = arrays
    with no_mesh(mesh.abstract_mesh):
        q, k, v, score, *rest = call.tree.unflatten(flat)
        heads, kv_heads = q.shape[-2], k.shape[-2]
        first = index("b") * q.shape[-4], index("h") * heads
        here: Call = call
        own: Any = None  # the kv head of this part, where others have it too
        if score.mask_fn is not None or score.score_fn is not None:
            here, score = call.with_first(), score.replace(first=jnp.stack(first))
        one_of_many = cut.group_parts > 1
        flat = jax.tree.leaves((q, k, v, score, *rest))
        if one_of_many:  # all query heads of this part read the same kv head
            own = first[1] // (heads * cut.group_parts // kv_heads) - index("g") * kv_heads
            its = lambda x: lax.dynamic_slice_in_dim(x, own, 1, axis=-2)
            flat = [its(x) if "g" in dims.split() else x for x, dims in zip(flat, here.dims, strict=True)]
        results = attend_p.bind(*flat, call=here)
        for n, dims in enumerate(call.dims[primal] for primal in call.wanted):
            if one_of_many and "g" in dims.split():
                zeros = jnp.zeros((*results[n].shape[:-2], kv_heads, results[n].shape[-1]), results[n].dtype)
                results[n] = lax.dynamic_update_slice_in_dim(zeros, results[n], own, axis=-2)
            results[n] = _sum(results[n], cut.summed(dims))
    return results


def _sum(x: Array, axes: tuple[str, ...]) -> Array:
    """The sum of what each part adds to a gradient, in float32 at least."""
    return lax.psum(x.astype(accumulator(x.dtype)), axes).astype(x.dtype) if axes else x
