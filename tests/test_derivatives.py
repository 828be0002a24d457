"""Derivatives that tiled attention does not have: it says so, whatever asks for them, and naive has them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from checks import TILED, normal
from jax.test_util import check_grads

from jflash import attention

Q = normal(8, 2, 4)


def loss(q, implementation=None):
    return jnp.sum(attention(q, q, q, causal=True, implementation=implementation) ** 2)


def twice(fn, gradient=jax.grad):
    return gradient(lambda q: jnp.sum(jax.grad(fn)(q) ** 2))


@pytest.mark.parametrize("implementation", [None, *TILED])
@pytest.mark.parametrize(
    "differentiate",
    [
        lambda fn: jax.jvp(fn, (Q,), (Q,)),
        lambda fn: jax.jvp(jax.jit(fn), (Q,), (Q,)),
        lambda fn: jax.jit(lambda q: jax.jvp(fn, (q,), (q,)))(Q),
        lambda fn: jax.jacfwd(fn)(Q),
        lambda fn: jax.linearize(fn, Q)[1](Q),
        lambda fn: jax.jvp(jax.checkpoint(fn), (Q,), (Q,)),
    ],
    ids=["jvp", "jvp of jit", "jit of jvp", "jacfwd", "linearize", "jvp of checkpoint"],
)
def test_forward_mode_names_what_has_it(differentiate, implementation):
    message = r"no forward-mode derivatives .*: give implementation=\"naive\""
    with pytest.raises(TypeError, match=message):
        differentiate(functools.partial(loss, implementation=implementation))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda fn: twice(fn)(Q),
        lambda fn: jax.jit(twice(fn))(Q),
        lambda fn: jax.hessian(fn)(Q),
        lambda fn: jax.jvp(jax.grad(fn), (Q,), (Q,)),
        lambda fn: twice(jax.checkpoint(fn))(Q),
    ],
    ids=["grad of grad", "jit of grad of grad", "hessian", "jvp of grad", "grad of grad of checkpoint"],
)
def test_second_derivatives_name_what_has_them(differentiate):
    with pytest.raises(TypeError, match=r"no second derivatives: give implementation=\"naive\""):
        differentiate(loss)


def test_of_a_parameter_alone():
    fn = lambda bias: attention(Q, Q, Q, bias=bias)
    with pytest.raises(TypeError, match="no forward-mode derivatives"):
        jax.jvp(fn, (jnp.zeros((8, 8)),), (jnp.ones((8, 8)),))


def test_naive_has_them_all():
    with jax.enable_x64(True):
        q = normal(5, 2, 3, dtype=jnp.float64)
        fn = lambda q: attention(q, q, q, causal=True, softcap=2.0, return_lse=True, implementation="naive")
        check_grads(fn, (q,), order=2, modes=["fwd", "rev"], atol=1e-6, rtol=1e-6)
