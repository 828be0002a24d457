"""The generator against its published results, the mask against what chance would do, and what must not change it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TILED, normal
from jax.test_util import check_grads

from jflash import BlockSizes, attention, dropout_mask
from jflash.score import dropout

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# Random123's known answers (kat_vectors): rounds, counter, key, result.
ZEROS, ONES = 0, 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN = [
    (7, (ZEROS,) * 4, (ZEROS,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (10, (ZEROS,) * 4, (ZEROS,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_results(rounds, counter, key, expected):
    words = lambda xs: tuple(jnp.full((3,), x, jnp.uint32) for x in xs)
    got = jax.jit(functools.partial(dropout.philox, rounds=rounds))(words(counter), words(key))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, np.full(3, y, np.uint32))


# ------------------------------------------------------------------------------------------- chance

SHAPE = (3, 4, 512, 512)
RATE = 0.3


@functools.cache
def mask() -> np.ndarray:
    return np.asarray(dropout_mask(jax.random.key(0), RATE, SHAPE))


def test_mean_and_variance():
    """Of all, and of each head: within 4.5 standard deviations."""
    kept = mask()
    for part, size in ((kept, kept.size), *((kept[b, h], kept[b, h].size) for b in range(3) for h in range(4))):
        assert abs(part.mean() - (1 - RATE)) < 4.5 * math.sqrt(RATE * (1 - RATE) / size)
    # The counts of 8x8 blocks have the variance of a binomial: neither clumped nor spread.
    counts = kept.reshape(3, 4, 64, 8, 64, 8).sum((3, 5)).ravel()
    expected = 64 * RATE * (1 - RATE)
    assert abs(counts.var() / expected - 1) < 4.5 * math.sqrt(2 / counts.size)


def test_chi_square_of_the_words():
    """Bytes of the words of 2**16 counters: chi-square with 255 degrees of freedom, within 4.5 standard deviations."""
    i, j = jnp.divmod(jnp.arange(2**16, dtype=jnp.uint32), 256)
    zero = jnp.zeros_like(i)
    words = jax.jit(lambda: dropout.philox((i, j, zero, zero), (zero + 12345, zero + 678), dropout.ROUNDS))()
    for word in words:
        for byte in range(4):
            counts = np.bincount((np.asarray(word) >> (8 * byte)) & 255, minlength=256)
            chi_square = ((counts - 256) ** 2 / 256).sum()
            assert abs(chi_square - 255) < 4.5 * math.sqrt(2 * 255)


STEPS = [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1), (0, 0, 0, 8), (0, 0, 8, 0), (0, 0, 8, 8), (0, 1, 0, 0), (1, 0, 0, 0)]


@pytest.mark.parametrize("step", STEPS)
def test_neighbours_are_independent(step):
    kept = mask().astype(np.float64) - (1 - RATE)
    here = kept[tuple(slice(0, n - d) for n, d in zip(SHAPE, step, strict=True))]
    there = kept[tuple(slice(d, None) for d in step)]
    assert abs((here * there).mean()) < 4.5 * RATE * (1 - RATE) / math.sqrt(here.size)


def test_keys_are_independent():
    other = np.asarray(dropout_mask(jax.random.key(1), RATE, SHAPE))
    assert abs((mask() == other).mean() - (RATE**2 + (1 - RATE) ** 2)) < 1e-3


# ------------------------------------------------------------------------------------------- what must not change it


def test_a_mask_is_a_part_of_any_larger_one():
    small = dropout_mask(jax.random.key(0), RATE, (2, 3, 20, 33))
    np.testing.assert_array_equal(small, mask()[:2, :3, :20, :33])
    np.testing.assert_array_equal(dropout_mask(jax.random.key(0), RATE, (3, 20, 33)), mask()[0, :3, :20, :33])


def test_keys_old_and_new_style_are_the_same():
    new, raw = jax.random.key(7), jax.random.PRNGKey(7)
    np.testing.assert_array_equal(dropout_mask(new, 0.5, (1, 2, 16, 16)), dropout_mask(raw, 0.5, (1, 2, 16, 16)))
    assert dropout_mask(jax.random.key(7, impl="rbg"), 0.5, (1, 2, 16, 16)).any()


def inputs():
    return normal(2, 70, 2, 16), normal(2, 70, 2, 16, seed=1), normal(2, 70, 2, 16, seed=2)


@pytest.mark.whole
def test_tile_sizes_devices_and_directions_keep_the_same():
    """The gradient of the sum of o by v is how often, and how much, each key was kept: the mask itself, where v is 1 wide."""
    q, k, _ = inputs()
    kept = []
    for implementation in ("naive", *TILED):
        for q_block, kv_block in ((16, 32), (64, 16)):
            blocks = BlockSizes(block_q=q_block, block_kv=kv_block, block_q_dkv=kv_block, block_kv_dkv=q_block)
            fn = lambda v, blocks=blocks, implementation=implementation: attention(
                0 * q, k, v, dropout_rate=0.4, dropout_key=jax.random.key(3), block_sizes=blocks, implementation=implementation
            )
            o, pull = jax.vjp(fn, jnp.ones((2, 70, 2, 1)))
            kept.append((o[..., 0] * 70 * 0.6, pull(jnp.ones_like(o))[0][..., 0] * 70 * 0.6))
    mask = np.asarray(dropout_mask(jax.random.key(3), 0.4, (2, 2, 70, 70)))
    for forward, backward in kept:
        np.testing.assert_allclose(forward, mask.sum(3).swapaxes(1, 2), rtol=1e-5)
        np.testing.assert_allclose(backward, mask.sum(2).swapaxes(1, 2), rtol=1e-5)


@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_under_vmap_a_key_that_is_not_mapped_gives_each_element_the_same_mask(implementation):
    q, k, v = (jnp.stack([x, x]) for x in inputs())
    fn = lambda q, k, v, key: attention(q, k, v, dropout_rate=0.5, dropout_key=key, implementation=implementation)
    keys = jax.random.split(jax.random.key(0), 2)
    same = jax.jit(jax.vmap(fn, in_axes=(0, 0, 0, None)))(q, k, v, keys[0])
    np.testing.assert_array_equal(same[0], same[1])
    each = jax.jit(jax.vmap(fn))(q, k, v, keys)
    np.testing.assert_allclose(each[0], same[0], atol=1e-6)
    np.testing.assert_allclose(each[1], fn(q[1], k[1], v[1], keys[1]), atol=1e-6)
    assert np.abs(each[0] - each[1]).max() > 0.1


def test_sharded_over_batch_and_heads_the_keys_are_those_of_the_whole():
    """They are an array like any other; a part of the heads has a part of them."""
    words = dropout.words("key", jax.random.key(0))
    whole = dropout.keys(words, 4, 6)
    assert len(np.unique(np.asarray(whole).reshape(24, 2), axis=0)) == 24
    np.testing.assert_array_equal(dropout.keys(words, 2, 3), whole[:2, :3])


def test_the_gradient_with_the_mask_fixed():
    with jax.enable_x64(True):
        q, k, v = (x[:1, :20].astype(jnp.float64) for x in inputs())
        fn = lambda q, k, v: attention(q, k, v, dropout_rate=0.3, dropout_key=jax.random.key(0), return_lse=True, causal=True)
        check_grads(fn, (q, k, v), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)
