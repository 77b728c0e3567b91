"""Hypothesis draws the same examples in every run and sets no deadline: the machine may be shared."""

from hypothesis import settings

settings.register_profile("attention", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("attention")
