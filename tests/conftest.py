"""Settings that must stand before anything else runs."""

import glob
import os
import pathlib
import subprocess
import sys

import hypothesis
import jax
import jax.experimental.pallas.tpu  # else Pallas's interpreter imports it in the middle, and JAX traces all anew
import jaxtyping
import pytest

# Shapes that these modules state are checked at each call. Those that check arguments themselves are not among them.
SHAPES_ARE_CHECKED_IN = "jflash.tile", "jflash.reference", "jflash.kernels", "jflash.parallel.ring", "jflash.parallel.partition"
with jaxtyping.install_import_hook(SHAPES_ARE_CHECKED_IN, "typechecker.check"):
    from checks import compiling_quickly

    from jflash import machine_code


def choose_platforms():
    """Where there is a GPU: the CPU for all that does not ask for it (devices.py), as where there is none.

    A process that JAX takes the GPU from would otherwise take three quarters of its memory, and there is one for each
    worker. The workers inherit what the first process finds.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "JAX_PLATFORMS" in os.environ or not glob.glob("/dev/nvidia[0-9]*"):
        return
    found = subprocess.run([sys.executable, "-c", "import jax; jax.devices('gpu')"], capture_output=True, check=False)
    os.environ["JAX_PLATFORMS"] = "cpu" if found.returncode else "cpu,cuda"
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


os.environ["JFLASH_CACHE_DIR"] = os.devnull  # nothing that was tuned on this machine

# Before JAX first looks for devices.
machine_code.prepare()
choose_platforms()
jax.config.update("jax_num_cpu_devices", 8)  # for what runs on several of them

hypothesis.settings.register_profile("jflash", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jflash")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="the whole proof, not only its essentials")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    whole = [item for item in items if item.get_closest_marker("whole")]
    config.hook.pytest_deselected(items=whole)
    items[:] = [item for item in items if not item.get_closest_marker("whole")]


MOST_MAPPINGS = 20_000  # of memory: Linux gives a process 65530 and a compiled program takes some 80, then compilers crash


@pytest.fixture(autouse=True)
def few_programs():
    """Forgets compiled programs where a process holds many."""
    yield
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def quickly_compiled():
    with compiling_quickly():
        yield
