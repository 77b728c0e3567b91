"""Attention kernels: computation of the weighted average of values."""
