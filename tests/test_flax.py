"""jflash.flax in whole models of linen and NNX, beside Flax's own attention with the same parameters."""

import functools
import inspect

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, essentials, normal
from flax import nnx
from models import assert_alike, assert_trains, trainer

from jflash import alibi_slopes, attention, dropout_mask
from jflash.flax import attention_fn

pytestmark = pytest.mark.usefixtures("quickly_compiled")
BATCH, LENGTH, WIDTH, HEADS = 2, 37, 16, 2
TILED = functools.partial(attention_fn, block_sizes=SMALL_TILES)  # several tiles


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
CAUSAL = nn.make_causal_mask(TOKENS)
# Padding sees padding: with rows that see nothing jax.nn, which NNX calls, gives NaN in float64 (JAX 0.10).
PADDING = nn.make_attention_mask(REAL, REAL, jnp.equal)
MASKS = {"all": jnp.ones_like(CAUSAL), "causal": CAUSAL, "padding": PADDING, "combined": nn.combine_masks(CAUSAL, PADDING)}


@functools.cache
def trainer_of(library, attention_fn=None):
    apply, _ = MODELS[library]
    how = {} if attention_fn is None else {"attention_fn": attention_fn}
    return trainer(lambda parameters, x, mask: apply(parameters, x, mask=mask, **how))


def trained(library, mask, attention_fn=None, dtype="float32"):
    _, parameters = MODELS[library]
    x, target = normal(BATCH, LENGTH, WIDTH, seed=5), normal(BATCH, LENGTH, WIDTH, seed=6)
    # What padding sees differs between a mask and lengths; no loss may count it.
    return trainer_of(library, attention_fn)(parameters(), x, mask, target, REAL, dtype)


@functools.cache
def references(library, mask):
    return tuple(trained(library, MASKS[mask], dtype=dtype) for dtype in ("float32", "float64"))


@pytest.mark.whole
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("library", MODELS)
def test_a_model_with_its_mask(library, mask):
    library_run, x64 = references(library, mask)
    assert_trains(x64)
    assert_alike(trained(library, MASKS[mask], TILED), library_run, x64)


@pytest.mark.parametrize(
    ("library", "mask", "options"),
    essentials(
        [
            ("linen", "causal", {"causal": True}),
            ("linen", "combined", {"causal": True, "segment_ids": REAL.astype(int), "q_lengths": REAL.sum(1)}),
            ("nnx", "combined", {"mask_fn": lambda b, h, i, j: j <= i, "kv_lengths": REAL.sum(1)}),
        ],
        lambda model: model[1] == "combined",
        several=True,
    ),
)
def test_a_model_with_options_in_place_of_a_mask(library, mask, options):
    assert_alike(trained(library, None, functools.partial(TILED, **options)), *references(library, mask))


@pytest.mark.whole
@pytest.mark.parametrize("library", MODELS)
def test_another_mask_trains_otherwise(library):
    """What the tests above compare does depend on the attention."""
    with pytest.raises(AssertionError, match="outputs"):
        assert_alike(trained(library, MASKS["all"], TILED), *references(library, "causal"))


def test_nnx_passes_is_causal():
    x = normal(BATCH, LENGTH, WIDTH)
    got, expected = (apply_nnx(nnx_parameters(), x, fn, is_causal=True) for fn in (TILED, nnx.dot_product_attention))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.abs(got - apply_nnx(nnx_parameters(), x, TILED)).max() > 1e-2


# ------------------------------------------------------------------------------------------- shapes, masks, dtypes


def heads(*batch, q_len=LENGTH, kv_len=LENGTH, dtype=jnp.float32):
    shapes = (*batch, q_len, HEADS, 8), (*batch, kv_len, HEADS, 8), (*batch, kv_len, HEADS, 5)
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


PAIRS = (HEADS, 5, 7)


@pytest.mark.whole
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 3), (0, 2)])
@pytest.mark.parametrize("lead", [None, "full", "ones", "last", "first"])
def test_any_number_of_batch_dimensions(batch, lead):
    """With masks and biases shared over all, none and some of them, against Flax's formula."""
    sizes = {
        None: (), "full": batch, "ones": (1,) * len(batch), "last": (1,) * (len(batch) - 1) + batch[-1:],
        "first": batch[:1] + (1,) * (len(batch) - 1),
    }[lead]  # fmt: skip
    mask = jnp.asarray(np.random.default_rng(0).random((*sizes, *PAIRS)) < 0.6) | (jnp.arange(7) == 0)
    bias = normal(*sizes, 1, *PAIRS[1:], seed=7)
    q, k, v = heads(*batch, q_len=5, kv_len=7)
    for x in (mask, mask.astype(jnp.float32), mask.astype(jnp.int8)):
        got, expected = (fn(q, k, v, mask=x, bias=bias) for fn in (attention_fn, nn.dot_product_attention))
        chex.assert_equal_shape([got, expected])
        np.testing.assert_allclose(got, expected, atol=2e-6)


