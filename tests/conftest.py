"""Settings that must stand before anything else runs."""

import os

import hypothesis
import jax
import pytest

from jflash import machine_code

os.environ["JFLASH_CACHE_DIR"] = os.devnull  # nothing that was tuned on this machine

# Before JAX first looks for devices.
machine_code.prepare()
jax.config.update("jax_num_cpu_devices", 8)  # for what runs on several of them

hypothesis.settings.register_profile("jflash", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jflash")


@pytest.fixture(scope="module")
def quickly_compiled():
    """For modules in which compiling for the CPU takes the time, and not what is compiled."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
