"""Each implementation against float64, over the table of cases, and the properties that hold for all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import ESSENTIAL_CASES, SMALL_TILES, TILED, check, compiling_as_for_users, essentials, judged, normal, references
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jflash import BlockSizes, attention
from jflash.proof import accuracy
from jflash.proof.cases import CASES, Case

pytestmark = pytest.mark.usefixtures("quickly_compiled")  # but for check(), the comparison with float64


@pytest.mark.parametrize("case", essentials(CASES, ESSENTIAL_CASES.__contains__), ids=lambda case: case.name)
def test_agrees_with_float64(case):
    for implementation in TILED:
        check(case, implementation=implementation, block_sizes=SMALL_TILES)


@pytest.mark.parametrize("implementation", essentials([None, *TILED], lambda name: name != "xla"))  # None is "xla" here
def test_default_tiles(implementation):
    case = Case(257, 300, head_dim=40, heads=4, kv_heads=2, causal=True, q_offset=43)
    with compiling_as_for_users(implementation):
        program, arguments = accuracy.program(case, references(case)[0], implementation=implementation)
    got, again = (judged(case, program(*arguments)) for _ in range(2))
    for (_, x), (_, y) in zip(got.items(), again.items(), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), "two runs give the same bits"


# ------------------------------------------------------------------------------------------- drawn at random

SIDE = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def drawn_cases(draw):
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    offset = st.integers(-40, 40)
    return Case(
        q_len=draw(st.integers(1, 70)),
        kv_len=draw(st.integers(1, 70)),
        head_dim=draw(st.sampled_from([1, 8, 17, 32])),
        v_dim=draw(st.sampled_from([None, 3, 48])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(SIDE, SIDE))),
        q_offset=draw(st.one_of(offset, st.tuples(offset, offset))),
    )


@pytest.mark.whole
@settings(max_examples=8)
@given(drawn_cases(), st.sampled_from([16, 32]), st.sampled_from([16, 64]))
@example(Case(7, 100, head_dim=5), 32, 16)  # naive was right by luck: seven rows, all sums of few terms
@example(Case(70, 70, head_dim=32, window=0), 16, 16)  # dp - delta cancels to nothing in every row
def test_any_case_and_any_tiles(case, block_q, block_kv):
    blocks = BlockSizes(
        block_q=block_q, block_kv=block_kv, block_q_dkv=block_kv, block_kv_dkv=block_q, block_q_dq=block_q, block_kv_dq=block_kv
    )
    for implementation in TILED:
        check(case, implementation=implementation, block_sizes=blocks)


# ------------------------------------------------------------------------------------------- what must not matter


@functools.partial(jax.jit, static_argnames=("implementation", "causal", "window", "q_offset"))
def outputs(q, k, v, do, **options):
    """(o, lse, dq, dk, dv) with small tiles."""
    fn = functools.partial(attention, block_sizes=SMALL_TILES, return_lse=True, **options)
    return accuracy.outputs(fn, q, k, v, do, jnp.ones((*q.shape[:-3], q.shape[-2], q.shape[-3]), jnp.float32))


@pytest.mark.parametrize("implementation", ["naive", *TILED])
@pytest.mark.parametrize("poison", essentials([np.nan, np.inf, -np.inf], np.isnan))
@pytest.mark.parametrize(
    ("options", "hidden_keys", "hidden_queries"),
    [
        # 40 queries, 75 keys: the last tiles of 16 and 32 are ragged, and the hidden ones lie in tiles that are visited.
        ({"causal": True}, slice(40, None), slice(0)),
        ({"window": (3, 4), "q_offset": 20}, np.r_[0:17, 64:75], slice(0)),
        ({"causal": True, "q_offset": -10}, slice(30, None), slice(0, 10)),
        ({"window": (2, None), "q_offset": 50}, slice(0, 48), slice(27, None)),
    ],
)
def test_what_nobody_sees_reaches_nobody(implementation, poison, options, hidden_keys, hidden_queries):
    q, k, v, do = normal(1, 40, 2, 8), normal(1, 75, 2, 8, seed=1), normal(1, 75, 2, 8, seed=2), normal(1, 40, 2, 8, seed=3)
    clean = outputs(q, k, v, do, implementation=implementation, **options)
    k, v = k.at[:, hidden_keys].set(poison), v.at[:, hidden_keys].set(poison)
    q = q.at[:, hidden_queries].set(poison)
    poisoned = outputs(q, k, v, do, implementation=implementation, **options)
    for (name, x), (_, y) in zip(clean.items(), poisoned.items(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
    for name in ("dk", "dv"):
        assert not np.asarray(getattr(poisoned, name))[:, hidden_keys].any()


@pytest.mark.parametrize("implementation", TILED)
def test_nan_that_is_seen_shows(implementation):
    q, k, v, do = normal(1, 40, 1, 8), normal(1, 75, 1, 8, seed=1), normal(1, 75, 1, 8, seed=2), normal(1, 40, 1, 8, seed=3)
    o, lse, dq, *_ = outputs(q, k.at[:, 20].set(np.nan), v, do, implementation=implementation, causal=True)
    for x in (o[0, 20:, 0], lse[0, 0, 20:], dq[0, 20:, 0]):
        assert np.isnan(x).all()
    assert not np.isnan(o[0, :16]).any(), "queries of the tiles before it do not see it"


@pytest.mark.parametrize("implementation", TILED)
def test_permuted_keys_are_the_same_keys(implementation):
    q, k, v, do = normal(1, 40, 2, 8), normal(1, 75, 2, 8, seed=1), normal(1, 75, 2, 8, seed=2), normal(1, 40, 2, 8, seed=3)
    order = np.random.default_rng(0).permutation(75)
    straight = outputs(q, k, v, do, implementation=implementation)
    permuted = outputs(q, k[:, order], v[:, order], do, implementation=implementation)
    for (name, x), (_, y) in zip(straight.items(), permuted.items(), strict=True):
        x = x[:, order] if name in ("dk", "dv") else x
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=1e-5, err_msg=name)


@pytest.mark.whole
@pytest.mark.parametrize("implementation", TILED)
@pytest.mark.parametrize("cut", [1, 16, 40, 74])
def test_two_parts_merged_by_their_lse_are_the_whole(implementation, cut):
    q, k, v, do = normal(1, 40, 2, 8), normal(1, 75, 2, 8, seed=1), normal(1, 75, 2, 8, seed=2), normal(1, 40, 2, 8, seed=3)

    def merged(q, k, v):
        attend = functools.partial(attention, return_lse=True, implementation=implementation, block_sizes=SMALL_TILES)
        (o1, lse1), (o2, lse2) = attend(q, k[:, :cut], v[:, :cut]), attend(q, k[:, cut:], v[:, cut:])
        lse = jnp.logaddexp(lse1, lse2)
        weight = lambda part: jnp.exp(part - lse).swapaxes(1, 2)[..., None]
        return o1 * weight(lse1) + o2 * weight(lse2), lse

    whole = outputs(q, k, v, do, implementation=implementation)
    parts = jax.jit(functools.partial(accuracy.outputs, merged))(q, k, v, do, jnp.ones((1, 2, 40)))
    for (name, x), (_, y) in zip(whole.items(), parts.items(), strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6, rtol=1e-5, err_msg=name)


def test_gradients_agree_with_finite_differences_in_float64():
    with jax.enable_x64(True):
        q, k, v = (normal(13, 2, 5, seed=seed, dtype=jnp.float64) for seed in range(3))
        fn = lambda q, k, v: attention(q, k, v, window=(6, 2), return_lse=True, block_sizes=SMALL_TILES)
        check_grads(fn, (q, k, v), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("implementation", TILED)
def test_many_tiles_with_the_same_maximum_do_not_drift(implementation):
    # exp2(slope * m - round(slope * m)) for the factor that rescales the sums is not quite one: 256 tiles of it were seen.
    q, k = jnp.full((16, 1, 8), 1.7), jnp.full((4096, 1, 8), 1.3)
    v = normal(4096, 1, 8)
    fn = functools.partial(attention, block_sizes=SMALL_TILES, return_lse=True, implementation=implementation)
    o, lse = jax.jit(fn)(q, k, v)
    np.testing.assert_allclose(lse, 1.7 * 1.3 * 8**0.5 + np.log(4096), rtol=3e-7)
    np.testing.assert_allclose(o, jnp.broadcast_to(v.mean(0), o.shape), atol=2e-7)


# ------------------------------------------------------------------------------------------- huge logits


@pytest.mark.parametrize("implementation", TILED)
@pytest.mark.parametrize("size", [1e4, 133120.0, 1e9, 1e15])
def test_huge_logits_stay_finite_and_choose_the_largest(implementation, size):
    # The logits are ±size² * 8 * scale: of q = k = 133120 in bfloat16 a known report says that softmax overflows.
    q = jnp.full((40, 1, 8), size, jnp.bfloat16)
    k = jnp.where(jnp.arange(75)[:, None, None] == 33, size, -size) * jnp.ones((1, 1, 8))
    v, do = normal(75, 1, 8, seed=2, dtype=jnp.bfloat16), normal(40, 1, 8, seed=3, dtype=jnp.bfloat16)
    got = outputs(q, k.astype(jnp.bfloat16), v, do, implementation=implementation)
    np.testing.assert_array_equal(got.o, jnp.broadcast_to(v[33], got.o.shape))
    for name, x in got.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), name


@pytest.mark.parametrize("implementation", TILED)
def test_very_negative_logits_and_a_ragged_end(implementation):
    # A padded key has the logit 0: beside logits of -700 its exp(0 - lse) is inf, and inf * 0 was a NaN in dq.
    q, k = jnp.full((40, 1, 8), 5.0) + normal(40, 1, 8) / 10, jnp.full((75, 1, 8), -50.0) + normal(75, 1, 8, seed=1) / 10
    v, do = normal(75, 1, 8, seed=2), normal(40, 1, 8, seed=3)
    naive, got = (outputs(q, k, v, do, implementation=name) for name in ("naive", implementation))
    for (name, x), (_, y) in zip(got.items(), naive.items(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("implementation", TILED)
def test_huge_equal_logits_share(implementation):
    q, k = jnp.full((40, 1, 8), 133120.0, jnp.bfloat16), jnp.full((75, 1, 8), 133120.0, jnp.bfloat16)
    v = normal(75, 1, 8, seed=2, dtype=jnp.bfloat16)
    got = outputs(q, k, v, normal(40, 1, 8, dtype=jnp.bfloat16), implementation=implementation)
    np.testing.assert_allclose(
        got.o.astype(np.float32), np.broadcast_to(v.astype(np.float32).mean(0), got.o.shape), atol=4e-3, rtol=0
    )
    for name, x in got.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), name


# ------------------------------------------------------------------------------------------- the call


@pytest.mark.parametrize("implementation", ["naive", *TILED])
def test_without_batch_and_without_lse(implementation):
    q, k, v = normal(40, 4, 8), normal(75, 2, 8, seed=1), normal(75, 2, 5, seed=2)
    fn = functools.partial(attention, implementation=implementation, causal=True, block_sizes=SMALL_TILES)
    o, lse = fn(q, k, v, return_lse=True)
    assert (o.shape, lse.shape, lse.dtype) == ((40, 4, 5), (4, 40), jnp.float32)
    batched, batched_lse = fn(q[None], k[None], v[None], return_lse=True)
    np.testing.assert_array_equal(o, batched[0])
    np.testing.assert_array_equal(lse, batched_lse[0])
    np.testing.assert_array_equal(o, fn(q, k, v))


@pytest.mark.parametrize("implementation", ["naive", *TILED])
@pytest.mark.parametrize("shape", [(0, 5, 3, 1), (2, 0, 3, 1), (2, 5, 0, 1), (2, 5, 3, 0)])
def test_nothing_to_attend_to(implementation, shape):
    batch, q_len, kv_len, heads = shape
    q, k = jnp.ones((batch, q_len, heads, 4), jnp.bfloat16), jnp.ones((batch, kv_len, heads, 4), jnp.bfloat16)
    got = accuracy.outputs(
        lambda *qkv: attention(*qkv, return_lse=True, implementation=implementation),
        q, k, k, jnp.ones_like(q), jnp.ones((batch, heads, q_len)),
    )  # fmt: skip
    assert (got.o.shape, got.o.dtype, got.lse.shape, got.lse.dtype) == (q.shape, q.dtype, (batch, heads, q_len), jnp.float32)
    assert (got.lse == -jnp.inf).all()
    assert not any(x.any() for x in (got.o, got.dq, got.dk, got.dv))


def test_traced_offset_and_one_for_each_batch_element():
    q, k, v = normal(2, 40, 2, 8), normal(2, 75, 2, 8, seed=1), normal(2, 75, 2, 8, seed=2)
    for implementation in ("naive", *TILED):
        fn = functools.partial(attention, implementation=implementation, causal=True, block_sizes=SMALL_TILES)
        traced = jax.jit(lambda offset, fn=fn: fn(q, k, v, q_offset=offset))
        for offset in (35, -3):
            np.testing.assert_allclose(traced(offset), fn(q, k, v, q_offset=offset), atol=1e-6)
        both = traced(jnp.array([35, -3]))
        np.testing.assert_allclose(both[0], fn(q, k, v, q_offset=35)[0], atol=1e-6)
        np.testing.assert_allclose(both[1], fn(q, k, v, q_offset=-3)[1], atol=1e-6)


def test_decoding_step_by_step_is_attention_over_the_whole():
    q, k, v = normal(20, 2, 8), normal(20, 2, 8, seed=1), normal(20, 2, 8, seed=2)
    step = jax.jit(lambda i: attention(q[i][None], k, v, causal=True, q_offset=i))
    steps = jnp.concatenate([step(i) for i in range(20)])
    np.testing.assert_allclose(steps, attention(q, k, v, causal=True), atol=1e-6)


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST, "float32", None])
def test_precision_is_accepted_as_in_einsum(precision):
    q = normal(20, 1, 8)
    for implementation in ("naive", *TILED):
        o = attention(q, q, q, precision=precision, implementation=implementation)
        np.testing.assert_allclose(o, attention(q, q, q, implementation="naive"), atol=1e-6)
