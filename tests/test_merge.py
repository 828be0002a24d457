"""jflash.merge: attention over all keys from attention over parts of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, TILED, essentials, normal
from jax.test_util import check_grads

from jflash import attention, merge
from jflash.proof import accuracy

pytestmark = pytest.mark.usefixtures("quickly_compiled")

Q, K, V, DO = (normal(2, length, 2, 8, seed=seed) for seed, length in enumerate((20, 40, 40, 20)))
DLSE = normal(2, 2, 20, seed=4)


def outputs(fn):
    return jax.jit(functools.partial(accuracy.outputs, fn))(Q, K, V, DO, DLSE)


def assert_same(got, expected):
    for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("implementation", essentials(TILED, ("xla",).__contains__))
@pytest.mark.parametrize("cuts", essentials([(), (17,), (3, 17, 36)], lambda cuts: len(cuts) == 1), ids=str)
def test_any_parts_of_the_keys_are_the_whole(cuts, implementation):
    attend = functools.partial(attention, return_lse=True, implementation=implementation, block_sizes=SMALL_TILES)

    def parts(q, k, v):
        ends = (0, *cuts, k.shape[1])
        pairs = itertools.pairwise(ends)
        return merge(*(attend(q, k[:, lo:hi], v[:, lo:hi], causal=True, q_offset=20 - lo) for lo, hi in pairs))

    assert_same(outputs(parts), outputs(functools.partial(attend, causal=True, q_offset=20)))


def test_a_shared_prefix_and_this_condition_or_that():
    """A prefix that all see, and a window that is causal: the keys of both are seen once."""

    def either(q, k, v):
        prefix = attention(q, k, v, kv_lengths=7, return_lse=True)
        near = attention(q, k, v, causal=True, window=(5, 0), mask=jnp.arange(40) >= 7, return_lse=True)
        return merge(prefix, near)

    i, j = jnp.ogrid[:20, :40]
    both = (j < 7) | ((j <= i) & (j >= i - 5))
    assert_same(outputs(either), outputs(functools.partial(attention, mask=both, return_lse=True, implementation="naive")))


def test_rows_that_have_seen_nothing_have_gradients_of_zero():
    o, lse = normal(3, 2, 4), normal(2, 3)
    nothing = jnp.zeros_like(o), jnp.full_like(lse, -jnp.inf)

    def loss(parts):
        o, lse = merge(*parts)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    for parts in (((o, lse), nothing), (nothing, (o, lse))):
        for got, want in zip(merge(*parts), (o, lse), strict=True):
            np.testing.assert_array_equal(got, want)
    for got, want in zip(merge(nothing, nothing), nothing, strict=True):
        np.testing.assert_array_equal(got, want)
    for parts in (((o, lse), nothing), (nothing, nothing)):
        gradients = jax.grad(loss)(parts)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))
        assert not any(x.any() for x in jax.tree.leaves(gradients[1]))


def test_gradients_agree_with_finite_differences():
    with jax.enable_x64(True):
        parts = [(normal(3, 2, 4, seed=n, dtype=jnp.float64), normal(2, 3, seed=n + 5, dtype=jnp.float64)) for n in range(3)]
        check_grads(jax.jit(lambda parts: merge(*parts)), (parts,), order=2, atol=1e-6, rtol=1e-6)


def test_the_largest_and_the_least_that_float32_holds():
    o = jnp.stack([jnp.full((1, 1, 1), x) for x in (1.0, 3.0)])
    for lse in (3e38, -3e38, float(jnp.finfo(jnp.float32).min)):
        got, _ = merge(*((x, jnp.full((1, 1), lse)) for x in o))
        np.testing.assert_allclose(got, 2.0)


def test_what_it_cannot_merge():
    o, lse = jnp.zeros((2, 3, 2, 4)), jnp.zeros((2, 2, 3))
    for parts, error, message in (
        ((), ValueError, "at least one pair"),
        ((o, lse), TypeError, r"parts\[0\] must be a pair \(o, lse\)"),
        (((o, lse[:1]),), ValueError, r"parts\[0\] must have an lse of shape \(2, 2, 3\)"),
        (((o, lse), (o.astype(jnp.bfloat16), lse)), ValueError, r"parts\[1\] must have an o like that of parts\[0\]"),
        (((o, lse.astype(jnp.bfloat16)),), TypeError, "lse of float32 or float64"),
        (((o[0, 0], lse),), ValueError, "must have an o "),
    ):
        with pytest.raises(error, match=message):
            merge(*parts)
