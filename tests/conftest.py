"""Settings that must stand before anything else runs."""

import hypothesis
import jax

from jflash import machine_code

machine_code.prepare()  # before JAX first looks for devices
jax.config.update("jax_num_cpu_devices", 8)  # for tests/test_sharding.py; a program that names no device runs on the first

hypothesis.settings.register_profile("jflash", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jflash")
