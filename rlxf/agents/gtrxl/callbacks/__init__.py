"""Looking inside an agent while it learns: callbacks that write to TensorBoard."""

from rlxf.agents.gtrxl.callbacks.attention_maps import AttentionMapCallback
from rlxf.agents.gtrxl.callbacks.histograms import HistogramCallback
from rlxf.agents.gtrxl.callbacks.memory import MemoryCallback

__all__ = ["AttentionMapCallback", "HistogramCallback", "MemoryCallback"]
