"""Programs, not only calls: several attentions in one, and what is traced, differentiated and run in between.

The caches of JAX are not cleared here: what one program leaves behind, the next one meets.
"""

import functools
import random

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, TILED, essentials, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflash
import jflash.equinox
from jflash.flax import attention_fn

pytestmark = pytest.mark.usefixtures("quickly_compiled")

EVERYWHERE = pytest.mark.parametrize("implementation", TILED)
LENGTH, HEADS, WIDTH = 24, 2, 8
stop = jax.lax.stop_gradient


def tokens(seed: int):
    return normal(1, LENGTH, HEADS, WIDTH, seed=seed)


Q, K, V = map(tokens, range(3))


def attend(q, k, v, implementation, **options):
    return jflash.attention(q, k, v, causal=True, implementation=implementation, block_sizes=SMALL_TILES, **options)


def assert_same(got, expected):
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=2e-5 * max(1.0, float(jnp.abs(y).max())), rtol=0)


def as_naive(differentiate, implementation):
    """What `differentiate`, a function of the name of an implementation, gives for this one and for naive is the same."""
    assert_same(differentiate(implementation), jax.jit(functools.partial(differentiate, "naive"))())


# --------------------------------------------------------------------------------------------- the failures that were found


@EVERYWHERE
def test_one_of_two_attentions_over_a_stopped_context(implementation):
    def gradients(implementation):
        att = functools.partial(attend, implementation=implementation)
        loss = lambda q, k, v: (att(q, k, v) + att(q, stop(k), stop(v))).sum()
        return jax.jit(jax.grad(loss, (0, 1, 2)))(Q, K, V)

    as_naive(gradients, implementation)


@EVERYWHERE
def test_a_pull_back_called_after_another_trace(implementation):
    def gradients(implementation):
        att = functools.partial(attend, implementation=implementation)
        o, pull = jax.vjp(att, Q, K, V)
        _, pull_q = jax.vjp(lambda q: att(q, K, V), Q)
        _, pull_v = jax.vjp(lambda v: att(Q, K, v), V)
        return pull(o), pull_q(o), pull_v(o), pull(o)

    as_naive(gradients, implementation)


@EVERYWHERE
def test_another_gradient_between_a_forward_and_its_backward(implementation):
    def gradients(implementation):
        att = functools.partial(attend, implementation=implementation)
        o, pull = jax.vjp(att, Q, K, V)
        probe = jax.grad(lambda k: att(Q, k, V).sum())(K)
        return probe, pull(o)

    as_naive(gradients, implementation)


# -------------------------------------------------------------------------------------------------------- random programs

# What may stand in place of an array, as a function of it and of a constant of its shape.
AS_IT_IS, STOPPED, CONSTANT, MIXED = (lambda x, c: x, lambda x, c: stop(x), lambda x, c: c, lambda x, c: 0.5 * (x + c))
OPTIONS = ({}, {"softcap": 3.0}, {"window": (5, 0)}, {"return_lse": True})
WRAPPERS = ("plain", "jit", "checkpoint", "scan", "vmap")


def a_program(seed: int):
    """(loss(arrays, implementation), arrays): two to four attentions, each over a choice of the same few arrays."""
    choose = random.Random(seed)
    options, per_head = choose.choice(OPTIONS), choose.choice((None, "bias", "sinks", "slopes"))
    calls = [
        (
            [choose.randrange(3) for _ in "qkv"],
            [choose.choice((AS_IT_IS, AS_IT_IS, STOPPED, CONSTANT, MIXED)) for _ in "qkvp"],
            choose.choice(WRAPPERS),
        )
        for _ in range(choose.randint(2, 4))
    ]
    of_heads = {None: (), "bias": (HEADS, 1, LENGTH), "sinks": (HEADS,), "slopes": (HEADS,)}[per_head]
    arrays = [*map(tokens, range(3)), normal(*of_heads, seed=7)]
    constants = [*map(tokens, range(3, 6)), normal(*of_heads, seed=8)]

    def loss(arrays, implementation):
        def once(which, changes, x):
            *qkv, p = (change(x[n], constants[n]) for n, change in zip((*which, 3), changes, strict=True))
            extra = {None: {}, "bias": {"bias": p}, "sinks": {"sinks": p}, "slopes": {"score_fn": slope, "score_args": (p,)}}
            o = attend(*qkv, implementation, **options, **extra[per_head])
            return o[0] + jnp.where(jnp.isfinite(o[1]), o[1], 0).swapaxes(1, 2)[..., None] if isinstance(o, tuple) else o

        total = 0.0
        for which, changes, wrapper in calls:
            fn = functools.partial(once, which, changes)
            if wrapper == "vmap":
                o = jax.vmap(lambda scale, fn=fn: fn([scale * x for x in arrays]))(jnp.array([1.0, 0.5])).sum(0)
            elif wrapper == "scan":
                o, _ = jax.lax.scan(lambda o, _, fn=fn: (fn([o, *arrays[1:]]), None), arrays[0], length=2)
            else:
                o = {"plain": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}[wrapper](fn)(arrays)
            total = total + jnp.sum(jnp.sin(o))
        return total

    return loss, arrays


def slope(s, b, h, i, j, slopes):
    return s - jax.nn.softplus(slopes[h]) * jnp.abs(i - j)


ORDERS = ("grad", "vjp, twice", "some, then all")


