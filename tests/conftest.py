"""Settings that must stand before anything else runs."""

import os

import hypothesis

from jflash import machine_code

machine_code.prepare()  # before JAX first looks for devices
os.environ["JFLASH_CACHE_DIR"] = os.devnull  # nothing that was tuned on this machine

hypothesis.settings.register_profile("jflash", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jflash")
