"""Callbacks that write diagnostics of an agent to TensorBoard during training."""

from rlxf.agents.gtrxl.callbacks.attention_maps import AttentionMapCallback
from rlxf.agents.gtrxl.callbacks.histograms import HistogramCallback
from rlxf.agents.gtrxl.callbacks.memory import MemoryCallback

__all__ = ["AttentionMapCallback", "HistogramCallback", "MemoryCallback"]
