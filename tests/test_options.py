"""What the score of a pair may be: options in all combinations, rows that see nothing, and traps that others fell into."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, TILED, check, compiling_quickly, essentials, judged, normal, references
from hypothesis import given, settings
from hypothesis import strategies as st

from jflash import BlockSizes, alibi_slopes, attention, dropout_mask
from jflash.kernels import dscore
from jflash.proof import accuracy
from jflash.proof.cases import Case

pytestmark = pytest.mark.usefixtures("quickly_compiled")  # but for check(), the comparison with float64

# ------------------------------------------------------------------------------------------- combinations

SWITCHES = {
    "causal": {"causal": True},
    "window": {"window": (30, 12)},
    "offset": {"q_offset": (5, -9)},
    "segments": {"segments": "packed"},
    "q_lengths": {"q_lengths": (40, 22)},
    "kv_lengths": {"kv_lengths": (17, 51)},
    "mask": {"mask": "b1qk"},
    "mask_fn": {"mask_fn": "thirds"},
    "scale": {"scale": -0.6},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": "1hqk", "bias_holes": True},
    "score_fn": {"score_fn": "t5"},
    "sinks": {"sinks": True},
    "dropout": {"dropout_rate": 0.25},
    "group": {"heads": 4},
}
SMALL = Case(40, 51, head_dim=16)


def switched_on(*names: str) -> Case:
    return dataclasses.replace(SMALL, **{field: value for name in names for field, value in SWITCHES[name].items()})


def sets_that_cover_all_pairs(size: int) -> list[tuple[str, ...]]:
    """Sets of `size` options, chosen greedily until any two options have met in one of them."""
    missing = set(map(frozenset, itertools.combinations(SWITCHES, 2)))
    sets = []
    while missing:
        chosen = min(sorted(pair) for pair in missing)
        while len(chosen) < size:
            gains = {
                name: sum(frozenset((name, other)) in missing for other in chosen) for name in SWITCHES if name not in chosen
            }
            chosen.append(max(gains, key=lambda name: gains[name]))
        missing -= set(map(frozenset, itertools.combinations(chosen, 2)))
        sets.append(tuple(chosen))
    return sets


SETS = sets_that_cover_all_pairs(5)


@pytest.mark.parametrize("implementation", TILED)
@pytest.mark.parametrize("names", essentials(SETS, SETS[:1].__contains__), ids=" ".join)  # CASES has all of them at once
def test_every_pair_of_options(names, implementation):
    check(switched_on(*names), implementation=implementation, block_sizes=SMALL_TILES)


PATTERNS = st.sampled_from([None, "bhqk", "1hqk", "b11k", "qk", "h1k", "q1", "1"])


@st.composite
def drawn_cases(draw):
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    q_len, kv_len = draw(st.integers(1, 50)), draw(st.integers(1, 70))
    some = lambda strategy: draw(st.one_of(st.none(), strategy))
    lengths = lambda longest: some(st.tuples(st.integers(0, longest), st.integers(0, longest)))
    return Case(
        q_len=q_len,
        kv_len=kv_len,
        head_dim=16,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        causal=draw(st.booleans()),
        q_offset=draw(st.integers(-20, 40)),
        segments=some(st.sampled_from(["packed", "unsorted", "one"])),
        q_lengths=lengths(q_len),
        kv_lengths=lengths(kv_len),
        mask=draw(PATTERNS),
        mask_fn=some(st.just("thirds")),
        softcap=some(st.sampled_from([0.5, 20.0])),
        bias=draw(PATTERNS),
        bias_holes=draw(st.booleans()),
        score_fn=some(st.sampled_from(["alibi", "t5", "tanh"])),
        sinks=draw(st.booleans()),
        dropout_rate=draw(st.sampled_from([0.0, 0.0, 0.5])),
    )


@pytest.mark.whole
@settings(max_examples=6)
@given(drawn_cases(), st.sampled_from([16, 32]), st.sampled_from([16, 64]))
def test_any_options_and_any_tiles(case, block_q, block_kv):
    blocks = BlockSizes(
        block_q=block_q, block_kv=block_kv, block_q_dkv=block_kv, block_kv_dkv=block_q, block_q_dq=block_q, block_kv_dq=block_kv
    )
    for implementation in TILED:
        check(case, implementation=implementation, block_sizes=blocks)


# ------------------------------------------------------------------------------------------- what must not matter


def arrays(q_len=40, kv_len=75, heads=2, kv_heads=2, dtype=jnp.float32):
    shapes = (1, q_len, heads, 16), (1, kv_len, kv_heads, 16), (1, kv_len, kv_heads, 16), (1, q_len, heads, 16)
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


FUNCTIONS = ("mask_fn", "score_fn")


@functools.partial(
    jax.jit, static_argnames=("implementation", "causal", "window", "softcap", "dropout_rate", "scale", *FUNCTIONS)
)
def outputs(q, k, v, do, parameters=None, **options):
    """(o, lse, dq, dk, dv, dscore) with small tiles."""
    fn = functools.partial(attention, block_sizes=SMALL_TILES, return_lse=True, **options)
    lse = jnp.ones((*q.shape[:-3], q.shape[-2], q.shape[-3]), jnp.float32)
    return accuracy.outputs(fn, q, k, v, do, lse, **(parameters or {}))


def assert_same(got, expected, **tolerance):
    for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
        if tolerance:
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), err_msg=name, **tolerance)
        else:
            np.testing.assert_array_equal(x, y, err_msg=name)


EVERYWHERE = pytest.mark.parametrize("implementation", ["naive", *TILED])


@pytest.mark.whole
@EVERYWHERE
@pytest.mark.parametrize(
    "options",
    [
        {"mask": jnp.ones((1, 2, 40, 75), bool)},
        {"mask": jnp.ones((1, 1), bool)},
        {"mask_fn": lambda b, h, i, j: j >= 0},
        {"segment_ids": (jnp.full((1, 40), 7), jnp.full((1, 75), 7))},
        {"q_lengths": jnp.array([40]), "kv_lengths": 75},
        {"window": (1000, 1000)},
        {"dropout_rate": 0.0, "dropout_key": jax.random.key(0)},
    ],
    ids=lambda options: " ".join(options),
)
def test_what_hides_nothing_changes_no_bit(implementation, options):
    # Without fusion, so that each operation rounds as it is written: fused, XLA's CPU compiler orders the sums of a product
    # by what else is in the same loop.
    def compiled(**options):
        fn = functools.partial(attention, block_sizes=SMALL_TILES, return_lse=True, implementation=implementation, **options)
        inputs = *arrays(), jnp.ones((1, 2, 40))
        lowered = jax.jit(functools.partial(accuracy.outputs, fn)).lower(*inputs)
        return lowered.compile(compiler_options={"xla_disable_hlo_passes": "fusion"})(*inputs)

    assert_same(compiled(**options), compiled())


@EVERYWHERE
def test_a_mask_and_a_bias_that_say_the_same_agree(implementation):
    mask = jnp.asarray(np.random.default_rng(0).random((1, 2, 40, 75)) < 0.6).at[:, :, 3].set(False)
    masked = outputs(*arrays(), implementation=implementation, mask=mask)
    biased = outputs(*arrays(), implementation=implementation, bias=jnp.where(mask, 0.0, -jnp.inf))
    assert_same(biased, masked, atol=2e-6, rtol=2e-6)


@pytest.mark.whole
@EVERYWHERE
@pytest.mark.parametrize(
    ("options", "sinks"),
    [
        ({"mask": jnp.zeros((40, 75), bool)}, False),
        ({"mask_fn": lambda b, h, i, j: i + j < 0}, False),
        ({"bias": jnp.full((40, 1), -jnp.inf)}, False),
        ({"q_lengths": 0}, False),
        ({"kv_lengths": 0}, False),
        ({"segment_ids": (jnp.zeros((1, 40), int), jnp.ones((1, 75), int))}, False),
        ({"q_offset": 500, "window": (3, 3)}, False),
        ({"mask": jnp.zeros((40, 75), bool), "bias": jnp.full((40, 1), -jnp.inf)}, True),
        ({"kv_lengths": 0, "dropout_rate": 0.5, "dropout_key": jax.random.key(0), "softcap": 2.0}, True),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else str(x),
)
def test_rows_that_see_nothing(implementation, options, sinks):
    q, k, v, do = arrays()
    options = dict(options)
    parameters = {"sinks": jnp.array([0.3, -2.0])} if sinks else {}
    if "bias" in options:
        parameters["bias"] = options.pop("bias")
    got = outputs(q, k, v, do, parameters, implementation=implementation, **options)
    for name, x in got.items():
        if name == "lse":
            np.testing.assert_allclose(x, np.broadcast_to([[[0.3], [-2.0]]], x.shape) if sinks else -np.inf, rtol=1e-6)
        elif "sinks" in name:
            np.testing.assert_allclose(x, [40.0, 40.0], rtol=1e-6)  # the cotangent of lse alone, once a row
        else:
            assert not np.asarray(x).any(), name


@EVERYWHERE
def test_an_empty_document_and_lengths_of_any_tile(implementation):
    # A segment of length 0 beside others, one shorter than a tile, and kv_len shorter than one tile, in the same batch.
    for kv_len in (5, 75):
        ids = jnp.asarray(np.repeat([0, 2, 3], [kv_len - 3, 1, 2]))[None]
        queries = jnp.asarray(np.repeat([0, 1, 3], [20, 15, 5]))[None]
        got = outputs(*arrays(kv_len=kv_len), implementation=implementation, segment_ids=(queries, ids))
        naive = outputs(*arrays(kv_len=kv_len), implementation="naive", mask=queries[0][:, None] == ids)
        assert_same(got, naive, atol=5e-6, rtol=1e-5)
        assert not np.asarray(got.o[:, 20:35]).any()
        assert not np.asarray(got.dk[:, kv_len - 3]).any()


@EVERYWHERE
@pytest.mark.parametrize("poison", essentials([np.nan, np.inf], np.isnan))
@pytest.mark.parametrize("how", ["mask", "mask_fn", "segment_ids", "kv_lengths", "bias under mask"])
def test_what_nobody_sees_reaches_nobody(implementation, poison, how):
    q, k, v, do = arrays(heads=4)
    hidden = np.isin(np.arange(75), [0, 3, 20, 21, 74] if how != "kv_lengths" else np.arange(60, 75))
    mask = jnp.asarray(~hidden) & jnp.ones((1, 4, 40, 1), bool)
    options = {
        "mask": {"mask": mask},
        "mask_fn": {"mask_fn": lambda b, h, i, j: (j != 0) & (j != 3) & (j != 20) & (j != 21) & (j != 74)},
        "segment_ids": {"segment_ids": (jnp.full((1, 40), 4), jnp.asarray(np.where(hidden, np.arange(75) % 3, 4))[None])},
        "kv_lengths": {"kv_lengths": jnp.array([60])},
        "bias under mask": {"mask": mask},
    }[how]
    parameters = {"bias": normal(1, 4, 1, 75)} if how == "bias under mask" else {}
    clean = outputs(q, k, v, do, parameters, implementation=implementation, **options)
    k, v = k.at[:, hidden].set(poison), v.at[:, hidden].set(poison)
    if parameters:
        parameters = {"bias": parameters["bias"].at[..., hidden].set(poison)}
    poisoned = outputs(q, k, v, do, parameters, implementation=implementation, **options)
    assert_same(poisoned, clean)
    for name in ("dk", "dv"):
        assert not np.asarray(getattr(poisoned, name))[:, hidden].any()


@pytest.mark.whole
@EVERYWHERE
@pytest.mark.parametrize("how", ["bias", "score_fn"])
def test_minus_infinity_hides_what_is_finite_as_a_mask_does(implementation, how):
    q, k, v, do = arrays()
    hidden = np.isin(np.arange(75), [0, 3, 20, 21, 74])
    k, v = k.at[:, hidden].multiply(1e15), v.at[:, hidden].multiply(1e15)
    clean = outputs(q, k, v, do, implementation=implementation, mask=jnp.asarray(~hidden)[None])
    if how == "bias":
        got = outputs(q, k, v, do, {"bias": jnp.where(hidden, -jnp.inf, 0.0)[None]}, implementation=implementation)
        assert not np.asarray(got.dscore["bias"])[:, hidden].any()
    else:
        table = jnp.asarray(hidden, jnp.int32)
        read = lambda s, b, h, i, j, table: jnp.where(table[j] > 0, -jnp.inf, s)
        got = outputs(q, k, v, do, implementation=implementation, score_fn=read, score_args=(table,))
    assert_same(got._replace(dscore={}), clean, atol=2e-6, rtol=2e-6)  # which has the scale in the exponent
    for name in ("dk", "dv"):
        assert not np.asarray(getattr(got, name))[:, hidden].any()


@pytest.mark.parametrize("implementation", TILED)
def test_a_query_that_sees_nothing_may_hold_anything(implementation):
    q, k, v, do = arrays()
    mask = jnp.ones((40, 75), bool).at[jnp.array([1, 17, 39])].set(False)
    clean = outputs(q, k, v, do, implementation=implementation, mask=mask)
    assert_same(outputs(q.at[:, [1, 17, 39]].set(jnp.nan), k, v, do, implementation=implementation, mask=mask), clean)


@EVERYWHERE
def test_the_derivative_of_a_function_where_it_is_hidden_does_not_matter(implementation):
    # log(i - j + 1) is NaN behind the query, and so are its derivatives by the rates and the power.
    case = Case(40, 40, head_dim=16, score_fn="decay", causal=True)
    q, k, v, do, dlse = (jnp.asarray(x, jnp.float32) for x in case.arrays())
    parameters = jax.tree.map(jnp.float32, case.parameters())
    fn = functools.partial(attention, implementation=implementation, return_lse=True, block_sizes=SMALL_TILES, **case.options())
    if implementation == "naive":
        pytest.skip("plain JAX multiplies the NaN by 0: the double-where trick is the user's there")
    for name, x in jax.jit(functools.partial(accuracy.outputs, fn))(q, k, v, do, dlse, **parameters).items():
        assert np.isfinite(x).all(), name


# ------------------------------------------------------------------------------------------- one option at a time


@EVERYWHERE
def test_softcap_of_large_logits_in_float16(implementation):
    q, k, v, do = arrays(dtype=jnp.float16)
    got = outputs(60 * q, 60 * k, v, do, implementation=implementation, softcap=30.0)  # logits of 10**4
    for name, x in got.items():
        assert np.isfinite(np.asarray(x, np.float32)).all(), name
    assert np.abs(got.lse).max() < 30 + np.log(75)


@EVERYWHERE
def test_functions_see_positions(implementation):
    # A chunk of a longer sequence, at its offset, gives what the whole does.
    q, k, v, _ = arrays(q_len=75)
    fn = functools.partial(
        attention, implementation=implementation, block_sizes=SMALL_TILES, score_args=(alibi_slopes(2),),
        score_fn=lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i - j), mask_fn=lambda b, h, i, j: (i - j) % 3 != 1,
    )  # fmt: skip
    np.testing.assert_allclose(fn(q[:, 50:], k, v, q_offset=50), fn(q, k, v)[:, 50:], atol=2e-6)


# A CPU computes chains of bfloat16 in float32 unless it is told to round where the program says so, as kernels on a GPU do.
AS_IT_SAYS = {"xla_allow_excess_precision": False}


@EVERYWHERE
@pytest.mark.parametrize("score_fn", essentials(["alibi", "decay"], ("decay",).__contains__))
def test_score_fn_computes_with_bfloat16_arrays_in_float32(implementation, score_fn):
    case = Case(75, 75, head_dim=16, heads=2, kv_heads=1, causal=True, score_fn=score_fn, dtype="bfloat16")
    *arguments, dlse = references(case)[0]
    arguments = *(jnp.asarray(x, case.dtype) for x in arguments), jnp.asarray(dlse, jnp.float32)
    parameters = jax.tree.map(lambda x: jnp.asarray(x, case.dtype), case.parameters())
    fn = functools.partial(attention, implementation=implementation, return_lse=True, block_sizes=SMALL_TILES, **case.options())
    with compiling_quickly():
        program = jax.jit(functools.partial(accuracy.outputs, fn)).lower(*arguments, **parameters)
        compiled = program.compile(compiler_options=AS_IT_SAYS)
    got = judged(case, compiled(*arguments, **parameters))
    assert all(x.dtype == case.dtype for x in jax.tree.leaves(got.dscore))


@EVERYWHERE
@pytest.mark.parametrize(
    ("dtype", "of_args", "told"),
    [("bfloat16", "bfloat16", "float32"), ("float16", "float32", "float32"), ("float64", "float16", "float64")],
)
def test_what_score_fn_is_told_is_as_wide_as_the_logits(implementation, dtype, of_args, told):
    seen = set()

    def score_fn(s, b, h, i, j, table, weight):
        seen.update(x.dtype.name for x in (s, table[h], table[i - j], weight, table[0] * weight))
        seen.update(x.dtype.name for x in (b, h, i, j))
        return s + weight * table[i - j]

    with jax.enable_x64(dtype == "float64"):
        q, k, v = (jnp.ones((1, 5, 2, 4), dtype) for _ in range(3))
        args = jnp.ones((2,), of_args), jnp.ones((), of_args)
        loss = lambda args: jnp.sum(attention(q, k, v, score_fn=score_fn, score_args=args, implementation=implementation))
        if (implementation, dtype) != ("interpret", "float64"):  # which the kernels do not take
            grads = jax.jit(jax.grad(loss)).lower(args).out_info
            assert {x.dtype.name for x in grads} == {of_args}
            assert seen == {told, "int32"}


@EVERYWHERE
def test_integer_score_args_have_no_gradient_and_are_read(implementation):
    q, k, v, _ = arrays()
    table = jnp.arange(75, dtype=jnp.int32) % 4
    fn = lambda q, table, weight: attention(
        q, k, v, implementation=implementation, block_sizes=SMALL_TILES, score_args=(table, weight),
        score_fn=lambda s, b, h, i, j, table, weight: s + weight * table[j],
    )  # fmt: skip
    loss = lambda q, table, weight: jnp.sum(fn(q, table, weight) ** 2)
    dq, dtable, dweight = jax.grad(loss, (0, 1, 2), allow_int=True)(q, table, jnp.float32(0.5))
    expected = attention(q, k, v, implementation="naive", bias=0.5 * (jnp.arange(75) % 4)[None, :])
    np.testing.assert_allclose(fn(q, table, jnp.float32(0.5)), expected, atol=2e-6)
    assert dtable.dtype == jax.dtypes.float0
    assert np.isfinite(dq).all()
    assert dweight != 0


@pytest.mark.parametrize("implementation", TILED)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_bias_and_its_gradient_keep_their_own_dtype(implementation, dtype):
    q, k, v, do = arrays(dtype=jnp.bfloat16)
    bias = normal(2, 1, 75, dtype=dtype)
    got = outputs.lower(q, k, v, do, {"bias": bias}, implementation=implementation).out_info
    assert got.dscore["bias"].dtype == dtype
    assert got.dscore["bias"].shape == (2, 1, 75)


@pytest.mark.whole
def test_score_args_of_gemma_and_of_t5_are_the_options_that_say_the_same():
    q, k, v, do = arrays()
    capped = outputs(q, k, v, do, softcap=2.0)
    assert_same(outputs(q, k, v, do, score_fn=lambda s, b, h, i, j: 2.0 * jnp.tanh(s / 2.0)), capped, atol=2e-6, rtol=2e-6)
    table = normal(2, 8)
    bucket = jnp.minimum(abs(jnp.arange(40)[:, None] - jnp.arange(75)) // 4, 7)
    looked_up = lambda s, b, h, i, j, table: s + table[h, jnp.minimum(abs(i - j) // 4, 7)]
    for implementation in TILED:
        got = outputs(q, k, v, do, {"score_args": (table,)}, implementation=implementation, score_fn=looked_up)
        dense = outputs(q, k, v, do, {"bias": table[:, bucket]}, implementation=implementation)
        np.testing.assert_allclose(got.dq, dense.dq, atol=2e-6)
        summed = jnp.zeros_like(table).at[:, bucket].add(dense.dscore["bias"])
        np.testing.assert_allclose(got.dscore["score_args"][0], summed, atol=2e-5)


def test_alibi_slopes():
    np.testing.assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    # Press et al.'s own code for 12 heads: those of 8, and every second one of 16.
    np.testing.assert_allclose(alibi_slopes(12), [*2.0 ** -np.arange(1, 9), *2.0 ** -np.array([0.5, 1.5, 2.5, 3.5])])
    assert alibi_slopes(1).shape == (1,)


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.whole
@pytest.mark.parametrize("implementation", ["xla"])
def test_memory_of_everything_at_once_grows_linearly(implementation):
    def temp_bytes(length):
        q = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        sinks = jax.ShapeDtypeStruct((2,), jnp.float32)

        def loss(q, k, v, sinks, ids):
            o = attention(
                q, k, v, causal=True, window=(500, 0), segment_ids=ids, softcap=30.0, sinks=sinks, dropout_rate=0.1,
                dropout_key=jax.random.key(0), implementation=implementation,
            )  # fmt: skip
            return jnp.sum(o**2)

        compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, q, q, sinks, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert 0 < temp_bytes(8192) < 4.5 * temp_bytes(2048)


def bias_bytes(shape, argnums, length=2048):
    """Temporary memory of the gradients by the given arguments of a loss of q, k, v and a bias."""
    q, bias = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)
    loss = lambda q, k, v, bias: jnp.sum(attention(q, k, v, bias=bias) ** 2)
    return jax.jit(jax.grad(loss, argnums)).lower(q, q, q, bias).compile().memory_analysis().temp_size_in_bytes


def test_the_gradient_of_a_bias_takes_no_more_than_the_bias():
    plain = bias_bytes((1, 1, 1, 2048), (0, 1, 2))
    pairs = 4 * 2048 * 2048
    for shape in ((1, 1, 1, 2048), (1, 2, 1, 2048), (1, 1, 2048, 1), (1, 1, 1, 1)):
        assert bias_bytes(shape, (0, 1, 2, 3)) < plain + pairs / 4  # a tile more, which is 2 MiB, and not 16
    assert bias_bytes((1, 1, 2048, 2048), (0, 1, 2, 3)) < plain + 1.2 * pairs  # two heads share it
    assert bias_bytes((1, 2, 2048, 2048), (0, 1, 2)) < plain + pairs / 16  # and where nobody asks for it, it is not made


@EVERYWHERE
def test_dropout_is_the_dense_mask_of_the_same_key(implementation):
    q, k, v, _ = arrays(heads=4)
    key = jax.random.key(11)
    kept = dropout_mask(key, 0.4, (1, 4, 40, 75))
    p = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, 2, 2)) / 4, axis=-1)
    expected = jnp.einsum("bhij,bjhd->bihd", jnp.where(kept, p / 0.6, 0), jnp.repeat(v, 2, 2))
    how = {"implementation": implementation, "block_sizes": SMALL_TILES, "dropout_rate": 0.4, "dropout_key": key}
    np.testing.assert_allclose(jax.jit(functools.partial(attention, **how))(q, k, v), expected, atol=3e-6)


@pytest.mark.parametrize(("programs", "batch"), [(1, 2), (5, 3), (24, 5), (10_000, 7)])  # another batch: traced anew
def test_the_gradient_of_a_bias_is_the_same_among_however_many_programs(monkeypatch, programs, batch):
    """Of 3 q tiles, 4 heads and so many batch elements, for each of 2 tiles of keys: all in one sum, up to each in its own."""
    monkeypatch.setattr(dscore, "PROGRAMS", programs)
    q, k, v = normal(batch, 40, 4, 16), normal(batch, 45, 2, 16, seed=1), normal(batch, 45, 2, 16, seed=2)
    bias = normal(1, 1, 1, 45, seed=3)

    def gradient(implementation):
        fn = functools.partial(attention, q, k, v, window=(20, 9), implementation=implementation, block_sizes=SMALL_TILES)
        return jax.jit(jax.grad(lambda bias: jnp.sum(fn(bias=bias) ** 2)))(bias)

    np.testing.assert_allclose(gradient("interpret"), gradient("naive"), rtol=1e-4, atol=1e-4)