@pytest.mark.parametrize("seed", essentials(range(12), lambda seed: seed < 2))
def test_random_programs(seed):
    """In one process, each under what those before it have left in the caches."""
    loss, arrays = a_program(seed)
    implementation, order = TILED[seed % 2], ORDERS[seed % 3]
    fn = functools.partial(loss, implementation=implementation)
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    expected = gradient(arrays, "naive")
    if order == "grad":
        assert_same(gradient(arrays, implementation), expected)
    elif order == "vjp, twice":
        other, of_other = a_program(seed + 1000)
        value, pull = jax.vjp(fn, arrays)
        _, pull_other = jax.vjp(functools.partial(other, implementation=implementation), of_other)
        first, between, second = pull(jnp.ones_like(value)), pull_other(jnp.ones_like(value)), pull(jnp.ones_like(value))
        assert_same(first, [expected])
        assert_same(second, first)
        assert_same(between, [jax.jit(jax.grad(other), static_argnums=1)(of_other, "naive")])
    else:
        partly = jax.jit(jax.grad(lambda q, rest: fn([q, *rest])))(arrays[0], arrays[1:])
        assert_same(jax.jit(jax.grad(fn))(arrays), expected)
        assert_same(partly, expected[0])


# ------------------------------------------------------------------------------------------- one argument of a Score alone

PARAMETERS = {
    "bias": normal(HEADS, LENGTH, LENGTH, seed=5),
    "sinks": normal(HEADS, seed=6),
    "score_args": (normal(HEADS, seed=7),),
}


@pytest.mark.parametrize("implementation", essentials(TILED, ("xla",).__contains__))
@pytest.mark.parametrize("name", essentials(PARAMETERS, ("bias",).__contains__))
def test_a_parameter_alone_and_all_but_it(name, implementation):
    """In one program of two equal calls, and one after the other."""

    def gradients(implementation):
        def out(q, k, v, parameters):
            return attend(q, k, v, implementation, score_fn=slope, **parameters).sum()

        rest = {key: x for key, x in PARAMETERS.items() if key != name}
        alone = lambda x: out(Q, K, V, {name: x, **rest})
        others = lambda q, k, v, rest: out(q, k, v, {name: PARAMETERS[name], **rest})
        both = lambda x, q, k, v, rest: alone(x) + others(q, k, v, rest)
        every = jax.jit(jax.grad(both, (0, 1, 2, 3, 4)))(PARAMETERS[name], Q, K, V, rest)
        return every, jax.grad(alone)(PARAMETERS[name]), jax.grad(others, (0, 1, 2, 3))(Q, K, V, rest)

    as_naive(gradients, implementation)


# --------------------------------------------------------------------------------------------------------------- the ring


@pytest.mark.parametrize("implementation", essentials(TILED, ("xla",).__contains__))
def test_pull_backs_of_a_ring_after_other_traces(implementation):
    mesh = jax.make_mesh((2,), ("ring",), (AxisType.Auto,), devices=jax.devices()[:2])
    split = P(None, "ring")

    def ring(q, k, v):
        fn = functools.partial(jflash.ring_attention, axis_name="ring", causal=True, implementation=implementation)
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=split, out_specs=split))(q, k, v)

    def gradients(att):
        o, pull = jax.vjp(att, Q, K, V)
        _, pull_q = jax.vjp(lambda q: att(q, K, V), Q)
        both = jax.jit(jax.grad(lambda q, k, v: (att(q, k, v) + att(q, stop(k), stop(v))).sum(), (0, 1, 2)))(Q, K, V)
        return pull(o), pull_q(o), pull(o), both

    assert_same(gradients(ring), jax.jit(lambda: gradients(functools.partial(attend, implementation="naive")))())


# ------------------------------------------------------------------------------------------------------- layers of libraries


def test_a_frozen_encoder_beside_a_trained_decoder_in_flax():
    """Both of one shape: self-attention of what is frozen, cross-attention to it, self-attention of what is trained."""

    class Block(nn.Module):
        fn: object

        @nn.compact
        def __call__(self, x, context):
            return x + nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=self.fn)(x, context)

    x, context = normal(2, LENGTH, 16), normal(2, LENGTH, 16, seed=1)
    of_flax = Block(nn.dot_product_attention)
    parameters = [of_flax.init(jax.random.key(n), x, x) for n in range(3)]

    def gradients(fn):
        block = Block(fn)

        def loss(trained, frozen):
            encoded = stop(block.apply(frozen, context, context))
            decoded = block.apply(trained[0], x, x)
            return jnp.sum(jnp.sin(block.apply(trained[1], decoded, encoded)))

        everything = lambda every: loss(every[:2], every[2])
        return jax.jit(jax.grad(loss))(parameters[:2], parameters[2]), jax.grad(everything)(parameters)

    assert_same(gradients(attention_fn), gradients(nn.dot_product_attention))


def test_a_frozen_encoder_beside_a_trained_decoder_in_equinox():
    x, context = normal(LENGTH, 16), normal(LENGTH, 16, seed=1)

    def gradients(layer_of):
        encoder, own, cross = (layer_of(HEADS, 16, key=jax.random.key(n)) for n in range(3))

        def loss(trained, frozen):
            own, cross = trained
            encoded = stop(frozen(context, context, context))
            decoded = x + own(x, x, x)
            return jnp.sum(jnp.sin(cross(decoded, encoded, encoded)))

        frozen_too = lambda every: loss(every[:2], every[2])
        one = eqx.filter_jit(eqx.filter_grad(loss))((own, cross), encoder)
        every = eqx.filter_grad(frozen_too)((own, cross, encoder))
        return [jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (one, every)]

    assert_same(gradients(jflash.equinox.MultiheadAttention), gradients(eqx.nn.MultiheadAttention))
