"""Settings that must stand before jax is imported."""

import hypothesis

hypothesis.settings.register_profile("jflash", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("jflash")
