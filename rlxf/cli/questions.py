"""The six questions that a transformer answers, in words for help and tables."""

QUESTIONS = {
    "position": "how does order enter?",
    "pattern": "which tokens may a query see?",
    "kernel": "how is the weighted average computed?",
    "memory": "what survives from before the segment?",
    "residual": "how does a sublayer's output join the stream?",
    "depth": "how many times is a token processed?",
}
HEAD_QUESTION = "what does an agent read of logged trajectories, when it is trained?"
"""Of what reads a memory at the output: no part of a transformer."""
CONTEXT_QUESTION = "how does an agent act after several pasts at once, when it is trained?"
"""Of what merges its outputs: no part of a transformer, either."""


def summary(technique: type) -> str:
    """First paragraph of a technique's docstring, on one line."""
    return " ".join((technique.__doc__ or "").split("\n\n")[0].split())
