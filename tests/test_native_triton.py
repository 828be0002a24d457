"""Attention in Triton itself: values in Triton's interpreter, machine code for GPUs that are not there."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import native_triton
from jflash import accuracy, machine_code
from jflash.accuracy import Outputs
from jflash.blocks import Launch
from jflash.cases import Case
from jflash.machine_code import GPUS, embedded

MISSING = machine_code.missing_wheels()
REASON = native_triton.unavailable()
KERNELS = ("forward_kernel", "delta_kernel", "dkv_kernel", "dq_kernel")
needs_triton = pytest.mark.skipif(REASON is not None, reason=str(REASON))
needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


# ------------------------------------------------------------------------------------------------------------- values


class Memory:
    """A numpy array, with what Triton's interpreter asks of a tensor: memory that the host can reach as it is."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def itself(self, *_, **__) -> Memory:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = itself
    storage_offset = size = stride = itself  # passed on to set_


@pytest.fixture
def interpreted(monkeypatch):
    """native_triton with its kernels interpreted, and called back from JAX."""
    from triton.runtime.interpreter import InterpretedFunction

    def triton_call(*arrays, kernel, out_type, grid, num_warps, num_stages, backend_options, **constants):
        def run(*arrays):
            results = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), out_type)
            memory = [Memory(np.asarray(x)) for x in (*arrays, *jax.tree.leaves(results))]
            kernel[grid](*memory, **constants)
            return results

        return jax.pure_callback(run, out_type, *arrays)

    from triton.runtime.interpreter import InterpreterBuilder
    dot = InterpreterBuilder.create_dot
    wide = lambda builder, x: builder.cast_impl(x, native_triton.tl.float32)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, wide(self, a), wide(self, b), *rest))
    written_in_triton = {native_triton: ("tile", "vector", *KERNELS), native_triton.tl: ("max", "sum")}
    for module, names in written_in_triton.items():
        for name in names:
            monkeypatch.setattr(module, name, InterpretedFunction(getattr(module, name).fn))
    monkeypatch.setattr(native_triton, "triton_call", triton_call)
    return native_triton


def outputs(q, k, v, do, causal) -> Outputs:
    o, residuals = native_triton._forward(q, k, v, causal)
    return Outputs(o, residuals[-1] / np.log2(np.e), *native_triton._backward(causal, residuals, do))


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (128, "bfloat16")])
def test_values_and_gradients(interpreted, monkeypatch, head_dim, dtype, causal):
    case = Case(128, 128, head_dim=head_dim, dtype=dtype, causal=causal)
    arrays = *case.arrays()[:4], np.zeros((2, 2, 128))  # lse has no cotangent
    naive, exact = accuracy.run(case, arrays, implementation="naive"), accuracy.exact(case, arrays)
    got = outputs(*(jnp.asarray(x, dtype) for x in arrays[:4]), causal)
    for verdict in accuracy.verdicts(case, arrays, got, naive, exact):
        print(verdict)
        assert verdict.agrees, verdict
