"""Callbacks that write diagnostics of an agent to TensorBoard during training."""

from rlxf.agents.gtrxl.callbacks.attention_maps import AttentionMapCallback
from rlxf.agents.gtrxl.callbacks.metrics import HistogramCallback, MemoryCallback

__all__ = ["AttentionMapCallback", "HistogramCallback", "MemoryCallback"]
