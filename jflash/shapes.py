"""The shapes of arrays as types, by the names of README and docstrings: what a signature says of its arrays.

They are for readers, and are checked in tests, where jaxtyping and beartype watch the modules that are named in
tests/conftest.py. Where jaxtyping is not installed they are plain arrays, and nothing else changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float  # to a type checker, Float[Array, ...] is Array
else:
    try:
        from jaxtyping import Bool, Float
    except ImportError:

        class Float:
            def __class_getitem__(cls, array_and_shape):
                return array_and_shape[0]

        Bool = Float

# Whole arrays, batch included. do is shaped like o, and each gradient like what it is the gradient of.
Q = Float[Array, "batch q_len heads head_dim"]
K = Float[Array, "batch kv_len kv_heads head_dim"]
V = Float[Array, "batch kv_len kv_heads v_dim"]
O = Float[Array, "batch q_len heads v_dim"]
PerQuery = Float[Array, "batch heads q_len"]  # lse, its cotangent, what else there is one of a query
PerHead = Float[Array, " heads"]

# One tile.
Tile = Float[Array, "rows cols"]
Visible = Bool[Array, "#rows #cols"]  # as little of it as depends on rows or columns
PerRow = Float[Array, " rows"]
OfRows = tuple[Float[Array, "rows _"], ...]  # chunks of columns
OfCols = tuple[Float[Array, "cols _"], ...]
