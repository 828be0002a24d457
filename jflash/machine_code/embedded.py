"""Kernels that a program brings along as PTX, for XLA to launch and not to make: those of jax-triton.

jax-triton runs Triton while JAX lowers, and puts what comes of it into the attribute "opaque" of a custom call, as a
protocol buffer compressed by zlib: TritonAnyKernelCall of jaxlib/gpu/triton.proto in JAX's repository. The few fields that
say what is launched, and how, are read here, so that neither jax-triton nor protobuf need be imported.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
from jaxlib.mlir import ir

from jflash.machine_code.gpus import Target
from jflash.machine_code.kernel import Kernel

CUSTOM_CALL = "triton_kernel_call_ffi"

# Numbers of fields in triton.proto. What it leaves out is zero.
KERNEL_CALL = 1  # of TritonAnyKernelCall; it has another field for a call that is tuned as it runs
KERNEL, GRID = 1, (2, 3, 4)  # of TritonKernelCall
NAME, NUM_WARPS, SHARED_BYTES, PTX = 1, 2, 3, 4  # of TritonKernel

# How a field is written (protobuf.dev/programming-guides/encoding): those above, and all beside them, one of these ways.
INTEGER, BYTES = 0, 2


def embedded_kernels(lowered: jax.stages.Lowered, target: Target) -> tuple[Kernel, ...]:
    """The kernels in a lowered program's calls of Triton, in the order of its text; one, where calls are equal.

    Raises ValueError for a call that chooses among several kernels as it runs, by triton.autotune.
    """
    return tuple({call: _kernel(call, target) for call in _calls(lowered)}.values())


def _calls(lowered: jax.stages.Lowered) -> list[bytes]:
    """What each call of Triton is serialized to."""
    calls = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == CUSTOM_CALL:
            calls.append(zlib.decompress(operation.attributes["mhlo.backend_config"]["opaque"].value_bytes))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.walk(visit)
    return calls


def _kernel(call: bytes, target: Target) -> Kernel:
    any_call = _fields(call)
    if KERNEL_CALL not in any_call:
        raise ValueError("a call of Triton chooses its kernel as it runs, by triton.autotune: nothing tells which it takes")
    launch = _fields(any_call[KERNEL_CALL])
    kernel = _fields(launch[KERNEL])
    return Kernel(
        name=kernel[NAME].decode(),
        target=target,
        grid=tuple(launch[dimension] for dimension in GRID),
        threads=32 * kernel[NUM_WARPS],
        dynamic_shared_bytes=kernel.get(SHARED_BYTES, 0),
        module=kernel[PTX].decode(),
    )


def _fields(message: bytes) -> dict[int, Any]:
    """Number -> value of each field of a protocol buffer, the last where one is repeated: an int, or bytes."""
    fields, position = {}, 0
    while position < len(message):
        tag, position = _integer(message, position)
        value, position = _integer(message, position)
        if tag % 8 == BYTES:
            value, position = message[position : position + value], position + value
        elif tag % 8 != INTEGER:
            raise ValueError(f"field {tag // 8} of a call of Triton is written in a way, {tag % 8}, that triton.proto has not")
        fields[tag // 8] = value
    return fields


def _integer(message: bytes, position: int) -> tuple[int, int]:
    """The integer at a position, seven bits a byte, the lowest first, and the position behind it."""
    value = shift = 0
    while True:
        byte = message[position]
        value, shift, position = value | (byte & 0x7F) << shift, shift + 7, position + 1
        if byte < 0x80:
            return value, position
