"""Measurements that `scripts/bench.py` runs; not part of the package."""
