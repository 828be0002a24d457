"""Where the kernels run in tests: on emulated GPUs everywhere, and on the GPU of this machine, if it has one."""

import contextlib
import functools

import jax
import pytest
from emulator.under_jflash import emulated
from jax.sharding import AbstractMesh, Mesh

from jflash import machine_code

EMULATED = ("a100", "h100")
OF_THE_WHOLE = {"a100": [pytest.mark.whole]}  # its kernels are those of the H100 but for wgmma
MISSING = machine_code.missing_wheels()


@functools.cache
def gpus():
    """The GPUs that JAX finds here."""
    try:
        return tuple(jax.devices("gpu"))
    except RuntimeError:
        return ()


@contextlib.contextmanager
def on(device):
    """Within it, kernels run on a device: one of EMULATED, or "gpu", the first of this machine.

    Yields what the emulated GPU notes (under_jflash.Log), or None; and has its word that nothing was wrong.
    """
    if device == "gpu":
        if not gpus():
            pytest.skip("JAX finds no GPU")
        first = gpus()[0]
        kind = Mesh([first], ("device",)).abstract_mesh.abstract_device
        # The CPU is the default where tests run (conftest.py); jflash learns from the mesh which GPU it is for.
        with jax.default_device(first), jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
            yield None
        return
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    with emulated(device) as log:
        yield log
    assert not log.problems


def each_device(*arguments, id, group, marks=()):
    """Parameters of a test, for each device: what is emulated is divided among the workers by `group`, a GPU has but one."""
    return [
        pytest.param(
            *(device, *arguments),
            id=f"{device} {id}",
            marks=[pytest.mark.xdist_group("device" if device == "gpu" else group), *marks, *OF_THE_WHOLE.get(device, ())],
        )
        for device in (*EMULATED, "gpu")
    ]
