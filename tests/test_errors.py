"""Bad input: each error names the argument, what was expected and what came."""

import jax
import jax.numpy as jnp
import pytest

from jflash import BlockSizes, attention, dropout_mask


def x(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


Q, KV = x(2, 8, 4, 16), x(2, 9, 2, 16)
KEYS = jax.random.split(jax.random.key(0), 3)
PLUS = lambda s, b, h, i, j, table: s + table[h]


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ((x(8, 16), x(8, 16), x(8, 16)), ValueError, r"q must be \[batch, .* got shape \(8, 16\)"),
        ((x(1, 1, 8, 4, 16), KV, KV), ValueError, r"q must be .* got shape \(1, 1, 8, 4, 16\)"),
        ((Q, KV[0], KV), ValueError, r"k must have the rank of q, 4, got shape \(9, 2, 16\)"),
        ((Q, KV, KV[0]), ValueError, r"v must have the rank of q, 4, got shape \(9, 2, 16\)"),
        ((Q, KV[:1], KV[:1]), ValueError, r"k must have the batch size of q, 2, got shape \(1, 9, 2, 16\)"),
        ((Q, KV, KV[:1]), ValueError, r"v must have the batch size of q, 2, got shape \(1, 9, 2, 16\)"),
        ((Q, x(2, 9, 3, 16), x(2, 9, 3, 16)), ValueError, r"heads of q must be a multiple of .* 3, got 4"),
        ((Q, x(2, 9, 0, 16), x(2, 9, 0, 16)), ValueError, r"heads of q must be a multiple of .* 0, got 4"),
        ((Q, x(2, 9, 2, 8), KV), ValueError, r"k must have the head_dim of q, 16, got shape \(2, 9, 2, 8\)"),
        ((Q, KV, x(2, 8, 2, 16)), ValueError, r"v must have the kv_len and kv_heads of k, \(9, 2\), got shape \(2, 8, 2, 16\)"),
        ((Q, KV, x(2, 9, 1, 16)), ValueError, r"v must have the kv_len and kv_heads of k, \(9, 2\), got shape"),
        ((x(2, 8, 4, 0), x(2, 9, 2, 0), KV), ValueError, r"q must have a width of at least 1, got shape \(2, 8, 4, 0\)"),
        ((Q, KV.astype(jnp.bfloat16), KV), TypeError, r"k must have the dtype of q, float32, got bfloat16"),
        ((Q, KV, KV.astype(jnp.float16)), TypeError, r"v must have the dtype of q, float32, got float16"),
        ((Q.astype(int), KV, KV), TypeError, r"q must be float16, bfloat16, float32 or float64, got int32"),
        ((Q, KV, KV.astype(bool)), TypeError, r"v must be float16, bfloat16, float32 or float64, got bool"),
    ],
)
def test_arrays(arrays, error, message):
    with pytest.raises(error, match=message):
        attention(*arrays)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": -1}, ValueError, r"window must not be negative, got \(-1, -1\)"),
        ({"window": (3, -2)}, ValueError, r"window must not be negative, got \(3, -2\)"),
        ({"window": (3, 2, 1)}, TypeError, r"window must be an int, a pair \(left, right\) or None, got \(3, 2, 1\)"),
        ({"window": 2.5}, TypeError, r"window must be an int, a pair \(left, right\) or None, got 2.5"),
        ({"window": (1.5, None)}, TypeError, r"window must hold ints or None, got \(1.5, None\)"),
        ({"causal": "yes"}, TypeError, r"causal must be a bool, got 'yes'"),
        ({"q_offset": 1.0}, TypeError, r"q_offset must be an int or an integer array, got float32"),
        ({"q_offset": True}, TypeError, r"q_offset must be an int or an integer array, got True"),
        ({"q_offset": 2**30}, ValueError, r"q_offset must lie within ±536870912, got 1073741824"),
        ({"q_offset": jnp.zeros(3, int)}, ValueError, r"q_offset must be .* \(2,\), got shape \(3,\)"),
        ({"scale": "big"}, TypeError, r"scale must be a Python number, got 'big'"),
        ({"scale": float("nan")}, ValueError, r"scale must be finite, got nan"),
        (
            {"mask": jnp.ones((8, 9), jnp.int8)},
            TypeError,
            r"mask must be bool, .* got int8: give what is added to logits as bias",
        ),
        (
            {"mask": jnp.ones((3, 1, 8, 9), bool)},
            ValueError,
            r"mask must broadcast to .* \(2, 4, 8, 9\), got shape \(3, 1, 8, 9\)",
        ),
        ({"mask": jnp.ones((1, 2, 4, 8, 9), bool)}, ValueError, r"mask must broadcast to .*, got shape \(1, 2, 4, 8, 9\)"),
        ({"bias": x(8, 8)}, ValueError, r"bias must broadcast to .* \(2, 4, 8, 9\), got shape \(8, 8\)"),
        ({"bias": x(8, 9, dtype=int)}, TypeError, r"bias must be a float of at most 32 bits beside q of float32, got int32"),
        ({"segment_ids": jnp.zeros((2, 8), int)}, ValueError, r"segment_ids must be a pair .* q_len, 8, and kv_len, 9, differ"),
        (
            {"segment_ids": (jnp.zeros((2, 8), int), jnp.zeros((2, 8), int))},
            ValueError,
            r"segment_ids\[1\] must .* \(2, 9\), got \(2, 8\)",
        ),
        ({"segment_ids": (x(2, 8), x(2, 9))}, TypeError, r"segment_ids\[0\] must be an integer array, got float32"),
        ({"segment_ids": (1, 2, 3)}, TypeError, r"segment_ids must be one array or a pair \(q, kv\), got 3 of them"),
        ({"q_lengths": 1.5}, TypeError, r"q_lengths must be an int or an integer array, got float32"),
        ({"kv_lengths": jnp.zeros(3, int)}, ValueError, r"kv_lengths must be .* \(2,\), got shape \(3,\)"),
        ({"softcap": 0.0}, ValueError, r"softcap must be positive, got 0.0"),
        ({"softcap": "much"}, TypeError, r"softcap must be a Python number, got 'much'"),
        ({"sinks": x(3)}, ValueError, r"sinks must have the shape \[heads\], \(4,\), got shape \(3,\)"),
        ({"sinks": jnp.zeros(4, int)}, TypeError, r"sinks must be a float of at most 32 bits .* got int32"),
        ({"dropout_rate": 1.0}, ValueError, r"dropout_rate must lie in \[0, 1\), got 1.0"),
        ({"dropout_rate": -0.1}, ValueError, r"dropout_rate must lie in \[0, 1\), got -0.1"),
        ({"dropout_rate": 0.1}, ValueError, r"dropout_key must be given where dropout_rate is not 0, got None beside 0.1"),
        ({"dropout_rate": 0.1, "dropout_key": x(2)}, TypeError, r"dropout_key must be a jax.random key or .* got float32\[2\]"),
        ({"dropout_rate": 0.1, "dropout_key": KEYS}, ValueError, r"dropout_key must be one jax.random key, .* shape \(3,\)"),
        ({"score_fn": 1.0}, TypeError, r"score_fn must be a function, got 1.0"),
        (
            {"score_fn": lambda s, b, h, i, j: s[0]},
            TypeError,
            r"score_fn must keep the shape .* float32\[8, 16\], got float32\[16\]",
        ),
        ({"score_fn": lambda s, b, h, i, j: s.astype(jnp.bfloat16)}, TypeError, r"score_fn must keep .* got bfloat16\[8, 16\]"),
        ({"score_fn": lambda s, b, h, i, j: (s, s)}, TypeError, r"score_fn must return one array, got \("),
        (
            {"score_fn": lambda s, b, h, i, j: s + KV[0, 0, 0]},
            ValueError,
            r"score_fn must not close over arrays, .* give them as score_args",
        ),
        ({"score_args": (x(4),)}, ValueError, r"score_args must be given together with score_fn"),
        ({"score_fn": PLUS, "score_args": x(4)}, TypeError, r"score_args must be a tuple of arrays, got ArrayImpl"),
        ({"score_fn": PLUS, "score_args": (x(0),)}, ValueError, r"score_args\[0\] must not be empty, got shape \(0,\)"),
        ({"score_fn": PLUS, "score_args": (x(4, 2),)}, IndexError, r"one index for each dimension of \(4, 2\), got 1"),
        ({"score_fn": lambda s, b, h, i, j, t: s + t[s], "score_args": (x(4),)}, TypeError, r"takes integers as indices, got"),
        ({"score_fn": lambda s, b, h, i, j, t: s + t, "score_args": (x(4),)}, TypeError, r"unsupported operand"),
        ({"mask_fn": lambda b, h, i, j: i - j}, TypeError, r"mask_fn must return bools that broadcast .* got int32\[8, 16\]"),
        (
            {"mask_fn": lambda b, h, i, j: KV[0, 0, 0] > j},
            ValueError,
            r"mask_fn must not close over arrays, .* give them as mask",
        ),
        ({"implementation": "cudnn"}, ValueError, r"implementation must be None or one of .*'triton'.*, got 'cudnn'"),
        ({"block_sizes": 64}, TypeError, r"block_sizes must be a jflash.BlockSizes or None, got 64"),
    ],
)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        attention(Q, KV, KV, **options)


