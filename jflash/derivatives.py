"""What has a gradient, once and in reverse mode, and says so when asked for more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

INSTEAD = 'give implementation="naive", which has every derivative'


def once(fn: Callable) -> Callable:
    """fn, the derivative of which is an error: it is itself the derivative of something, or has one of its own."""

    @jax.custom_jvp
    def undifferentiated(*arguments):
        return fn(*arguments)

    @undifferentiated.defjvp
    def jvp(primals, tangents):
        raise TypeError(f"jflash.attention has no second derivatives: {INSTEAD}")

    return undifferentiated


def reverse_mode_only(arrays: Any) -> Any:
    """The same arrays. Their tangents can be transposed but not computed, as reverse mode does and forward mode does not."""
    return jax.tree.map(lambda x: _reverse_mode_only(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays)


@jax.custom_jvp
def _reverse_mode_only(x):
    return x


@_reverse_mode_only.defjvp
def _jvp(primals, tangents):
    return primals[0], _tangent_p.bind(tangents[0])


def _refuse(*_, **__):
    raise TypeError(f"jflash.attention has no forward-mode derivatives (jax.jvp, jax.jacfwd, jax.linearize): {INSTEAD}")


_tangent_p = Primitive("jflash_tangent")
_tangent_p.def_abstract_eval(lambda tangent: tangent)
_tangent_p.def_impl(_refuse)
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, _refuse)
