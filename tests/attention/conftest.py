"""Hypothesis profile with deterministic examples and no deadline, because the machine may be shared."""

from hypothesis import settings

settings.register_profile("attention", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("attention")
