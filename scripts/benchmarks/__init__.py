"""Benchmarks of `scripts/bench.py`; not part of the package."""
