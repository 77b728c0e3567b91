"""Recording of agents as Minari datasets."""

from rlxf.collection.collecting import collect

__all__ = ["collect"]
