"""jflash.equinox in whole models, beside Equinox's own layer with the same parameters."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, normal
from models import assert_alike, assert_trains, trainer

from jflash import dropout_mask
from jflash.equinox import MultiheadAttention, rotate

pytestmark = pytest.mark.usefixtures("quickly_compiled")
BATCH, LENGTH, WIDTH, HEADS = 2, 37, 16, 2
KEY = jax.random.key(0)
CAUSAL = np.tri(LENGTH, dtype=bool)
MASKS = {
    "causal": CAUSAL,
    "padding": np.broadcast_to(np.arange(LENGTH) < 23, (LENGTH, LENGTH)),
    "for each head": CAUSAL & ((np.random.default_rng(0).random((HEADS, LENGTH, LENGTH)) < 0.5) | np.eye(LENGTH, dtype=bool)),
}


# ------------------------------------------------------------------------------------------- forward, gradients, training


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, layer, key, **settings):
        attention_key, mlp_key = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        biases = dict.fromkeys(("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True)
        self.attention = layer(HEADS, WIDTH, **biases, **settings, key=attention_key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=mlp_key)

    def __call__(self, x, mask=None, **how):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask, **how)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Model(eqx.Module):
    """Two blocks of a transformer, for one sequence."""

    blocks: list[Block]

    def __init__(self, layer, **settings):
        self.blocks = [Block(layer, key, **settings) for key in jax.random.split(KEY)]

    def __call__(self, x, mask=None, **how):
        for block in self.blocks:
            x = block(x, mask, **how)
        return x


def turned(q, k, v):
    """Equinox's way to rotary embeddings."""
    turn = jax.vmap(eqx.nn.RotaryPositionalEmbedding(q.shape[-1], dtype=q.dtype), 1, 1)
    return turn(q), turn(k), v


LIBRARY = functools.partial(Model, eqx.nn.MultiheadAttention)
OURS = functools.partial(Model, MultiheadAttention)


@functools.cache
def trainer_of(make, how=()):
    """Trains a model of `make` from Equinox's parameters; how: what its call is told."""
    _, static = eqx.partition(make(), eqx.is_inexact_array)
    start, _ = eqx.partition(LIBRARY(), eqx.is_inexact_array)
    structure = jax.tree.structure(static, is_leaf=lambda leaf: leaf is None)

    def apply(leaves, x, mask):
        model = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        return jax.vmap(lambda x: model(x, mask, **dict(how)))(x)

    # Both have the same leaves in the same order.
    return functools.partial(trainer(apply), jax.tree.leaves(start, is_leaf=lambda leaf: leaf is None))


TILES = ("block_sizes", SMALL_TILES)


def trained(make, mask, how=(), dtype="float32"):
    x, target = normal(BATCH, LENGTH, WIDTH, seed=5), normal(BATCH, LENGTH, WIDTH, seed=6)
    mask = None if mask is None else jnp.broadcast_to(mask, (HEADS, LENGTH, LENGTH))
    return trainer_of(make, how)(x, mask, target, np.ones((BATCH, LENGTH), bool), dtype)


@functools.cache
def references(mask, how=()):
    return tuple(trained(LIBRARY, MASKS[mask], how, dtype) for dtype in ("float32", "float64"))


@pytest.mark.parametrize("mask", MASKS)
def test_a_model_with_its_mask(mask):
    library, x64 = references(mask)
    assert_trains(x64)
    assert_alike(trained(OURS, MASKS[mask], (TILES,)), library, x64)


@pytest.mark.whole
def test_a_causal_model():
    assert_alike(trained(functools.partial(OURS, causal=True), None, (TILES,)), *references("causal"))


def test_a_model_with_rotary_embeddings():
    make = functools.partial(OURS, rope_theta=1e4, causal=True)
    assert_alike(trained(make, None, (TILES,)), *references("causal", (("process_heads", turned),)))


def test_another_mask_trains_otherwise():
    """What the tests above compare does depend on the attention."""
    with pytest.raises(AssertionError, match="outputs"):
        assert_alike(trained(OURS, MASKS["padding"], (TILES,)), *references("causal"))


# ------------------------------------------------------------------------------------------- the layer


