"""The GPUs that can be compiled for: what the compiler and the estimates must know of each."""

from __future__ import annotations

import dataclasses
from typing import Any

KIB, MIB, GIGA = 2**10, 2**20, 10**9
REGISTERS = 2**16  # of a multiprocessor, 32 bits each
RESERVED_SHARED = KIB  # bytes of shared memory that CUDA keeps of every block


@dataclasses.dataclass(frozen=True)
class Target:
    """One GPU. Sizes are in bytes.

    Sources: the device descriptions in XLA (xla/backends/gpu/target_config/specs), the table of compute capabilities in
    the CUDA programming guide, and NVIDIA's data sheets for clocks, memory and the rates of the tensor cores.
    """

    kind: str  # JAX's device_kind
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    fp32_lanes: int  # of a multiprocessor
    tensor_rate: int  # of a quarter of a multiprocessor: multiply-adds a cycle, dense float16 with float32 sums
    clock_ghz: float
    bandwidth: float  # of the device memory, bytes a second
    memory: float
    l2: int

    @property
    def shared_per_block(self) -> int:
        """The most shared memory that one block may have, static and dynamic together."""
        return self.shared_per_multiprocessor - RESERVED_SHARED

    @property
    def accelerated(self) -> bool:
        """Whether code is made for this architecture only: wgmma on sm_90a and tcgen05 on sm_100a are nowhere else."""
        return self.capability >= (9, 0)

    @property
    def architecture(self) -> str:
        """What ptxas calls it."""
        return f"sm_{self.capability[0]}{self.capability[1]}{'a' if self.accelerated else ''}"

    def config(self) -> str:
        """The GpuTargetConfigProto, as text, from which XLA compiles. What it leaves out does not matter to a kernel."""
        major, minor = self.capability
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.kind}"
            runtime_version {{ major: 13 }}
            dnn_version_info {{ major: 9 minor: 10 }}
            gpu_device_info {{
              name: "{self.kind}"
              device_vendor: "NVIDIA Corporation"
              cuda_compute_capability {{
                major: {major} minor: {minor} feature_extension: {"ACCELERATED_FEATURES" if self.accelerated else "NONE"}
              }}
              driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
              dnn_version: "9.10.0"
              core_count: {self.multiprocessors} fpus_per_core: {self.fp32_lanes} clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {int(self.memory)} memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {self.l2}
              shared_memory_per_core: {self.shared_per_multiprocessor}
              shared_memory_per_block: {48 * KIB} shared_memory_per_block_optin: {self.shared_per_block}
              registers_per_core_limit: {REGISTERS} registers_per_block_limit: {REGISTERS}
              threads_per_core_limit: {self.threads_per_multiprocessor} threads_per_block_limit: 1024 threads_per_warp: 32
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1} block_dim_limit_z: {2**16 - 1}
            }}
            """


A100 = Target(
    kind="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    multiprocessors=108,
    shared_per_multiprocessor=164 * KIB,
    threads_per_multiprocessor=2048,
    blocks_per_multiprocessor=32,
    fp32_lanes=64,
    tensor_rate=256,
    clock_ghz=1.41,
    bandwidth=2.039e12,
    memory=85 * GIGA,
    l2=40 * MIB,
)
L4 = Target(
    kind="NVIDIA L4",
    capability=(8, 9),
    multiprocessors=58,
    shared_per_multiprocessor=100 * KIB,
    threads_per_multiprocessor=1536,
    blocks_per_multiprocessor=24,
    fp32_lanes=128,
    tensor_rate=128,
    clock_ghz=2.04,
    bandwidth=3.0e11,
    memory=23 * GIGA,
    l2=48 * MIB,
)
RTX4090 = dataclasses.replace(
    L4,
    kind="NVIDIA GeForce RTX 4090",
    multiprocessors=128,
    tensor_rate=64,  # half of what an L4 has, unless it sums in float16
    clock_ghz=2.52,
    bandwidth=1.008e12,
    memory=24 * GIGA,
    l2=72 * MIB,
)
H100 = Target(
    kind="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    multiprocessors=132,
    shared_per_multiprocessor=228 * KIB,
    threads_per_multiprocessor=2048,
    blocks_per_multiprocessor=32,
    fp32_lanes=128,
    tensor_rate=512,
    clock_ghz=1.83,
    bandwidth=3.352e12,
    memory=85 * GIGA,
    l2=50 * MIB,
)
H200 = dataclasses.replace(H100, kind="NVIDIA H200", bandwidth=4.8e12, memory=151 * GIGA)
B200 = dataclasses.replace(
    H100,
    kind="NVIDIA B200",
    capability=(10, 0),
    multiprocessors=148,
    tensor_rate=1024,
    clock_ghz=1.965,
    bandwidth=7.672e12,
    memory=191 * GIGA,
    l2=126 * MIB,
)
RTXPRO6000 = dataclasses.replace(
    L4,
    kind="NVIDIA RTX PRO 6000 Blackwell",
    capability=(12, 0),
    multiprocessors=188,
    clock_ghz=2.6,
    bandwidth=1.792e12,
    memory=103 * GIGA,
    l2=128 * MIB,
)

GPUS = {
    "a100": A100,
    "l4": L4,
    "rtx4090": RTX4090,
    "h100": H100,
    "h200": H200,
    "b200": B200,
    "rtxpro6000": RTXPRO6000,
}


def like(device: Any) -> Target:
    """The GPU that a jax.Device is, or else the most similar one, by compute capability, under the device's own name.

    Its architecture is right then; its size, clock and memory need not be.
    """
    for target in GPUS.values():
        if target.kind == device.device_kind:
            return target
    try:
        major, minor = map(int, str(getattr(device, "compute_capability", None)).split("."))
    except ValueError:
        raise RuntimeError(f"an NVIDIA GPU is needed, got {device.device_kind} ({device.platform})") from None
    distance = lambda target: (abs(target.capability[0] - major), abs(target.capability[1] - minor))
    return dataclasses.replace(min(GPUS.values(), key=distance), kind=device.device_kind, capability=(major, minor))
