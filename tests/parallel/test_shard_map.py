"""attention() inside jax.shard_map, with and without the check of its types: options, gradients, and what is summed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, compiling_quickly, judged, judged_tangents
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import machine_code
from jflash.proof import accuracy
from jflash.proof.cases import Case

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# Some arrays are split over both axes, some over one, some over none: their gradients are sums over the rest. There is no
# function of b or h, which count from 0 on each device.
EVERYTHING = Case(
    40, 51, head_dim=16, heads=4, kv_heads=1, causal=True, q_offset=(5, 11), segments="packed", mask="b1qk",
    bias="1hqk", bias_holes=True, score_fn="decay", sinks=True,
)  # fmt: skip


def outputs(case: Case, check_vma: bool, tangents: bool = False, **how):
    """accuracy.outputs(), or outputs_and_tangents()."""
    mesh = jax.make_mesh((2, 4), ("data", "heads"), (AxisType.Auto,) * 2)
    arrays = {name: x for name, x in case.options().items() if name in ("q_offset", "segment_ids", "mask")}
    options = {name: x for name, x in case.options().items() if name not in arrays}
    specs = {"q_offset": P("data"), "segment_ids": P("data"), "mask": P("data")}
    weights = {"bias": P(None, "heads"), "score_args": (P("heads"), P()), "sinks": P("heads")}
    tokens, keys, rows = P("data", None, "heads"), P("data"), P("data", "heads")

    def fn(q, k, v, **parameters):
        local = functools.partial(jflash.attention, return_lse=True, **options, **how)
        return jax.shard_map(
            lambda q, k, v, arrays, parameters: local(q, k, v, **arrays, **parameters),
            mesh=mesh,
            in_specs=(tokens, keys, keys, {name: specs[name] for name in arrays}, {name: weights[name] for name in parameters}),
            out_specs=(tokens, rows),
            check_vma=check_vma,
        )(q, k, v, arrays, parameters)

    floats = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))
    inputs, parameters = floats((case.arrays(), case.parameters()))
    if tangents:
        moving = floats((case.arrays(seed=1), case.parameters(seed=3, holes=False)))
        return jax.jit(functools.partial(accuracy.outputs_and_tangents, fn))(inputs, parameters, *moving)
    return jax.jit(functools.partial(accuracy.outputs, fn))(*inputs, **parameters)


@pytest.mark.whole
@pytest.mark.parametrize(("implementation", "check_vma"), [("xla", False), ("interpret", True), (None, True)])
def test_everything_at_once(implementation, check_vma):
    judged(EVERYTHING, outputs(EVERYTHING, check_vma, implementation=implementation, block_sizes=SMALL_TILES))


@pytest.mark.whole
@pytest.mark.parametrize("check_vma", [False, True])
def test_tangents_of_everything(check_vma):
    _, got = outputs(EVERYTHING, check_vma, tangents=True, block_sizes=SMALL_TILES)
    judged_tangents(EVERYTHING, got)


@pytest.mark.whole
@pytest.mark.skipif(bool(machine_code.missing_wheels()), reason="not installed: the compiler for GPUs")
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_kernels_on_eight_h100s(check_vma):
    mesh = Mesh(np.array(machine_code.devices("h100", 8)).reshape(2, 4), ("data", "heads"))
    spec = P("data", None, "heads")
    x = jax.ShapeDtypeStruct((4, 1024, 8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    ids = jax.ShapeDtypeStruct((4, 1024), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    sinks = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("heads")))

    def loss(q, k, v, sinks, ids):
        fn = lambda q, k, v, sinks, ids: jflash.attention(q, k, v, sinks=sinks, segment_ids=ids, implementation="triton")
        specs = (spec, spec, spec, P("heads"), P("data"))
        return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=check_vma)(q, k, v, sinks, ids).sum()

    with compiling_quickly(False):
        program = machine_code.compile_for(jax.grad(loss, (0, 1, 2, 3)), x, x, x, sinks, ids, gpu="h100", mesh=mesh)
    assert {"jflash_delta", "jflash_dkv", "jflash_dq"} <= {kernel.name for kernel in program.kernels}
