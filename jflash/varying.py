"""Which axes of a mesh arrays vary over inside jax.shard_map: part of their type, which JAX checks with check_vma=True.

JAX casts the operands of an ordinary operation to one type by itself. What it does not cast are the first carry of a loop, the
results of a kernel, and the arguments of a custom derivative, whose gradients must have their types. Outside of shard_map, and
with check_vma=False, nothing varies and all of this does nothing.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array, lax
from jax.sharding import ManualAxisType


def axes(*trees: Any) -> frozenset:
    """The axes that any of the arrays varies over."""
    return frozenset().union(*(_axes(x) for x in jax.tree.leaves(trees)))


def over(axes: frozenset, tree: Any) -> Any:
    """`tree`, its arrays cast to vary over `axes` too. The gradient of a cast array is a sum over the new ones."""

    def cast(x: Array) -> Array:
        missing = tuple(sorted(axes - _axes(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def alike(*trees: Any) -> tuple[Any, ...]:
    """The trees, all arrays in them varying over the axes that any of them varies over."""
    return over(axes(trees), trees)


def nowhere(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of what does not vary, as the results of a kernel must have it where JAX checks."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType())


def _axes(x: Any) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying
