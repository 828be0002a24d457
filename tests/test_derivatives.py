"""Every derivative of first and second order, and what is left out, which says so where it is asked for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import ESSENTIAL_CASES, SMALL_TILES, TILED, check_tangents, essentials, needs_compiler, normal
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

from jflash import BlockSizes, attention, dot_product_attention, machine_code
from jflash.parallel.primitive import attend_p
from jflash.proof.cases import CASES

pytestmark = pytest.mark.usefixtures("quickly_compiled")

Q = normal(8, 2, 4)


def assert_close(got, expected, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, atol=tolerance * (1 + np.abs(y).max(initial=0)), rtol=0)


@pytest.mark.parametrize("case", essentials(CASES, ESSENTIAL_CASES[:2].__contains__), ids=lambda case: case.name)
def test_tangents_agree_with_float64(case):
    """Of o and lse, and of each gradient: jax.jvp, and jax.jvp of jax.vjp."""
    for implementation in TILED:
        check_tangents(case, implementation=implementation, block_sizes=SMALL_TILES)


# ------------------------------------------------------------------------------------------- whatever asks for them


def loss(q, implementation=None):
    o, lse = attention(q, q, q, causal=True, return_lse=True, implementation=implementation)
    return jnp.sum(o**2) + jnp.sum(jnp.sin(lse))


def over_layers(fn):
    """Two layers in a scan: what JAX does not know to be zero there, it computes."""
    return lambda q: jax.lax.scan(lambda x, _: (x + jnp.tanh(fn(x)) * x, None), q, None, length=2)[0]


FIRST_ORDER = {
    "jvp": lambda fn: jax.jvp(fn, (Q,), (Q,)),
    "jvp of jit": lambda fn: jax.jvp(jax.jit(fn), (Q,), (Q,)),
    "jit of jvp": lambda fn: jax.jit(lambda q: jax.jvp(fn, (q,), (q,)))(Q),
    "jacfwd": lambda fn: jax.jacfwd(fn)(Q),
    "linearize": lambda fn: jax.linearize(fn, Q)[1](Q),
    "transposed linearize": lambda fn: jax.linear_transpose(jax.linearize(fn, Q)[1], Q)(1.0),
    "jvp of checkpoint": lambda fn: jax.jvp(jax.checkpoint(fn), (Q,), (Q,)),
    "jvp of scan": lambda fn: jax.jvp(over_layers(fn), (Q,), (Q,)),
    "vmap of jvp": lambda fn: jax.vmap(lambda q, t: jax.jvp(fn, (q,), (t,)))(jnp.stack([Q, 2 * Q]), jnp.stack([Q, Q])),
    "vmap of tangents": lambda fn: jax.vmap(lambda t: jax.jvp(fn, (Q,), (t,)))(jnp.stack([Q, 2 * Q])),
    "vmap of primals": lambda fn: jax.vmap(lambda q: jax.jvp(fn, (q,), (Q,)))(jnp.stack([Q, 2 * Q])),
    "jvp of vmap": lambda fn: jax.jvp(jax.vmap(fn), (jnp.stack([Q, 2 * Q]),), (jnp.stack([Q, Q]),)),
}
SECOND_ORDER = {
    "hessian-vector product": lambda fn: jax.jvp(jax.grad(fn), (Q,), (Q,)),
    "jit of it": lambda fn: jax.jit(lambda q: jax.jvp(jax.grad(fn), (q,), (q,)))(Q),
    "hessian": lambda fn: jax.hessian(lambda q: fn(q.reshape(Q.shape)))(Q.ravel()),
    "grad of grad": lambda fn: jax.grad(lambda q: jnp.sum(jax.grad(fn)(q) * Q))(Q),
    "grad of grad of checkpoint": lambda fn: jax.grad(lambda q: jnp.sum(jax.grad(jax.checkpoint(fn))(q) ** 2))(Q),
    "grad of jvp": lambda fn: jax.grad(lambda q: jax.jvp(fn, (q,), (q,))[1])(Q),
    "jvp of grad of scan": lambda fn: jax.jvp(jax.grad(lambda q: over_layers(fn)(q).sum()), (Q,), (Q,)),
    "vmap of grad of grad": lambda fn: jax.vmap(jax.grad(lambda q: jnp.sum(jax.grad(fn)(q) * Q)))(jnp.stack([Q, 2 * Q])),
    "vmap of grad of jvp": lambda fn: jax.vmap(jax.grad(lambda q, t: jax.jvp(fn, (q,), (t,))[1]), (None, 0))(
        Q, jnp.stack([Q, -Q])
    ),
    "jvp of a gradient's length": lambda fn: jax.jvp(lambda t: jax.vjp(fn, Q)[1](t), (jnp.float32(1.0),), (jnp.float32(2.0),)),
}
ALWAYS = (
    "jit of jvp",
    "jacfwd",
    "jvp of scan",
    "vmap of primals",
    "hessian-vector product",
    "grad of grad",
    "vmap of grad of jvp",
)


@pytest.mark.parametrize("implementation", essentials([None, *TILED], ("xla",).__contains__))
@pytest.mark.parametrize("name", essentials([*FIRST_ORDER, *SECOND_ORDER], ALWAYS.__contains__))
def test_whatever_asks(name, implementation):
    asks = (FIRST_ORDER | SECOND_ORDER)[name]
    got, expected = (asks(functools.partial(loss, implementation=x)) for x in (implementation, "naive"))
    assert_close(got, expected, 2e-4 if "scan" in name else 5e-5)


def test_in_64_bits():
    with jax.enable_x64(True):
        q = normal(20, 2, 3, dtype=jnp.float64) / 2
        bias, sinks = normal(20, 1, seed=1, dtype=jnp.float64), normal(2, seed=2, dtype=jnp.float64)

        def fn(q, bias, sinks, implementation="xla"):
            options = {"softcap": 2.0, "bias": bias, "sinks": sinks, "return_lse": True, "block_sizes": SMALL_TILES}
            o, lse = attention(q, q, 2 * q, causal=True, implementation=implementation, **options)
            return jnp.sum(jnp.sin(o)) + jnp.sum(lse**2)

        check_grads(fn, (q, bias, sinks), order=1, modes=["fwd", "rev"], atol=1e-7, rtol=1e-7)
        gradient = jax.grad(fn, (0, 1, 2))
        check_grads(gradient, (q, bias, sinks), order=1, modes=["fwd", "rev"], atol=1e-6, rtol=1e-6)
        check_grads(lambda *x: jax.jvp(fn, x, x)[1], (q, bias, sinks), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("implementation", TILED)
def test_forward_and_reverse_are_each_others_transpose(implementation):
    """Linear in the tangents, and <ct, J t> = <Jᵀ ct, t>, with everything that has tangents."""
    fn = lambda q, k, v, bias, sinks: attention(
        q, k, v, bias=bias, sinks=sinks, return_lse=True, causal=True, block_sizes=SMALL_TILES, implementation=implementation
    )
    shapes = (2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8), (4, 1, 20), (4,)
    x, t, u = (tuple(normal(*shape, seed=10 * n + m) for m, shape in enumerate(shapes)) for n in range(3))
    ct = normal(2, 20, 4, 8, seed=31), normal(2, 4, 20, seed=32)
    along = jax.jit(lambda t: jax.jvp(fn, x, t)[1])
    dot = lambda xs, ys: sum(np.vdot(a, b) for a, b in zip(xs, ys, strict=True))
    np.testing.assert_allclose(dot(ct, along(t)), dot(jax.jit(lambda ct: jax.vjp(fn, *x)[1](ct))(ct), t), rtol=1e-4)
    both = jax.tree.map(lambda a, b: 3 * a - b, t, u)
    assert_close(along(both), jax.tree.map(lambda a, b: 3 * a - b, along(t), along(u)))


@pytest.mark.parametrize("implementation", TILED)
def test_what_does_not_move(implementation):
    """Each input alone, and all but it: what is zero is left out, and what is left is right."""
    shapes = {"q": (1, 20, 2, 8), "k": (1, 20, 1, 8), "v": (1, 20, 1, 8), "bias": (20,), "sinks": (2,), "score_args": (2,)}
    inputs = {name: normal(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}

    def fn(implementation, q, k, v, bias, sinks, score_args):
        score_fn = lambda s, b, h, i, j, slopes: s - slopes[h] * jnp.abs(i - j)
        options = {"bias": bias, "sinks": sinks, "score_fn": score_fn, "score_args": (score_args,)}
        o, lse = attention(q, k, v, **options, return_lse=True, implementation=implementation, block_sizes=SMALL_TILES)
        return jnp.sum(o**2) + jnp.sum(lse)

    def along(implementation, moving):
        of_moving = lambda its: fn(implementation, **(inputs | its))
        its = {name: inputs[name] for name in moving}
        gradient = lambda its: jax.grad(lambda inputs: fn(implementation, **inputs))(inputs | its)
        return jax.jit(lambda its: (jax.jvp(of_moving, (its,), (its,)), jax.jvp(gradient, (its,), (its,))))(its)

    alone = [(name,) for name in inputs]
    for moving in alone if implementation == "xla" else alone[1:6:2]:
        assert_close(along(implementation, moving), along("naive", moving), 1e-4)


@pytest.mark.parametrize("implementation", TILED)
def test_what_nobody_sees_moves_nothing(implementation):
    q, k = normal(1, 20, 2, 8), normal(1, 30, 2, 8, seed=1)
    hidden = jnp.arange(30)[:, None, None] >= 20

    @jax.jit
    def along(k, kt):
        fn = lambda q, k: attention(q, k, 2 * k, causal=True, implementation=implementation, block_sizes=SMALL_TILES)
        gradient = lambda q, k: jax.vjp(fn, q, k)[1](q)
        return jax.jvp(lambda q, k: (fn(q, k), gradient(q, k)), (q, k), (q, kt))

    clean = along(jnp.where(hidden, 0, k), jnp.where(hidden, 0, k))
    poisoned = along(jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.nan, k))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


@pytest.mark.parametrize("implementation", TILED)
def test_equal_logits(implementation):
    """A minimum has half a derivative where its two sides are equal: the largest logits of a row stand there."""
    q = jnp.ones((1, 20, 1, 8))
    fn = lambda implementation, bias: attention(
        q, q, normal(1, 20, 1, 8), bias=bias, implementation=implementation, block_sizes=SMALL_TILES
    )
    along = lambda implementation: jax.jvp(
        functools.partial(fn, implementation), (jnp.zeros((20, 20)),), (normal(20, 20, seed=1),)
    )
    assert_close(along(implementation), along("naive"))


def test_the_drop_in_has_them():
    fn = lambda q: jnp.sum(dot_product_attention(q, q, q, is_causal=True) ** 2)
    theirs = lambda q: jnp.sum(jax.nn.dot_product_attention(q, q, q, is_causal=True) ** 2)
    for differentiate in (lambda fn: jax.jvp(fn, (Q,), (Q,)), lambda fn: jax.jvp(jax.grad(fn), (Q,), (Q,))):
        assert_close(differentiate(fn), differentiate(theirs))


# ------------------------------------------------------------------------------------------- training on a jvp


def mean_flow_loss(scale, q, implementation=None, stop=jax.lax.stop_gradient):
    """The loss of MeanFlow and of consistency models: a network's jvp, stopped, in the target of the network itself."""
    network = lambda q, t: attention(q, scale * q, q * t, causal=True, implementation=implementation)
    u, along = jax.jvp(network, (q, jnp.float32(0.5)), (2 * q, jnp.float32(1.0)))
    return jnp.sum((u - stop(q - 0.5 * along)) ** 2)