def test_a_traced_scale_raises_and_says_what_to_do():
    with pytest.raises(TypeError, match="scale must be a Python number, got a traced value: multiply q by it instead"):
        jax.jit(lambda scale: attention(Q, KV, KV, scale=scale))(0.5)


def test_a_traced_rate_or_cap_raises():
    for name in ("dropout_rate", "softcap"):
        with pytest.raises(TypeError, match=f"{name} must be a Python number, got a traced value"):
            jax.jit(lambda x, name=name: attention(Q, KV, KV, **{name: x}))(0.5)


def test_a_function_that_closes_over_a_traced_array_raises():
    with pytest.raises(ValueError, match=r"score_fn must not close over arrays, .* give them as score_args"):
        jax.jit(lambda t: attention(Q, KV, KV, score_fn=lambda s, b, h, i, j: s + t[h]))(x(4))


def test_inputs_without_batch_have_options_without_batch():
    with pytest.raises(
        ValueError, match=r"bias must broadcast to \[heads, q_len, kv_len\], \(4, 8, 9\), got shape \(2, 4, 8, 9\)"
    ):
        attention(Q[0], KV[0], KV[0], bias=x(2, 4, 8, 9))
    with pytest.raises(ValueError, match=r"segment_ids\[0\] must have the shape \[length\], \(8,\), got \(1, 8\)"):
        attention(Q[0], KV[0], KV[0], segment_ids=(jnp.zeros((1, 8), int), jnp.zeros((1, 9), int)))


