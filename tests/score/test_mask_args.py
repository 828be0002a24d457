"""mask_args: the arrays that a mask_fn reads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, TILED, essentials, needs_compiler, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jflash import attention, machine_code

pytestmark = pytest.mark.usefixtures("quickly_compiled")

Q, K, V = (normal(4, 20, 2, 8, seed=seed) for seed in range(3))
PREFIX = jnp.array([3, 0, 20, 11])
NEAR = jnp.array([4.0, 2.5])  # how far each head sees
HIDDEN = jnp.zeros(20, bool).at[5].set(True)


def seen(b, h, i, j, prefix, near, hidden):
    return ((j < prefix[b]) | (i - j <= near[h])) & ~hidden[j]


def written_out(prefix=PREFIX, near=NEAR, hidden=HIDDEN):
    b, h, i, j = jnp.ogrid[:4, :2, :20, :20]
    return ((j < prefix[b]) | (i - j <= near[h])) & ~hidden[j]


def attend(q, k, v, implementation, **options):
    return attention(q, k, v, implementation=implementation, block_sizes=SMALL_TILES, **options)


def gradients(implementation, **options):
    fn = functools.partial(attend, implementation=implementation, **options)
    return jax.jit(lambda q, k, v: (fn(q, k, v), jax.grad(lambda *x: jnp.sum(jnp.sin(fn(*x))), (0, 1, 2))(q, k, v)))(Q, K, V)


def assert_same(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("implementation", [*TILED, "naive"])
@pytest.mark.parametrize("dtype", essentials([jnp.float32, jnp.bfloat16, jnp.int32], lambda dtype: dtype == jnp.float32))
def test_integers_floats_and_bools(dtype, implementation):
    near = NEAR.astype(dtype)
    got = gradients(implementation, mask_fn=seen, mask_args=(PREFIX, near, HIDDEN))
    assert_same(got, gradients("naive", mask=written_out(near=near.astype(jnp.float32))))


@pytest.mark.parametrize("implementation", TILED)
def test_mapped_traced_and_a_number(implementation):
    """A number without dimensions, another one for each element of a jax.vmap."""
    fn = lambda far: attend(Q, K, V, implementation, mask_fn=lambda b, h, i, j, far: abs(i - j) <= far, mask_args=(far,))
    got = jax.jit(jax.vmap(fn))(jnp.array([2, 7]))
    for far, o in zip((2, 7), got, strict=True):
        assert_same(o, attend(Q, K, V, "naive", window=far))


def test_what_no_query_sees_by_them_may_hold_anything():
    for implementation in TILED:
        o = attend(Q, K.at[:, 5].set(jnp.nan), V, implementation, mask_fn=seen, mask_args=(PREFIX, NEAR, HIDDEN))
        assert_same(o, attend(Q, K, V, "naive", mask=written_out()))


def test_a_sharded_batch_reads_of_the_whole():
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    placed = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (Q, K, V)]
    got = jax.jit(lambda q, k, v: attend(q, k, v, "xla", mask_fn=seen, mask_args=(PREFIX, NEAR, HIDDEN)))(*placed)
    assert_same(got, attend(Q, K, V, "naive", mask=written_out()))


@needs_compiler
def test_in_a_kernel():
    avals = [jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)] * 3 + [jax.ShapeDtypeStruct((4,), jnp.int32)]
    fn = lambda q, k, v, prefix: attention(q, k, v, mask_fn=seen, mask_args=(prefix, jnp.ones(2), jnp.zeros(128, bool)))
    assert machine_code.compile_for(fn, *avals, gpu="h100")["jflash_forward"].tensor_cores == "HGMMA"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask_args": (PREFIX,)}, ValueError, "mask_args must be given together with mask_fn"),
        ({"mask_fn": seen, "mask_args": PREFIX}, TypeError, "mask_args must be a tuple of arrays"),
        ({"mask_fn": seen, "mask_args": (PREFIX[:0], NEAR, HIDDEN)}, ValueError, r"mask_args\[0\] must not be empty"),
        ({"mask_fn": seen, "mask_args": (1j * PREFIX, NEAR, HIDDEN)}, TypeError, r"mask_args\[0\] must hold bools, integers"),
        ({"mask_fn": lambda b, h, i, j: j < PREFIX[b]}, ValueError, "mask_fn must not close over arrays.*mask_args"),
    ],
)
def test_what_they_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        attention(Q, K, V, **options)
