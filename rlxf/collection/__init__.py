"""Recording agents: what they see, do and get, as Minari datasets."""

from rlxf.collection.collecting import collect

__all__ = ["collect"]
