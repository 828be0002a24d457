"""One host of two, for test_ring.py: `python two_hosts.py ADDRESS NUMBER`. Each has two devices of a ring of four."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))

import jflash  # noqa: E402

mesh = jax.make_mesh((4,), ("ring",), (jax.sharding.AxisType.Auto,))
split = NamedSharding(mesh, P(None, "ring"))
random = np.random.default_rng(0)  # the same numbers on both
q, k, v, do = (random.standard_normal((2, 32, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4))


def outputs(fn, q, k, v, do):
    o, pull = jax.vjp(fn, q, k, v)
    return o, *pull(do)


ring = functools.partial(jflash.ring_attention, axis_name="ring", causal=True, order="zigzag")
on_ring = jax.shard_map(ring, mesh=mesh, in_specs=split.spec, out_specs=split.spec)
shares = [jax.make_array_from_callback(x.shape, split, lambda index, x=x: jflash.zigzag(x, 4)[index]) for x in (q, k, v, do)]
got = jax.jit(functools.partial(outputs, on_ring))(*shares)
alone = jax.jit(functools.partial(outputs, functools.partial(jflash.attention, causal=True)))(*map(jnp.asarray, (q, k, v, do)))

for x, one in zip(got, alone, strict=True):
    expected = jflash.zigzag(np.asarray(one), 4)
    for shard in x.addressable_shards:
        np.testing.assert_allclose(shard.data, expected[shard.index], atol=1e-5)
print(f"host {sys.argv[2]}: {len(got[0].addressable_shards)} of {mesh.size} shares agree")
