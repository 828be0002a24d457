"""Settings that must stand before anything else runs."""

import hypothesis

from jflash import machine_code

machine_code.prepare()  # before JAX first looks for devices

hypothesis.settings.register_profile("jflash", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jflash")
