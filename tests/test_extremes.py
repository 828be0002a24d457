"""Whatever is finite in float32 works: finfo.min as a mask, logits up to the largest float, forward and backward.

What is expected comes from float64, in which the same numbers are no extremes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, TILED, essentials, normal
from devices import each_device, on

import jflash
from jflash import attention

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LENGTH, HEADS, WIDTH = 40, 2, 4
LOWEST = {name: float(jnp.finfo(name).min) for name in ("float16", "bfloat16", "float32")}
LARGEST = LOWEST["float32"]  # of the negative ones
Q, K, V, DO = (np.asarray(normal(2, LENGTH, HEADS, WIDTH, seed=seed), np.float64) for seed in range(4))


@functools.partial(jax.jit, static_argnames=("implementation", "statics"))
def program(q, k, v, do, floats, rest, statics, implementation):
    """o, lse, and the gradients that do and ones give, by q, k, v and `floats`."""
    fn = lambda q, k, v, floats: attention(
        q, k, v, **floats, **rest, **dict(statics), return_lse=True, implementation=implementation, block_sizes=SMALL_TILES
    )
    (o, lse), pull = jax.vjp(fn, q, k, v, floats)
    return o, lse, pull((do, jnp.where(jnp.isfinite(lse), 1, 0).astype(lse.dtype)))


def results(implementation, dtype, floats=None, rest=None, q=Q, k=K, v=V, do=DO, **statics):
    cast = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, dtype))
    with jax.enable_x64(dtype == "float64"):
        got = program(*cast((q, k, v, do)), cast(floats or {}), rest or {}, tuple(sorted(statics.items())), implementation)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), got)


def assert_right(got, exact, roundings=64):
    """Within some roundings of the largest value of each array, or of the logits that were rounded before softmax."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        largest = np.abs(y[np.isfinite(y)]).max(initial=1.0)
        with np.errstate(invalid="ignore"):
            assert (same | (np.abs(x - y) <= roundings * 2.0**-24 * largest)).all()


# -------------------------------------------------------------------------------------------------------- finfo.min as a mask

ROWS = {
    "of left padding": np.s_[:3],
    "in the middle": np.s_[17:20],
    "of right padding": np.s_[-5:],
    "all": np.s_[:],
}
COLUMNS = {"first": np.s_[:3], "middle": np.s_[15:20], "last": np.s_[-3:], "all but one": np.s_[1:], "all": np.s_[:]}


def masks(lowest):
    """Biases by their broadcast shape, which hold `lowest` in whole rows and in parts of them."""
    whole = np.zeros((2, HEADS, LENGTH, LENGTH))
    for b, rows in enumerate((ROWS["of left padding"], ROWS["in the middle"])):
        whole[b, :, rows] = lowest
        whole[b, :, :, COLUMNS["first"]] = lowest
    whole[1, 1, ROWS["of right padding"]] = lowest
    padding = np.zeros((len(COLUMNS), 2, 1, 1, LENGTH))
    for each, columns in zip(padding, COLUMNS.values(), strict=True):
        each[0, :, :, columns] = lowest
    some_rows = np.where(np.arange(LENGTH)[None, :, None] % 7 < 3, lowest, np.zeros((HEADS, LENGTH, 1)))
    return {"bhqk": [whole], "b1qk": [whole[:, :1]], "qk": [whole[1, 1]], "b11k": padding, "h1q1": [some_rows]}


BESIDE = {
    "alone": ({}, {}),
    "causal": ({"causal": True}, {}),
    "lengths": ({}, {"kv_lengths": np.array([29, 40]), "q_lengths": np.array([40, 33])}),
}


@pytest.mark.parametrize("implementation", TILED)
@pytest.mark.parametrize("beside", essentials(BESIDE, ("alone",).__contains__))
@pytest.mark.parametrize("shape", essentials(["bhqk", "b1qk", "qk", "b11k", "h1q1"], ("bhqk", "b11k").__contains__))
def test_the_lowest_float_as_a_bias(shape, beside, implementation):
    """A row that is hidden so sees the mean of its keys, as in dense softmax; with gradients, by the bias too."""
    statics, lengths = BESIDE[beside]
    for dtype, lowest in LOWEST.items():
        for bias in masks(lowest)[shape]:
            got = results(implementation, "float32", {"bias": bias}, lengths, **statics)
            exact = results("naive", "float64", {"bias": bias}, lengths, **statics)
            # A logit beside 65504 is rounded to multiples of 2**-8, beside the others of nothing at all.
            assert_right(got, exact, roundings=2**16 if dtype == "float16" else 64)


@pytest.mark.parametrize("implementation", [*TILED, "naive"])
def test_two_of_the_lowest_hide_and_infinity_is_no_number(implementation):
    """finfo.min + finfo.min is -inf, which hides; a row with a bias of +inf is NaN, and no other row is."""
    twice = np.float32(LARGEST) * np.ones((2, 1, 1, LENGTH), np.float32)
    with np.errstate(over="ignore"):
        twice = twice + twice
    o, lse, gradients = results(implementation, "float32", {"bias": twice})
    assert not o.any()
    assert (lse == -np.inf).all()
    assert not any(x.any() for x in jax.tree.leaves(gradients))

    infinite = np.zeros((LENGTH, LENGTH))
    infinite[5, 7] = np.inf
    o, lse, _ = results(implementation, "float32", {"bias": infinite})
    rows = np.arange(LENGTH) == 5
    for x in (o.swapaxes(1, 2), lse):
        assert (np.isnan(x[:, :, 5])).all()
        assert np.isfinite(x[:, :, ~rows]).all()


