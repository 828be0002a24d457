"""jflash.visits(): the tiles of attention()'s loops, counted and drawn."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jflash
from jflash import BlockSizes, machine_code
from jflash.visits import Visits

SIZES = BlockSizes(block_q=128, block_kv=128)
Q = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
K = jax.ShapeDtypeStruct((2, 1024, 2, 64), jnp.bfloat16)
shown = functools.partial(jflash.visits, Q, K, K, block_sizes=SIZES)


def test_the_example_of_its_docstring():
    names = {"jflash": jflash, "jax": jax, "jnp": jnp}
    example = doctest.DocTestParser().get_doctest(jflash.visits.__doc__, names, "visits", None, 0)
    assert len(example.examples) == 3
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example).failed == 0


def test_what_is_counted():
    band = shown(causal=True)
    assert band.tiles.shape == (1, 1, 8, 8)
    np.testing.assert_array_equal(band.tiles[0, 0], np.tri(8, dtype=int) + np.tri(8, k=-1, dtype=int))
    assert (band.share, band.masked) == (100 * 36 / 64, 100 * 8 / 64)
    of_heads = lambda b, h, i, j: (j < 128) | (h >= 2)
    heads = shown(mask_fn=of_heads, implementation="triton")
    assert heads.tiles.shape == (1, 4, 8, 8)
    assert heads.share == pytest.approx(100 * (2 * 8 + 2 * 64) / (4 * 64))
    assert str(heads).splitlines()[1] == "the first of 1 batch elements x 4 heads that differ"
    assert heads.picture(head=0) == "\n".join(["█·······"] * 8)
    assert heads.picture(head=3) == "\n".join(["████████"] * 8)
    together = shown(mask_fn=of_heads, implementation="xla")
    assert (together.tiles.shape, together.share, together.masked) == ((1, 1, 8, 8), 100, 100 * 7 / 8)


def test_a_loop_for_all_batch_elements_visits_what_lies_between_their_bands():
    options = {"window": (0, 0), "q_offset": jnp.asarray([0, 512])}
    assert shown(**options, implementation="triton").share == pytest.approx(100 * (8 + 4) / 128)
    assert shown(**options, implementation="xla").share == pytest.approx(100 * (4 * 5 + 4 + 3 + 2 + 1) / 64)


def test_tile_sizes_are_those_of_what_runs():
    assert (shown(causal=True).block_q, shown(causal=True).block_kv) == (128, 128)
    of = lambda **options: (lambda x: (x.block_q, x.block_kv))(jflash.visits(Q, K, K, **options))
    launch = jflash.launches(Q, K, K)["forward"].launch
    assert of(implementation="triton") == (launch.block_q, launch.block_kv)
    with jax.set_mesh(Mesh(machine_code.devices("h100"), ("device",))):
        launch = jflash.launches(Q, K, K)["forward"].launch
        assert of() == of(implementation="triton") == (launch.block_q, launch.block_kv) != of(implementation="xla")


def test_a_character_of_several_tiles_says_all_or_none_only_where_it_is_so():
    tiles = np.zeros((1, 1, 8, 8), np.int8)
    tiles[0, 0, 0, 0] = 1  # one of four is looked at
    tiles[0, 0, :2, 2:4] = 2
    tiles[0, 0, :2, 4:6] = 2, 1
    tiles[0, 0, :2, 6:8] = 1
    tiles[0, 0, 7, 7] = 2
    rows = Visits(tiles, 64, 64).picture(columns=4).splitlines()
    assert rows == ["░█▓▒", "····", "····", "···░"]
    assert Visits(tiles[..., :3], 64, 64).picture(columns=4).splitlines()[0] == "░█"


def test_arrays_without_a_batch_and_ends_of_no_whole_tile():
    q = jax.ShapeDtypeStruct((300, 4, 64), jnp.float32)
    assert jflash.visits(q, q, q, causal=True, block_sizes=SIZES).picture() == "▒··\n█▒·\n▒▒▒"
    ids = np.arange(300) // 128
    assert jflash.visits(q, q, q, segment_ids=ids, block_sizes=SIZES).picture() == "█··\n·█·\n··▒"


def test_what_it_does_not_take():
    with pytest.raises(TypeError, match="takes no traced arrays"):
        jax.jit(lambda mask: shown(mask=mask).share)(np.ones((1024, 1024), bool))
    with pytest.raises(ValueError, match='got "naive"'):
        shown(implementation="naive")
    with pytest.raises(TypeError, match="but return_lse, got return_lse"):
        shown(return_lse=True)
    with pytest.raises(ValueError, match="no tile to visit where q, k or v is empty"):
        jflash.visits(Q, jax.ShapeDtypeStruct((2, 0, 2, 64), Q.dtype), jax.ShapeDtypeStruct((2, 0, 2, 64), Q.dtype))
    with pytest.raises(ValueError, match="v must have the kv_len"):
        jflash.visits(Q, K, Q)
