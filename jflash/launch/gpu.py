"""Which GPU a program is traced for."""

from __future__ import annotations

import re

import jax

OLDEST = (8, 0)  # Triton in XLA is for Ampere and newer
FAMILIES = {
    "ampere": {"A100", "A800", "A30"},
    "hopper": {"H100", "H200", "H800", "H20", "GH200"},
    "blackwell": {"B100", "B200", "B300", "GB200", "GB300"},
}


def kind() -> str | None:
    """The name of the GPU that a program is traced for: the mesh's, else this process's; None where there is none."""
    if (device := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return device.device_kind
    return jax.devices()[0].device_kind if is_default() else None


def family(kind: str | None) -> str:
    """GPUs that take the same tile sizes; "small", with 99 KiB of shared memory a block, is what fits everywhere."""
    models = re.findall(r"\w+", kind or "")  # whole words: an RTX A1000 is no A100
    return next((name for name, members in FAMILIES.items() if not members.isdisjoint(models)), "small")


def is_default() -> bool:
    """Whether this process runs on a GPU unless told otherwise."""
    return jax.default_backend() == "gpu"


def too_old() -> str | None:
    """Why this process's GPU does not run Triton kernels, or None; always None where there is no GPU."""
    if not is_default():
        return None
    capability = getattr(jax.devices()[0], "compute_capability", None)
    try:
        version = tuple(int(part) for part in str(capability).split("."))
    except ValueError:  # not an NVIDIA GPU: lax.platform_dependent decides
        return None
    if version < OLDEST:
        return f"Triton needs compute capability {OLDEST[0]}.{OLDEST[1]}, this GPU has {capability}"
    return None