# ------------------------------------------------------------------------------------------------------------- large logits


def few_values():
    """q and k whose products are exact in float32, in few enough values that some keys share the largest logit."""
    random = np.random.default_rng(0)
    return random.integers(-2, 3, Q.shape) / 8, random.integers(-1, 2, K.shape) / 2


@pytest.mark.parametrize("implementation", TILED)
@pytest.mark.parametrize("scale", essentials([3e38, -3e38, 2.0**126, 1e30, -1e20, 2e9], lambda scale: scale == -3e38))
def test_a_scale_up_to_the_largest_float(scale, implementation):
    q, k = few_values()
    scale = float(np.float32(scale))
    got = results(implementation, "float32", q=q, k=k, causal=True, scale=scale)
    assert_right(got[:2], results("naive", "float64", q=q, k=k, causal=True, scale=scale)[:2])
    # dq and dk have the scale as a factor, and may be infinite as they are; dv does not.
    exact = results("naive", "float64", q=q, k=k, causal=True, scale=scale)
    assert_right(got[2][2], exact[2][2])


@pytest.mark.parametrize("implementation", TILED)
@pytest.mark.parametrize("scale", essentials([1e38, -1e38, 1e12], lambda scale: scale == 1e38))
def test_random_logits_as_large(scale, implementation):
    """The forward finds each row's key; the backward, whose products may be rounded otherwise, may lose it, but is finite."""
    q, k = Q / 8, K / 2
    got = results(implementation, "float32", q=q, k=k, causal=True, scale=scale)
    exact = results("naive", "float64", q=q, k=k, causal=True, scale=scale)
    assert_right(got[:2], exact[:2])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


def to_the_ends(s, b, h, i, j):
    """Logits of both signs and of the largest size, some of them equal, and ordinary ones in every fourth row."""
    ends = jnp.where((i + j) % 3 == 0, 3e38, jnp.where((i + j) % 3 == 1, -3e38, s))
    return jnp.where(i % 4 == 0, s, jnp.where(i % 4 == 1, LARGEST, ends)).astype(s.dtype)


@pytest.mark.parametrize("implementation", TILED)
def test_a_score_fn_that_returns_the_largest_floats(implementation):
    got = results(implementation, "float32", causal=True, score_fn=to_the_ends)
    assert_right(got, results("naive", "float64", causal=True, score_fn=to_the_ends))


@pytest.mark.parametrize("implementation", TILED)
def test_huge_queries_and_keys(implementation):
    """The largest logit of a row may be shared: where nothing but the scale is applied, its gradient may vanish then."""
    got = results(implementation, "float32", q=np.full(Q.shape, 133120.0), k=np.full(K.shape, 133120.0), causal=True)
    exact = results("naive", "float64", q=np.full(Q.shape, 133120.0), k=np.full(K.shape, 133120.0), causal=True)
    assert_right(got[:2], exact[:2])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


@pytest.mark.parametrize("implementation", essentials([None, *TILED], lambda name: name != "xla"))  # None is "xla" here
def test_left_padding_of_a_batch_as_hugging_face_masks_it(implementation):
    """12 tokens of which 3 are padding, causal, a loss over the real ones: all gradients were NaN."""
    mask = np.where(np.tril(np.ones((12, 12), bool)) & (np.arange(12) >= 3), 0.0, LARGEST).astype(np.float32)
    q, k, v = (x[:, :12] for x in (Q, K, V))

    def loss(q, k, v, bias, attend):
        return jnp.sum(jnp.sin(attend(q, k, v, bias)[:, 3:]))

    grad = jax.jit(jax.grad(loss, (0, 1, 2, 3)), static_argnums=4)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, mask)]
    expected = grad(*arrays, lambda q, k, v, bias: jax.nn.dot_product_attention(q, k, v, bias))
    own = lambda q, k, v, bias: attention(q, k, v, bias=bias, implementation=implementation)
    drop_in = lambda q, k, v, bias: jflash.dot_product_attention(q, k, v, bias, implementation=implementation)
    for attend in (own, drop_in):
        for x, y in zip(grad(*arrays, attend), expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("device", each_device(id="finfo.min", group="finfo.min"))
def test_the_lowest_float_as_a_bias_of_compiled_kernels(device):
    """Rows that share finfo.min, and rows of 65504 whose exponents a fused multiply-add rounds otherwise."""
    arrays = {name: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for name, x in zip("qkv", (Q, K, V), strict=True)}
    arrays["do"] = np.asarray(jnp.asarray(DO, jnp.bfloat16), np.float64)
    for lowest, roundings in ((LARGEST, 2**17), (LOWEST["float16"], 2**18)):
        (bias,) = masks(lowest)["qk"]
        with on(device):
            statics = (("causal", True),)
            q, k, v, do = (jnp.asarray(x, jnp.bfloat16) for x in arrays.values())
            got = program(q, k, v, do, {"bias": jnp.asarray(bias, jnp.float32)}, {}, statics, "triton")
            got = jax.tree.map(lambda x: np.asarray(x, np.float64), got)
        assert_right(got, results("naive", "float64", {"bias": bias}, **arrays, causal=True), roundings)
