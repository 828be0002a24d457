"""jflash.flax in whole models of linen and NNX, beside Flax's own attention with the same parameters."""

import functools
import inspect

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, normal
from flax import nnx
from models import assert_alike, assert_trains, run

from jflash import alibi_slopes, attention, dropout_mask
from jflash.flax import attention_fn

BATCH, LENGTH, WIDTH, HEADS = 2, 37, 16, 2
TILED = functools.partial(attention_fn, block_sizes=SMALL_TILES)  # several tiles


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Compiling is what takes the time here."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# ------------------------------------------------------------------------------------------- the models


class Linen(nn.Module):
    """Two blocks of a transformer."""

    attention_fn: object = nn.dot_product_attention
    settings: tuple = ()

    @nn.compact
    def __call__(self, x, mask=None, **how):
        for _ in range(2):
            layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn, **dict(self.settings))
            x = x + layer(nn.LayerNorm()(x), mask=mask, **how)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return x


class Block(nnx.Module):
    def __init__(self, attention_fn, rngs, **settings):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, attention_fn=attention_fn, rngs=rngs, **settings)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask=None, **how):
        x = x + self.attention(self.norms[0](x), mask=mask, **how)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NNX(nnx.Module):
    """Two blocks of a transformer, four heads of queries over two of keys."""

    def __init__(self, attention_fn=nnx.dot_product_attention, **settings):
        settings = {"num_kv_heads": 2, **settings}
        self.blocks = nnx.List([Block(attention_fn, nnx.Rngs(n), **settings) for n in range(2)])

    def __call__(self, x, *args, **how):
        for block in self.blocks:
            x = block(x, *args, **how)
        return x


@functools.cache
def linen_parameters():
    parameters = Linen().init(jax.random.key(0), normal(1, 3, WIDTH))
    return jax.tree.map(lambda x: x + 0.1 * normal(*x.shape, seed=1), parameters)  # biases too


def apply_linen(parameters, x, attention_fn=nn.dot_product_attention, settings=(), **how):
    return Linen(attention_fn, settings).apply(parameters, x, **how)


@functools.cache
def nnx_parameters():
    parameters = nnx.to_pure_dict(nnx.state(NNX(), nnx.Param))
    return jax.tree.map(lambda x: x + 0.1 * normal(*x.shape, seed=1), parameters)


def nnx_model(parameters, attention_fn=nnx.dot_product_attention, **settings):
    model = NNX(attention_fn, **settings)
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, parameters)
    nnx.update(model, state)
    return model


def apply_nnx(parameters, x, attention_fn=nnx.dot_product_attention, settings=(), **how):
    return nnx_model(parameters, attention_fn, **dict(settings))(x, **how)


MODELS = {"linen": (apply_linen, linen_parameters), "nnx": (apply_nnx, nnx_parameters)}

# ------------------------------------------------------------------------------------------- forward, gradients, training

TOKENS = jnp.ones((BATCH, LENGTH))
REAL = jnp.arange(LENGTH) < jnp.array([[LENGTH], [23]])
CAUSAL, PADDING = nn.make_causal_mask(TOKENS), nn.make_attention_mask(REAL, REAL)
MASKS = {"none": None, "causal": CAUSAL, "padding": PADDING, "combined": nn.combine_masks(CAUSAL, PADDING)}
PER_HEAD = jnp.asarray(np.random.default_rng(3).random((1, 2, LENGTH, LENGTH)) < 0.5) | jnp.eye(LENGTH, dtype=bool)


def trained(library, mask, attention_fn=None, dtype="float32"):
    apply, parameters = MODELS[library]
    x, target = normal(BATCH, LENGTH, WIDTH, seed=5), normal(BATCH, LENGTH, WIDTH, seed=6)
    how = {} if attention_fn is None else {"attention_fn": attention_fn}
    # Where all is padding Flax gives a mean of values and jflash 0; no loss may count it.
    return run(lambda parameters, x: apply(parameters, x, mask=mask, **how), parameters(), x, target, REAL, dtype)


@functools.cache
def references(library, mask):
    return tuple(trained(library, MASKS[mask], dtype=dtype) for dtype in ("float32", "float64"))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("library", MODELS)
def test_a_model_with_its_mask(library, mask):
    library_run, x64 = references(library, mask)
    assert_trains(x64)
    assert_alike(trained(library, MASKS[mask], TILED), library_run, x64)


@pytest.mark.parametrize("library", MODELS)
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        ("causal", {"causal": True}),
        ("causal", {"is_causal": True}),
        ("padding", {"segment_ids": REAL.astype(int), "kv_lengths": REAL.sum(1)}),
        ("combined", {"causal": True, "kv_lengths": REAL.sum(1), "q_lengths": REAL.sum(1)}),
        ("causal", {"mask_fn": lambda b, h, i, j: j <= i}),
    ],
    ids=str,
)
def test_a_model_with_options_in_place_of_a_mask(library, mask, options):
    if library == "nnx" and "is_causal" in options:
        pytest.skip("the layer passes it itself: test_nnx_passes_is_causal")
    assert_alike(trained(library, None, functools.partial(TILED, **options)), *references(library, mask))


@pytest.mark.parametrize("library", MODELS)
def test_another_mask_trains_otherwise(library):
    """What the tests above compare does depend on the attention."""
    with pytest.raises(AssertionError, match="outputs"):
        assert_alike(trained(library, None, TILED), *references(library, "causal"))


def test_nnx_passes_is_causal():
    x = normal(BATCH, LENGTH, WIDTH)
    got, expected = (apply_nnx(nnx_parameters(), x, fn, is_causal=True) for fn in (TILED, nnx.dot_product_attention))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.abs(got - apply_nnx(nnx_parameters(), x, TILED)).max() > 1e-2
