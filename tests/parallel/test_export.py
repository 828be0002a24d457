"""Programs that leave as bytes: one for every platform, made where none of the GPUs is."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import needs_compiler, normal
from jax import export
from jax.sharding import Mesh

from jflash import attention, machine_code

pytestmark = pytest.mark.usefixtures("quickly_compiled")
pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
# JAX promises of no Triton kernel that a later version will run it, so the caller has to say that it is meant.
TRITON = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]


def forward_backward(q, k, v):
    o, pull = jax.vjp(lambda *qkv: attention(*qkv, causal=True), q, k, v)
    return o, pull(jnp.cos(o))


def there_and_back(exported: export.Exported) -> export.Exported:
    return export.deserialize(exported.serialize())


@needs_compiler
def test_one_artefact_for_cpu_and_cuda():
    aval = lambda heads: jax.ShapeDtypeStruct((2, 100, heads, 64), jnp.float32)
    with jax.set_mesh(Mesh(machine_code.devices("h100"), ("device",))):
        fn = export.export(jax.jit(forward_backward), platforms=("cpu", "cuda"), disabled_checks=TRITON)
        exported = there_and_back(fn(aval(4), aval(2), aval(2)))
    assert exported.platforms == ("cpu", "cuda")
    kernels = re.findall(r'name = "(jflash_\w+)"', exported.mlir_module())
    assert set(kernels) == {"jflash_forward", "jflash_delta", "jflash_dkv", "jflash_dq"}
    arrays = normal(2, 100, 4, 64), normal(2, 100, 2, 64, seed=1), normal(2, 100, 2, 64, seed=2)
    for x, y in zip(*map(jax.tree.leaves, (exported.call(*arrays), forward_backward(*arrays))), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_batch_of_any_size():
    (batch,) = export.symbolic_shape("batch")
    aval = jax.ShapeDtypeStruct((batch, 20, 2, 8), jnp.float32)
    exported = there_and_back(export.export(jax.jit(forward_backward))(aval, aval, aval))
    for size in (1, 3):
        arrays = [normal(size, 20, 2, 8, seed=seed) for seed in range(3)]
        for x, y in zip(*map(jax.tree.leaves, (exported.call(*arrays), forward_backward(*arrays))), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


@needs_compiler
def test_kernels_take_no_batch_of_any_size():
    (batch,) = export.symbolic_shape("batch")
    aval = jax.ShapeDtypeStruct((batch, 20, 2, 8), jnp.float32)
    message = r'shapes that are known .*, got a grid of .*batch.*: export it with .* or with implementation="xla"'
    with jax.set_mesh(Mesh(machine_code.devices("h100"), ("device",))), pytest.raises(ValueError, match=message):
        export.export(jax.jit(attention), platforms=("cuda",), disabled_checks=TRITON)(aval, aval, aval)