def test_dropout_mask():
    with pytest.raises(ValueError, match=r"shape must be \(batch, heads, q_len, kv_len\) or .*, got \(8, 9\)"):
        dropout_mask(KEYS[0], 0.1, (8, 9))
    with pytest.raises(ValueError, match=r"rate must lie in \[0, 1\), got 1.5"):
        dropout_mask(KEYS[0], 1.5, (4, 8, 9))


@pytest.mark.parametrize("name", ["block_q", "block_kv", "num_warps", "block_q_dkv", "num_warps_dq"])
def test_block_sizes_are_powers_of_two(name):
    with pytest.raises(ValueError, match=rf"BlockSizes.{name} must be a power of two, at least \d+, got 48"):
        BlockSizes(**{name: 48})
    with pytest.raises(TypeError, match=rf"BlockSizes.{name} must be an int or None, got 64.0"):
        BlockSizes(**{name: 64.0})


def test_block_sizes_have_a_least():
    with pytest.raises(ValueError, match=r"BlockSizes.block_kv must be a power of two, at least 16, got 8"):
        BlockSizes(block_kv=8)
    with pytest.raises(ValueError, match=r"BlockSizes.num_stages must be at least 1, got 0"):
        BlockSizes(num_stages=0)


@pytest.mark.parametrize("implementation", ["triton", "interpret"])
def test_what_the_kernels_cannot_take(implementation):
    with jax.enable_x64(True), pytest.raises(TypeError, match=rf"{implementation}.* float16, bfloat16 or float32, got float64"):
        attention(*(x(8, 1, 16, dtype=jnp.float64),) * 3, implementation=implementation)
    with pytest.raises(ValueError, match=rf"{implementation}.* head_dim of at most 256, got 264"):
        attention(*(x(8, 1, 264),) * 3, implementation=implementation)
    with pytest.raises(ValueError, match=rf"{implementation}.* v_dim of at most 256, got 300"):
        attention(x(8, 1, 16), x(8, 1, 16), x(8, 1, 300), implementation=implementation)


def test_the_kernels_do_not_run_on_a_cpu():
    with pytest.raises(ValueError, match="interpret"):
        attention(*(x(8, 1, 16),) * 3, implementation="triton")