def test_dtypes_promote_as_in_flax():
    q, k, v = heads(2)
    for dtype, key_dtype in ((None, jnp.bfloat16), (jnp.float16, jnp.float32), (jnp.bfloat16, jnp.float16)):
        arrays = q, k.astype(key_dtype), v
        got, expected = (fn(*arrays, dtype=dtype) for fn in (attention_fn, nn.dot_product_attention))
        assert got.dtype == expected.dtype
        exact = attention(*(x.astype(got.dtype).astype(jnp.float32) for x in arrays), implementation="naive")
        np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=2 * float(jnp.finfo(got.dtype).eps))


def test_a_query_that_sees_nothing_gives_zero():
    q, k, v = heads(2)
    assert not attention_fn(q, k, v, mask=jnp.zeros((2, 1, LENGTH, LENGTH))).any()


# ------------------------------------------------------------------------------------------- decode

DECODED = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (4, None)},
    "this one alone": {"window": 0},
    "mask_fn": {"causal": True, "mask_fn": lambda b, h, i, j: (i - j) % 3 != 1},
    "ALiBi": {
        "causal": True,
        "score_fn": lambda s, b, h, i, j, slopes: s - slopes[h] * jnp.abs(i - j),
        "score_args": (alibi_slopes(2),),
    },
}


@pytest.mark.parametrize("name", essentials(DECODED, ("window", "ALiBi").__contains__))
def test_linen_decodes_as_the_whole_forward(name):
    fn, x = functools.partial(attention_fn, **DECODED[name]), normal(BATCH, 12, WIDTH)
    whole = apply_linen(linen_parameters(), x, fn)
    model = Linen(fn, (("decode", True),))
    cache = model.init(jax.random.key(0), x)["cache"]
    step = jax.jit(lambda cache, x: model.apply({**linen_parameters(), "cache": cache}, x, mutable="cache"))
    for n in range(x.shape[1]):
        y, state = step(cache, x[:, n : n + 1])
        cache = state["cache"]
        np.testing.assert_allclose(y[:, 0], whole[:, n], atol=1e-5)


def test_nnx_decodes_as_the_whole_forward():
    fn, x = functools.partial(attention_fn, **DECODED["window"]), normal(BATCH, 6, WIDTH)
    model = nnx_model(nnx_parameters(), fn)
    whole = model(x)
    for block in model.blocks:
        block.attention.init_cache(x.shape)
    for n in range(x.shape[1]):
        np.testing.assert_allclose(model(x[:, n : n + 1], decode=True)[:, 0], whole[:, n], atol=1e-5)


def test_a_padded_prompt_decodes_with_the_positions_of_its_cache():
    """The user's mask hides the first keys; the query still stands at the last one shown."""
    q, k, v = heads(2, q_len=1, kv_len=9)
    mask = (jnp.arange(9) <= 5) & (jnp.arange(9) >= jnp.array([[0], [4]]))
    got = attention_fn(q, k, v, mask=mask[:, None, None], window=(3, None))
    np.testing.assert_allclose(got, attention(q, k, v, mask=mask[:, None, None] & (jnp.arange(9) >= 2)), atol=1e-6)
    given = attention_fn(q, k, v, mask=mask[:, None, None], window=(3, None), q_offset=7)
    np.testing.assert_allclose(given, attention(q, k, v, mask=mask[:, None, None] & (jnp.arange(9) >= 4)), atol=1e-6)


# ------------------------------------------------------------------------------------------- dropout

RATE = 0.4


