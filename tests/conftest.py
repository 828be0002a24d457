"""Settings that must stand before anything else runs."""

import os

import hypothesis
import jax
import jaxtyping
import pytest

# Shapes that these modules state are checked at each call. Those that check arguments themselves are not among them.
SHAPES_ARE_CHECKED_IN = "jflash.tile", "jflash.reference", "jflash.kernels", "jflash.ring", "jflash.partition"
with jaxtyping.install_import_hook(SHAPES_ARE_CHECKED_IN, "typechecker.check"):
    from checks import compiling_quickly

    from jflash import machine_code

os.environ["JFLASH_CACHE_DIR"] = os.devnull  # nothing that was tuned on this machine

# Before JAX first looks for devices.
machine_code.prepare()
jax.config.update("jax_num_cpu_devices", 8)  # for what runs on several of them

hypothesis.settings.register_profile("jflash", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jflash")


@pytest.fixture(scope="module")
def quickly_compiled():
    with compiling_quickly():
        yield
