"""Recording of agents as Minari datasets."""

from rlxf.collection.recording import collect

__all__ = ["collect"]
