"""Residual connections: how the output of a sublayer is combined with the residual stream."""