def layer(cls=MultiheadAttention, heads=4, width=WIDTH, **settings):
    return cls(heads, width, **settings, key=KEY)


SETTINGS = {
    "key_size": 5, "value_size": 6, "output_size": 7, "qk_size": 8, "vo_size": 3, "use_key_bias": True, "use_output_bias": True,
    "dropout_p": 0.3, "dtype": jnp.float16,
}  # fmt: skip


def test_the_same_key_gives_the_same_parameters_in_the_same_places():
    ours, theirs = layer(**SETTINGS), layer(eqx.nn.MultiheadAttention, **SETTINGS)
    paths = [[jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(x)] for x in (ours, theirs)]
    assert paths[0] == paths[1]
    chex.assert_trees_all_equal(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    for name in ("query_proj", "key_proj", "value_proj", "output_proj", "dropout"):
        assert type(getattr(ours, name)) is type(getattr(theirs, name))


def test_sizes_of_its_own():
    settings = SETTINGS | {"dtype": jnp.float32, "dropout_p": 0.0}
    arrays = normal(9, WIDTH), normal(11, 5), normal(11, 6)
    got, expected = (layer(cls, **settings)(*arrays) for cls in (MultiheadAttention, eqx.nn.MultiheadAttention))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_parameters_move_by_tree_at():
    where = lambda layer: (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj)
    trained = eqx.nn.MultiheadAttention(4, WIDTH, key=jax.random.key(1))
    moved, x = eqx.tree_at(where, layer(), where(trained)), normal(9, WIDTH)
    np.testing.assert_allclose(moved(x, x, x), trained(x, x, x), atol=1e-6)


def test_grouped_heads_are_heads_that_share_their_keys():
    """The same as Equinox's layer in which each group's keys and values are written out for each of its heads."""
    grouped, full = layer(num_kv_heads=2, use_key_bias=True), layer(eqx.nn.MultiheadAttention, use_key_bias=True)
    assert grouped.key_proj.weight.shape == (8, WIDTH)
    each = lambda x: jnp.repeat(x.reshape(2, 4, -1), 2, 0).reshape(16, *x.shape[1:])
    full = eqx.tree_at(lambda m: m.key_proj.weight, full, each(grouped.key_proj.weight))
    full = eqx.tree_at(lambda m: m.key_proj.bias, full, each(grouped.key_proj.bias))
    full = eqx.tree_at(lambda m: m.value_proj.weight, full, each(grouped.value_proj.weight))
    x = normal(9, WIDTH)
    np.testing.assert_allclose(grouped(x, x, x), full(x, x, x), atol=1e-6)


def test_window_and_what_a_call_says_instead():
    x, where = normal(LENGTH, WIDTH), np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
    ours, theirs = layer(causal=True, window=(3, None)), layer(eqx.nn.MultiheadAttention)
    np.testing.assert_allclose(ours(x, x, x), theirs(x, x, x, (where >= 0) & (where <= 3)), atol=1e-6)
    np.testing.assert_allclose(ours(x, x, x, window=5, causal=False), theirs(x, x, x, abs(where) <= 5), atol=1e-6)
    band = (where >= 0) & (where <= 3) & (np.arange(LENGTH) < 9)
    np.testing.assert_allclose(ours(x, x, x, kv_lengths=9)[:12], theirs(x, x, x, band)[:12], atol=1e-6)


def test_a_chunk_stands_where_q_offset_says():
    """Mask and rotation both: the last rows alone are the last rows of the whole."""
    x, one = normal(LENGTH, WIDTH), layer(causal=True, rope_theta=100.0, num_kv_heads=1)
    np.testing.assert_allclose(one(x[30:], x, x, q_offset=30), one(x, x, x)[30:], atol=1e-5)


@pytest.mark.parametrize("theta", [1e4, 50.0])
def test_rotate_turns_each_pair_by_its_angle(theta):
    """As complex numbers, in float64."""
    x = normal(20, 3, 8)
    a, b = np.split(np.asarray(x, np.float64), 2, axis=-1)
    angles = np.multiply.outer(np.arange(5, 25), theta ** (-np.arange(4) / 4))[:, None]
    expected = (a + 1j * b) * np.exp(1j * angles)
    np.testing.assert_allclose(rotate(x, theta, 5), np.concatenate([expected.real, expected.imag], -1), atol=1e-5)
    assert rotate(x.astype(jnp.bfloat16), theta).dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------- dropout and vmap


def test_dropout_keeps_what_dropout_mask_says():
    dropping, x, key = layer(dropout_p=0.4), normal(LENGTH, WIDTH), jax.random.key(1)
    got = dropping(x, x, x, key=key)
    np.testing.assert_array_equal(got, dropping(x, x, x, key=key))
    q, k, v = (
        jax.vmap(proj)(x).reshape(LENGTH, 4, 4) for proj in (dropping.query_proj, dropping.key_proj, dropping.value_proj)
    )
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / 2) * dropout_mask(key, 0.4, (4, LENGTH, LENGTH)) / 0.6
    expected = jax.vmap(dropping.output_proj)(jnp.einsum("hqk,khd->qhd", weights, v).reshape(LENGTH, -1))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.abs(got - dropping(x, x, x, key=jax.random.key(2))).max() > 1e-2


