"""Attention in Triton itself: values in Triton's interpreter, machine code for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")

from checks import needs_compiler

from benchmarks import attention, native_triton
from benchmarks import machine_code as program
from jflash import machine_code
from jflash.launch.blocks import Launch
from jflash.machine_code import GPUS, embedded
from jflash.proof import accuracy
from jflash.proof.accuracy import Outputs
from jflash.proof.cases import Case

pytestmark = pytest.mark.whole

UNAVAILABLE = native_triton.unavailable()
KERNELS = ("forward_kernel", "delta_kernel", "dkv_kernel", "dq_kernel")
needs_triton = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

# ------------------------------------------------------------------------------------------------------------- values


class Memory:
    """A numpy array as Triton's interpreter takes a tensor: where it lies; nothing is copied."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def itself(self, *_, **__) -> Memory:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = storage_offset = size = stride = itself


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels are interpreted, each called back from JAX; what they do not write is NaN."""
    from triton.runtime.interpreter import InterpretedFunction

    # JAX may call kernels back from several threads; the interpreter replaces parts of triton.language while it runs.
    one_at_a_time = threading.Lock()

    def triton_call(*arrays, kernel, out_type, grid, num_warps, num_stages, backend_options, **constants):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out_type)

        def run(*arrays):
            results = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), shapes)
            with one_at_a_time:
                kernel[grid](*(Memory(np.asarray(x)) for x in (*arrays, *jax.tree.leaves(results))), **constants)
            return results

        return jax.pure_callback(run, shapes, *arrays)

    monkeypatch.setattr(native_triton, "triton_call", triton_call)
    for kernel in KERNELS:
        monkeypatch.setattr(native_triton, kernel, InterpretedFunction(getattr(native_triton, kernel).fn))
    # What kernels call: as the interpreter rewrites it, but called as it is. It would else replace what no one restores.
    for module, names in {native_triton: ("tile", "vector"), native_triton.tl: ("max", "sum")}.items():
        for name in names:
            monkeypatch.setattr(module, name, InterpretedFunction(getattr(module, name).fn).rewrite())


SMALL_TILES = {
    ("forward", 64): Launch(64, 32, num_warps=4, num_stages=1),
    ("dkv", 64): Launch(32, 64, num_warps=4, num_stages=1),
    ("dq", 64): Launch(64, 32, num_warps=4, num_stages=1),
}


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "length", "heads", "tiles"),
    [
        (64, 128, 2, SMALL_TILES),
        (64, 256, 1, native_triton.HOPPER),
        (128, 128, 1, native_triton.HOPPER),
        (256, 128, 1, native_triton.AMPERE),
    ],
    ids=["64 small", "64 hopper", "128 hopper", "256 ampere"],
)
def test_values_and_gradients(monkeypatch, head_dim, length, heads, tiles, causal):
    """In float16: the interpreter holds bfloat16 as integers, truncates to it, and multiplies the integers."""
    monkeypatch.setattr(native_triton, "_launch", lambda *kernel: tiles[kernel])
    case = Case(length, length, head_dim, heads=heads, kv_heads=heads, batch=heads, dtype="float16", causal=causal)
    arrays = *case.arrays()[:4], np.zeros((heads, heads, length))  # attention() gives no lse, so that it has no cotangent
    q, k, v, do = (jnp.asarray(x, case.dtype) for x in arrays[:4])
    o, pull = jax.vjp(lambda q, k, v: native_triton.attention(q, k, v, causal=causal), q, k, v)
    _, (*_, lse2) = native_triton._forward(q, k, v, causal)
    got = Outputs(o, lse2 / np.log2(np.e), *pull(do))
    naive, exact = accuracy.run(case, arrays, implementation="naive"), accuracy.exact(case, arrays)
    for verdict in accuracy.verdicts(case, arrays, got, naive, exact):
        assert verdict.agrees, verdict


# ------------------------------------------------------------------------------------------------------- machine code


@needs_triton
@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("gpu", "causal"), [("h100", False), ("h100", True), ("a100", True)])
def test_compiles_and_fits_and_does_not_spill(gpu, head_dim, causal):
    def forward_backward(q, k, v, do):
        return jax.vjp(lambda q, k, v: native_triton.attention(q, k, v, causal=causal), q, k, v)[1](do)

    x = jax.ShapeDtypeStruct((2, 4096, 8, head_dim), jnp.bfloat16 if causal else jnp.float16)
    compiled = machine_code.compile_for(forward_backward, x, x, x, x, gpu=gpu)
    for kernel in map(compiled.__getitem__, KERNELS):
        assert kernel.shared_bytes <= kernel.target.shared_per_block
        assert not any({"LDL", "STL"} & loop.opcodes.keys() for loop in kernel.busy), "a loop that spills"
        assert kernel.spill_bytes <= 8  # dK/dV at head_dim 256 on A100; all others 0
        assert kernel.grid[1:] == (8, 2)
        if kernel.name != "delta_kernel":
            too_small = head_dim == 256 and kernel.name == "dkv_kernel"  # 32 keys: HGMMA takes 64
            assert kernel.tensor_cores == ("HGMMA" if gpu == "h100" and not too_small else "HMMA")
            assert kernel.busy


def test_what_an_embedded_kernel_tells():
    """By a call as jax-triton writes it, with a number of two bytes and fields that are not read."""
    field = lambda number, value: bytes([8 * number + embedded.BYTES, len(value)]) + value
    kernel = field(1, b"k") + bytes([8 * 2, 8]) + bytes([8 * 3, 0x80, 0x60]) + field(4, b".entry k()") + field(5, b"ttir")
    call = field(1, field(1, kernel) + bytes([8 * 2, 32, 8 * 3, 4, 8 * 4, 2]) + field(5, b"one") + field(5, b"two"))
    read = embedded._kernel(call + field(4, b"name"), GPUS["h100"])
    assert read == machine_code.Kernel("k", GPUS["h100"], (32, 4, 2), 256, 0x60 << 7, ".entry k()")
    with pytest.raises(ValueError, match=r"triton\.autotune"):
        embedded._kernel(field(2, b"choices"), GPUS["h100"])
    with pytest.raises(ValueError, match="a way, 5, that"):
        embedded._kernel(bytes([8 * 1 + 5, 0, 0, 0, 0]), GPUS["h100"])


# ------------------------------------------------------------------------------------------------------------- errors


def zeros(*shape, dtype=jnp.float16):
    return jax.ShapeDtypeStruct(shape, dtype)


@needs_triton
@pytest.mark.parametrize(
    ("q", "k", "error", "message"),
    [
        (zeros(1, 128, 2, 64, dtype=jnp.float32), None, TypeError, "q must be float16 or bfloat16, got float32"),
        (zeros(128, 2, 64), None, ValueError, r"q must be \[batch, length, heads, head_dim\], got shape \(128, 2, 64\)"),
        (zeros(1, 128, 2, 64), zeros(1, 256, 2, 64), ValueError, r"k must have the shape .* got \(1, 256, 2, 64\) float16"),
        (zeros(1, 128, 2, 64), zeros(1, 128, 2, 64, dtype=jnp.bfloat16), ValueError, "k must have .* bfloat16"),
        (zeros(1, 128, 2, 96), None, ValueError, r"head_dim must be one of \[64, 128, 256\], got 96"),
        (zeros(1, 192, 2, 64), None, ValueError, "length must be a multiple of 128, got 192"),
        (zeros(1, 0, 2, 64), None, ValueError, r"q must not be empty, got shape \(1, 0, 2, 64\)"),
        (zeros(1, 2**20, 32, 64), None, ValueError, r"less than 2\*\*31 entries, got 2147483648"),
    ],
)
def test_wrong_arguments(q, k, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(native_triton.attention, q, q if k is None else k, q)


@needs_triton
def test_causal_is_a_bool():
    x = zeros(1, 128, 2, 64)
    with pytest.raises(TypeError, match="causal must be a bool, got 'yes'"):
        jax.eval_shape(lambda x: native_triton.attention(x, x, x, causal="yes"), x)


def test_it_is_a_peer_where_it_is_available(monkeypatch):
    there = UNAVAILABLE is None
    assert ("native triton" in program.peers(causal=True)) == there
    assert "native triton" not in attention.jax_paths(causal=True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert ("native triton" in attention.jax_paths(causal=True)) == there


def test_unavailable_says_why(monkeypatch):
    spec = lambda name: None if name == "triton" else types.SimpleNamespace()
    monkeypatch.setattr(importlib.util, "find_spec", spec)
    assert "not installed: triton (extra" in str(native_triton.unavailable())
    x = jnp.zeros((1, 128, 1, 64), jnp.float16)
    with pytest.raises(RuntimeError, match="cannot be called here: not installed: triton"):
        native_triton.attention(x, x, x)


@needs_triton
def test_another_jax_is_named(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert "needs JAX 0.11, this is JAX" in str(native_triton.unavailable())
