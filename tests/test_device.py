"""The compiled kernels against float64 on each device there is: forward, lse and all gradients, by the rule of accuracy.py.

Kernels are for 16-bit floats first, so cases in float32 are run in one of these, those with a score_fn in bfloat16: it rounds
most, and a CPU does not show it. Some are run in float32 too. A selection that covers all options is run always, the other
cases are marked `whole`.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import cheapest_that_cover, compiling_quickly, fewest_that_cover, judged, judged_tangents, options_of, references
from devices import EMULATED, each_device, on

from jflash import BlockSizes
from jflash.kernels.memory import chunks
from jflash.proof import accuracy
from jflash.proof.cases import CASES, Case

HALVES = ("float16", "bfloat16")
OPTIONS = [field.name for field in dataclasses.fields(Case) if field.name not in
           ("q_len", "kv_len", "head_dim", "v_dim", "heads", "kv_heads", "batch", "dtype")]  # fmt: skip


def in_16_bits(number, case):
    halves = ("bfloat16",) if case.score_fn else HALVES
    return case if case.dtype in halves else dataclasses.replace(case, dtype=halves[number % len(halves)])


IN_16_BITS = [in_16_bits(number, case) for number, case in enumerate(CASES)]


def features(case):
    """What a selection of cases must have of each kind."""
    options = frozenset(name for name in OPTIONS if getattr(case, name) != getattr(Case, name))
    several_tiles = case.q_len > 128 and case.kv_len > 128
    return {
        ("options", options),
        ("several tiles", several_tiles, bool(options)),
        ("dtype", case.dtype),
        ("head_dim", chunks(case.head_dim, case.dtype)),
        ("v_dim", chunks(case.v_dim or case.head_dim, case.dtype)),
        ("score_fn", case.score_fn),
        ("whole tiles", case.q_len % 64 == case.kv_len % 64 == 0),
        ("group", case.heads // case.kv_heads),
    }


SELECTION = cheapest_that_cover(IN_16_BITS, features)
ESSENTIAL = fewest_that_cover(SELECTION, options_of)


def on_each_device(cases, always):
    of_the_table = [pytest.mark.whole, pytest.mark.table]
    marks = lambda case: of_the_table if case not in always else () if case in ESSENTIAL else [pytest.mark.whole]
    return [x for case in cases for x in each_device(case, id=case.name, group=case.name, marks=marks(case))]


def outputs(case, **how):
    with compiling_quickly():  # for what surrounds the kernels
        got = accuracy.run(case, references(case)[0], implementation="triton", **how)
    return jax.tree.map(np.asarray, got)


@pytest.mark.parametrize(("device", "case"), on_each_device(IN_16_BITS, always=SELECTION))
def test_in_16_bits(device, case):
    naive = references(case)[1]
    with on(device):
        got = outputs(case)
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(got), tuple(naive))
    judged(case, got)


TANGENTS = (
    Case(100, 64, head_dim=32, causal=True, q_offset=-20, heads=2, kv_heads=1, dtype="bfloat16"),
    Case(40, 75, head_dim=16, bias="1hqk", bias_holes=True, score_fn="alibi", sinks=True, dropout_rate=0.2, dtype="float16"),
    Case(150, 150, head_dim=80, segments="packed", window=(40, 0), dtype="bfloat16"),
)


@pytest.mark.parametrize(
    ("device", "case"),
    [
        x
        for case in TANGENTS
        for x in each_device(case, id=case.name, group=case.name, marks=() if case is TANGENTS[0] else [pytest.mark.whole])
    ],
)
def test_tangents(device, case):
    """Of the outputs and of the gradients, in kernels of their own."""
    with on(device), compiling_quickly():
        _, got = accuracy.run(case, case.arrays(), implementation="triton", tangents=True)
    judged_tangents(case, jax.tree.map(np.asarray, got))


FLOAT32 = (
    Case(100, 64, head_dim=32, causal=True, q_offset=-20, heads=2, kv_heads=1),
    Case(40, 75, head_dim=16, bias="1hqk", bias_holes=True, score_fn="tanh", sinks=True),
)


@pytest.mark.parametrize(("device", "case"), on_each_device((*FLOAT32, *CASES), always=FLOAT32))
def test_in_float32(device, case):
    case = dataclasses.replace(case, dtype="float32")
    with on(device):
        got = outputs(case, precision="highest")
    judged(case, got)


@pytest.mark.parametrize(
    ("device", "case"),
    list(
        each_device(Case(130, 70, head_dim=32, causal=True, q_offset=-30, dtype="float16"), id="130x70 causal", group="as TF32")
    ),
)
def test_float32_is_multiplied_as_tf32_by_default(device, case):
    """TF32 has the fraction of float16: what is given in float16 comes out as right as in float16."""
    with on(device):
        got = outputs(case, dtype="float32")
    chex.assert_type(got.o, jnp.float32)
    rounded = accuracy.Outputs(*(x if name == "lse" else x.astype(np.float16) for name, x in got.items()))
    judged(case, rounded)


SMALL = BlockSizes(block_q=32, block_kv=32, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32)
TILES = {
    "32 x 32": SMALL,
    "one stage": BlockSizes(num_stages=1, num_stages_dkv=1, num_stages_dq=1),
    "four stages": BlockSizes(num_stages=4, num_stages_dkv=4, num_stages_dq=4),
}


@pytest.mark.parametrize(
    ("device", "tiles"),
    [
        x
        for tiles in TILES
        for x in each_device(tiles, id=tiles, group=f"tiles {tiles}", marks=[pytest.mark.whole] if tiles == "one stage" else [])
    ],
)
def test_other_tiles(device, tiles):
    case = Case(130, 150, head_dim=32, batch=1, heads=2, kv_heads=1, causal=True, q_offset=20, dtype="bfloat16")
    with on(device):
        got = outputs(case, block_sizes=TILES[tiles])
    judged(case, got)


@pytest.mark.parametrize("device", EMULATED)
@pytest.mark.xdist_group("names")
def test_all_kernels_are_launched(device):
    """On an H100 dk and dv are kernels of their own where head_dim is large."""
    names = set()
    for case in (
        Case(16, 16, head_dim=192, dtype="bfloat16", batch=1),
        Case(16, 16, head_dim=16, dtype="bfloat16", batch=1, bias="hqk", score_fn="t5"),
    ):
        with on(device) as log:
            judged(case, outputs(case))
        names |= log.names
    wanted = {"forward", "delta", "dkv", "dq", "dbias", "dargs", *(("dk", "dv") if device == "h100" else ())}
    assert names == {f"jflash_{name}" for name in wanted}