def test_inference_and_rate_zero_drop_nothing():
    dropping, x, key = layer(dropout_p=0.4), normal(LENGTH, WIDTH), jax.random.key(1)
    plain = layer()(x, x, x)
    np.testing.assert_array_equal(plain, layer()(x, x, x, key=key))
    np.testing.assert_array_equal(plain, dropping(x, x, x, key=key, inference=True))
    still = eqx.nn.inference_mode(dropping)
    np.testing.assert_array_equal(plain, still(x, x, x))
    np.testing.assert_array_equal(still(x, x, x, key=key, inference=False), dropping(x, x, x, key=key))


@pytest.mark.parametrize("vmap", [jax.vmap, eqx.filter_vmap])
def test_under_vmap_each_element_is_what_it_is_alone(vmap):
    one = layer(dropout_p=0.4, causal=True, rope_theta=1e4, num_kv_heads=2)
    x, keys = normal(3, LENGTH, WIDTH), jax.random.split(KEY, 3)
    got = eqx.filter_jit(vmap(lambda x, key: one(x, x, x, key=key)))(x, keys)
    for n in range(3):
        np.testing.assert_allclose(got[n], one(x[n], x[n], x[n], key=keys[n]), atol=1e-5)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_kv_heads": 3}, ValueError, r"num_kv_heads must be a divisor of num_heads, 4, got 3"),
        ({"num_kv_heads": 0}, ValueError, r"num_kv_heads must be a divisor of num_heads, 4, got 0"),
        ({"window": -1}, ValueError, r"window must not be negative, got \(-1, -1\)"),
        ({"causal": 1}, TypeError, r"causal must be a bool, got 1"),
        (
            {"rope_theta": 1e4, "qk_size": 3},
            ValueError,
            r"rope_theta must be .* an even qk_size, got 10000.0 and a qk_size of 3",
        ),
        ({"rope_theta": 0.0}, ValueError, r"rope_theta must be positive .*, got 0.0"),
    ],
)
def test_errors_of_the_constructor(settings, error, message):
    with pytest.raises(error, match=message):
        layer(**settings)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({}, ValueError, r"key must be given where dropout_p, 0.4, is not 0 and inference is False, got None"),
        ({"inference": True, "mask": np.ones((9, 9))}, TypeError, r"mask must be bool, .*, got float"),
        (
            {"inference": True, "mask": np.ones((3, 9, 9), bool)},
            ValueError,
            r"mask must broadcast .* \(4, 9, 9\), got shape \(3, 9, 9\)",
        ),
        (
            {"inference": True, "process_heads": lambda q, k, v: (q, k[1:], v[1:])},
            ValueError,
            r"process_heads must keep the shapes",
        ),
    ],
)
def test_errors_of_the_call(how, error, message):
    x = normal(9, WIDTH)
    with pytest.raises(error, match=message):
        layer(dropout_p=0.4)(x, x, x, **how)


def test_a_query_that_sees_nothing_gives_the_bias():
    blind, x = layer(use_output_bias=True), normal(9, WIDTH)
    got = blind(x, x, x, np.zeros((9, 9), bool))
    np.testing.assert_array_equal(got, np.broadcast_to(blind.output_proj.bias, got.shape))
