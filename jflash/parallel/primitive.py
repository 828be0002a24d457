"""A method of an engine as a JAX primitive: the platform that a program is lowered for chooses the engine.

An engine is ordinary JAX and could be traced where attention() is called. But where a program is lowered for several
platforms at once (jax.export), only a primitive has rules of which each is run for its own platform; and a primitive says
how its results are sharded, whatever its engine is made of.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jflash.derivatives import Engine, Tangents
from jflash.kernels import Triton
from jflash.numerics import accumulator
from jflash.parallel.shardings import Cut
from jflash.score.score import ONE_FOR_EACH, PAIRWISE, WITH_GRADIENTS, Score
from jflash.tile import Norm

# The arguments of an engine and their dimensions, see Call; a Score has those of its leaves.
_OF_SCORE: Any = None
_X = {"q": "b i h d", "k": "b j g d", "v": "b j g e", "score": _OF_SCORE}
_KNOWN = {"o": "b i h e", "norm": Norm("b h i", "b h i")}
_COTANGENTS = {"do": "b i h e", "dlse": "b h i"}
_TANGENTS = {"tangents": Tangents(*_X.values(), o="b i h e", lse="b h i", do="b i h e", dlse="b h i")}
ARGUMENTS = {
    "forward": _X,
    "tangent": _X | _KNOWN | _TANGENTS,
    "backward": _X | _KNOWN | _COTANGENTS,
    "backward_tangent": _X | _KNOWN | _COTANGENTS | _TANGENTS,
}
# The results of those that are not gradients.
RESULTS = {"forward": ("b i h e", "b h i", "b h i"), "tangent": ("b i h e", "b h i")}


@dataclasses.dataclass(frozen=True)
class Call:
    """A method of an engine as a function of flat arrays, and what their dimensions mean.

    A dimension is a word: b, i, j are batch, q_len and kv_len, h and g heads and kv_heads (h too where these are equal), d
    and e head_dim and v_dim; in front of them n0, n1, ... are the axes of each jax.vmap, the innermost being n0; "." is
    one that is never cut.
    """

    method: str  # one of ARGUMENTS
    gpu: Engine  # for NVIDIA GPUs
    elsewhere: Engine
    tree: Any  # of the engine's arguments
    dims: tuple[str, ...]  # of each array
    wanted: tuple[int, ...]  # of methods that give gradients: which arrays they give those of
    vmaps: int = 0

    @classmethod
    def of(cls, method: str, gpu: Engine, elsewhere: Engine, *arguments: Any) -> Call:
        """The call of a method with these arguments."""
        arrays, tree = jax.tree.flatten(arguments)
        q, k, v, score, *_ = tree.unflatten(range(len(arrays)))
        grouped = arrays[q].shape[2] != arrays[k].shape[2]
        dims = jax.tree.leaves(list(map(_dims, ARGUMENTS[method].values(), arguments)))
        named = {"q": q, "k": k, "v": v} | {name: getattr(score, name) for name in WITH_GRADIENTS}
        asked_for = jax.tree.leaves([named[name] for name in named if name not in score.unasked])
        return cls(
            method, gpu, elsewhere, tree,
            dims=tuple(text if grouped else text.replace("g", "h") for text in dims),
            wanted=() if method in RESULTS else tuple(n for n in asked_for if jnp.issubdtype(arrays[n].dtype, jnp.floating)),
        )  # fmt: skip

    def vmapped(self, mapped: list[bool]) -> Call:
        """The call of one more leading axis, which the arrays have that are `mapped`."""
        axis = f"n{self.vmaps} "
        dims = tuple(axis + text if yes else text for text, yes in zip(self.dims, mapped, strict=True))
        return dataclasses.replace(self, dims=dims, vmaps=self.vmaps + 1)

    def with_first(self) -> Call:
        """The call of a part of a sharded whole, whose Score says which batch element and head come first in it."""
        q, k, v, score, *rest = self.tree.unflatten(range(len(self.dims)))
        before, tree = jax.tree.flatten((q, k, v, score.replace(first=-1), *rest))
        dims = tuple("." if n < 0 else self.dims[n] for n in before)
        return dataclasses.replace(self, tree=tree, dims=dims, wanted=tuple(before.index(n) for n in self.wanted))

    @property
    def names(self) -> tuple[str, ...]:
        """What the caller knows each array as; "" of what is of the program's own making, and follows the caller's arrays."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.tree.unflatten(self.dims))]
        names = list(_X)
        return tuple(
            "" if path[0].idx >= len(names) else names[path[0].idx] if len(path) == 1 else path[1].name for path in paths
        )

    @property
    def leading(self) -> tuple[str, ...]:
        """The axes of jax.vmap: all results have all of them."""
        return tuple(f"n{n}" for n in reversed(range(self.vmaps)))

    @property
    def result_dims(self) -> tuple[str, ...]:
        own = RESULTS.get(self.method) or [_own(self.dims[n]) for n in self.wanted]
        return tuple(" ".join((*self.leading, text)) for text in own)

    def results(self, *arrays: Any) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the results."""
        sizes = {
            name: size
            for x, text in zip(arrays, self.dims, strict=True)
            for name, size in zip(text.split(), x.shape, strict=True)
        }
        q, *_ = self.tree.unflatten(arrays)
        if self.method in RESULTS:
            shapes = [[sizes[name] for name in text.split()] for text in self.result_dims]
            dtypes = self.elsewhere.result_dtype(q.dtype), *[accumulator(q.dtype)] * (len(shapes) - 1)
            return [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]
        lead = tuple(sizes[name] for name in self.leading)
        shapes = [arrays[n].shape[len(arrays[n].shape) - len(_own(self.dims[n]).split()) :] for n in self.wanted]
        of_tokens, dtype = self.tree.unflatten(range(len(arrays)))[:3], self.elsewhere.result_dtype(q.dtype)
        dtypes = [dtype if n in of_tokens else arrays[n].dtype for n in self.wanted]
        return [jax.ShapeDtypeStruct((*lead, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def run(self, engine: Engine, *arrays: Array) -> list[Array]:
        """The results, as flat as the arrays."""

        def fn(*arrays):
            results = getattr(engine, self.method)(*self.tree.unflatten(arrays))
            return jax.tree.leaves(results) if self.method in RESULTS else self._gradients(*results)

        for n in range(self.vmaps):
            fn = jax.vmap(fn, in_axes=[0 if f"n{n}" in text.split() else None for text in self.dims])
        return fn(*arrays)

    def _gradients(self, dq: Any, dk: Any, dv: Any, dscore: Any) -> list[Array]:
        """Those that are wanted."""
        q, k, v, score, *_ = self.tree.unflatten(range(len(self.dims)))
        of = {q: dq, k: dk, v: dv, score.bias: dscore.bias, score.sinks: dscore.sinks}
        of |= dict(zip(score.args, dscore.args, strict=True))
        return [of[n] for n in self.wanted]


def _own(text: str) -> str:
    """The dimensions of an array without those of jax.vmap."""
    return " ".join(name for name in text.split() if not name.startswith("n"))


def _dims(text: Any, argument: Any) -> Any:
    """The dimensions of an argument, None where it is."""
    if argument is None:
        return None
    if isinstance(argument, Score):
        return argument.map_leaves(_dims_of_leaf)
    if isinstance(argument, Tangents):
        return Tangents(*map(_dims, text, argument))
    return text


def _dims_of_leaf(name: str, leaf: Any) -> Any:
    """The dimensions of a leaf of a Score."""
    if name in PAIRWISE:
        return " ".join("." if size == 1 else name for name, size in zip("bhij", leaf.shape, strict=True))
    if name in ONE_FOR_EACH:
        return "b"
    if name in ("args", "mask_args"):
        return jax.tree.map(lambda _: ".", leaf)
    return {"q_segments": "b i", "kv_segments": "b j", "sinks": "h", "dropout_keys": "b h .", "first": "."}[name]


# ------------------------------------------------------------------------------------------------------ the primitive

attend_p = Primitive("jflash_attend")
attend_p.multiple_results = True


@attend_p.def_impl
def _impl(*arrays: Array, call: Call):
    with jax.disable_jit(False):  # else the jitted primitive would be this function again
        return _jitted(call)(*arrays)


def forget_programs() -> None:
    """Forgets what calls outside of jax.jit were compiled to, since launches may be chosen otherwise now."""
    _jitted.cache_clear()


@functools.lru_cache(maxsize=64)
def _jitted(call: Call) -> Callable:
    return jax.jit(functools.partial(attend_p.bind, call=call))


@attend_p.def_abstract_eval
def _abstract_eval(*avals, call: Call):
    """In explicit mode results are sharded by what is known of all arguments, gradients like what they are gradients of."""
    mesh = next((x.sharding.mesh for x in avals if not x.sharding.mesh.empty), avals[0].sharding.mesh)
    cut = Cut.of(call.names, call.dims, [(x.shape, x.sharding.spec) for x in avals], mesh.shape, strict=True)
    specs = [cut.spec(text) for text in call.result_dims]
    for n, primal in enumerate(call.wanted):
        own = len(_own(call.dims[primal]).split())
        specs[n] = PartitionSpec(*specs[n][: call.vmaps], *avals[primal].sharding.spec[avals[primal].ndim - own :])
    varying = frozenset().union(*(x.manual_axis_type.varying for x in avals))
    manual = avals[0].manual_axis_type.update(varying=varying)
    return [
        avals[0].update(x.shape, x.dtype, False, sharding=NamedSharding(mesh, spec), manual_axis_type=manual)
        for x, spec in zip(call.results(*avals), specs, strict=True)
    ]


def no_mesh(mesh: AbstractMesh):
    """For tracing what one device of a mesh does: nothing of it counts any more but what kind of device that is."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=mesh.abstract_device))