def methods(jaxpr) -> set[str]:
    """The methods of engines that a program calls, in it and in all that it holds."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive is attend_p:
            found.add(eqn.params["call"].method)
        for inner in jaxprs_in_params(eqn.params):
            found |= methods(inner)
    return found


@pytest.mark.parametrize("implementation", TILED)
def test_a_loss_with_a_stopped_jvp(implementation):
    got, expected = (jax.value_and_grad(mean_flow_loss)(0.7, Q, x) for x in (implementation, "naive"))
    assert_close(got, expected)


def in_a_scan(scale, q, **how):
    """The same over layers: the tangent is among what a scan carries."""

    def layer(carry, _):
        loss, x = carry
        return (loss + mean_flow_loss(scale, x, **how), jnp.tanh(x)), None

    return jax.lax.scan(layer, (0.0, q), None, length=2)[0][0]


@pytest.mark.parametrize("fn", [mean_flow_loss, jax.jit(mean_flow_loss), jax.checkpoint(mean_flow_loss), in_a_scan])
def test_a_stopped_jvp_asks_for_no_second_derivative(fn):
    program = jax.make_jaxpr(jax.grad(fn))(0.7, Q)
    assert methods(program.jaxpr) == {"forward", "tangent", "backward"}
    assert_close(jax.grad(in_a_scan)(0.7, Q), jax.grad(functools.partial(in_a_scan, implementation="naive"))(0.7, Q), 1e-4)


def test_a_jvp_that_is_not_stopped():
    got, expected = (jax.grad(mean_flow_loss)(0.7, Q, x, stop=lambda x: x) for x in (None, "naive"))
    assert_close(got, expected)


# ------------------------------------------------------------------------------------------- what is left out


def third(fn):
    return jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(jax.grad(fn)(q) * Q))(q) * Q))


LEFT_OUT = {
    "jvp of jvp": ("forward mode over forward mode", lambda fn: jax.jvp(lambda q: jax.jvp(fn, (q,), (q,)), (Q,), (Q,))),
    "jacfwd of jacfwd": ("forward mode over forward mode", lambda fn: jax.jacfwd(jax.jacfwd(fn))(Q)),
    "jit of jvp of jvp": (
        "forward mode over forward mode",
        lambda fn: jax.jit(lambda q: jax.jvp(lambda q: jax.jvp(fn, (q,), (q,)), (q,), (q,)))(Q),
    ),
    "grad of grad of grad": ("third derivatives", lambda fn: third(fn)(Q)),
    "jvp of hessian-vector product": (
        "forward mode over forward mode",
        lambda fn: jax.jvp(lambda q: jax.jvp(jax.grad(fn), (q,), (Q,))[1], (Q,), (Q,)),
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_names_what_has_it(name):
    what, differentiate = LEFT_OUT[name]
    with pytest.raises(TypeError, match=rf"does not have {what}.*: give implementation=\"naive\", which has every derivative"):
        differentiate(loss)


def test_naive_has_them_all():
    with jax.enable_x64(True):
        q = normal(5, 2, 3, dtype=jnp.float64)
        fn = lambda q: attention(q, q, q, causal=True, softcap=2.0, return_lse=True, implementation="naive")
        check_grads(fn, (q,), order=2, modes=["fwd", "rev"], atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------------------------- what it costs on a GPU


@functools.cache
def compiled(head_dim, block_sizes=None):
    def along(q, k, v, *tangents):
        return jax.jvp(lambda q, k, v: attention(q, k, v, block_sizes=block_sizes), (q, k, v), tangents)

    return machine_code.compile_for(along, *[jax.ShapeDtypeStruct((2, 4096, 4, head_dim), jnp.bfloat16)] * 6, gpu="h100")


@needs_compiler
@pytest.mark.parametrize("head_dim", essentials([64, 128], (64).__eq__))
def test_a_tangent_spills_nothing_on_h100(head_dim):
    program = compiled(head_dim)
    assert {kernel.name for kernel in program.kernels} == {"jflash_forward", "jflash_tangent"}
    assert program["jflash_tangent"].spill_bytes == 0
    assert program["jflash_tangent"].tensor_cores == "HGMMA"


@needs_compiler
@pytest.mark.parametrize("head_dim", essentials([64, 128], (64).__eq__))
def test_a_tangent_costs_five_products_for_two(head_dim):
    program = compiled(head_dim, BlockSizes(block_q=64, block_kv=32, num_warps=4, num_stages=1))
    cycles = {name: program[f"jflash_{name}"].hot.cycles["tensor"] for name in ("forward", "tangent")}
    assert cycles["tangent"] == 2.5 * cycles["forward"]


def test_memory_is_linear_in_the_length():
    def temporary(length, differentiate):
        of = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        fn = lambda q, t: differentiate(lambda q: attention(q, q, q, causal=True, implementation="xla"), q, t)
        return jax.jit(fn).lower(of, of).compile().memory_analysis().temp_size_in_bytes

    along = lambda fn, q, t: jax.jvp(fn, (q,), (t,))
    twice = lambda fn, q, t: jax.jvp(lambda q: jax.vjp(fn, q)[1](q), (q,), (t,))
    for differentiate in (along, twice):
        assert temporary(8192, differentiate) < 2.2 * temporary(4096, differentiate)