def with_the_mask_written_out(query, key, value, *, mask, dropout_rng, dropout_rate, deterministic, **_):
    """Dense attention of a layer whose dropout keeps what jflash.dropout_mask says."""
    weights = nn.dot_product_attention_weights(query, jnp.repeat(key, query.shape[2] // key.shape[2], 2), mask=mask)
    if not deterministic:
        weights *= dropout_mask(dropout_rng, dropout_rate, weights.shape) / (1 - dropout_rate)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(value, query.shape[2] // value.shape[2], 2))


@functools.cache
def dropping(library, fn):
    """(seed, deterministic) -> what a model computes, compiled once for each `deterministic`."""
    apply, parameters = MODELS[library]

    def compiled(seed, deterministic):
        key = jax.random.key(seed)
        how = {"dropout_rng": key} if library == "linen" else {"rngs": nnx.Rngs(key)}
        x, settings = normal(BATCH, LENGTH, WIDTH), (("dropout_rate", RATE),)
        return apply(parameters(), x, fn, settings, mask=CAUSAL, deterministic=deterministic, **how)

    return jax.jit(compiled, static_argnums=1)


@pytest.mark.whole
@pytest.mark.parametrize("library", MODELS)
def test_dropout_in_a_model(library):
    got, same, other = (dropping(library, TILED)(seed, False) for seed in (0, 0, 1))
    np.testing.assert_array_equal(got, same)
    np.testing.assert_allclose(got, dropping(library, with_the_mask_written_out)(0, False), atol=1e-5)
    for x in (other, dropping(library, TILED)(0, True)):
        assert np.abs(got - x).max() > 0.1


def test_no_dropout():
    q, k, v = heads(2)
    for how in ({"dropout_rate": 0.0}, {"dropout_rate": RATE, "deterministic": True}):
        np.testing.assert_array_equal(attention_fn(q, k, v, dropout_rng=jax.random.key(0), **how), attention_fn(q, k, v))


def test_several_batch_dimensions_drop_on_their_own():
    q, k, v = (jnp.broadcast_to(x, (2, 3, *x.shape)) for x in heads())
    how = {"dropout_rate": RATE, "dropout_rng": jax.random.key(0)}
    got = np.asarray(attention_fn(q, k, v, **how)).reshape(6, -1)
    assert len(np.unique(got, axis=0)) == 6
    kept = dropout_mask(jax.random.key(0), RATE, (6, HEADS, LENGTH, LENGTH)).reshape(2, 3, HEADS, LENGTH, LENGTH)
    weights = nn.dot_product_attention_weights(q, k) * kept / (1 - RATE)
    np.testing.assert_allclose(got, jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(6, -1), atol=1e-5)


# ------------------------------------------------------------------------------------------- the interface


def test_linen_finds_all_that_it_passes():
    """It drops what the signature does not name, and a partial must not hide any."""
    names = set(inspect.signature(nn.dot_product_attention).parameters) - {"einsum_dot_general"}  # which no layer passes
    for fn in (attention_fn, functools.partial(attention_fn, causal=True, bias=jnp.zeros(()), window=3)):
        assert names <= set(inspect.signature(fn).parameters)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"module": object()}, ValueError, r"module must be None: .* sown; leave out sow_weights, .* got object"),
        ({"qk_attn_weights_einsum": jnp.einsum}, ValueError, r"qk_attn_weights_einsum must be None: .*, got <"),
        ({"attn_weights_value_einsum": jnp.einsum}, ValueError, r"attn_weights_value_einsum must be None: .*, got <"),
        ({"dropout_rate": 0.1}, ValueError, r"dropout_rng must be given where dropout_rate is not 0 .*, got None beside 0.1"),
        ({"mask": jnp.ones((2, 3, 1, 1, 37))}, ValueError, r"mask must broadcast to .* \(2, 2, 37, 37\), got shape"),
        ({"causal": 1}, TypeError, r"causal must be a bool, got 1"),
        ({"windows": 1}, TypeError, r"unexpected keyword argument 'windows'"),
        ({"implementation": "fast"}, ValueError, r"implementation must be None or one of"),
    ],
)
def test_errors(how, error, message):
    with pytest.raises(error, match=message):
        attention_fn(*heads(2), **how)


def test_errors_of_shapes():
    with pytest.raises(
        ValueError, match=r"mask must broadcast to the batch dimensions of query, \(2, 3\), got shape \(3, 2, 1"
    ):
        attention_fn(*heads(2, 3), mask=jnp.ones((3, 2, 1, 1, LENGTH)))
    for name, option in (("causal", True), ("window", 0), ("score_fn", DECODED["ALiBi"]["score_fn"])):
        with pytest.raises(ValueError, match=f"q_offset must be given where one query .* 37 keys, and {name} depends"):
            attention_fn(*heads(2, q_len=1), **{name: option})


@pytest.mark.parametrize("library", MODELS)
def test_sowing_weights_raises(library):
    apply, parameters = MODELS[library]
    with pytest.raises(ValueError, match=r"module must be None: .* sow_weights"):
        apply(parameters(), normal(1, 3, WIDTH), attention_fn, sow_weights=True)