def _lowering(choose: Callable[[Call], Engine]) -> Callable:
    """The rule of a platform: the engine's own program, traced as if there were no mesh, on what is here of each array."""

    def rule(ctx, *values, call: Call):
        bare = [ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
        with no_mesh(jax.sharding.get_abstract_mesh()):
            program = jax.make_jaxpr(functools.partial(call.run, choose(call)))(*bare)
            # An engine computes all gradients; what leads only to those that nobody asks for is left out here.
            jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.out_avals), instantiate=True)
            run = jaxpr_as_fun(program.replace(jaxpr=jaxpr))
            return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=bare), *values)

    return rule


def _of_cpu(call: Call) -> Engine:
    if isinstance(call.elsewhere, Triton) and call.elsewhere.needs_gpu:
        raise ValueError(
            'implementation="triton" needs an NVIDIA GPU, but the program is lowered for a CPU: leave implementation out, '
            'which chooses by the platform, or give "xla" (or "interpret", the kernels interpreted, for tests)'
        )
    return call.elsewhere


mlir.register_lowering(attend_p, _lowering(lambda call: call.elsewhere))
mlir.register_lowering(attend_p, _lowering(_of_cpu), platform="cpu")
mlir.register_lowering(attend_p, _lowering(lambda call: call.gpu), platform="cuda")
