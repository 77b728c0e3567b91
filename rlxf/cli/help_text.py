"""The six axes along which techniques are chosen, as questions for help texts and tables."""

QUESTIONS = {
    "position": "how are token positions encoded?",
    "pattern": "which keys may a query attend to?",
    "kernel": "how is attention computed?",
    "memory": "what is kept of previous segments?",
    "residual": "how is a sublayer's output added to the residual stream?",
    "depth": "how many layers process a token?",
}
"""Axis of `TransformerSpec` -> question."""
HEAD_QUESTION = "how does a trained agent use logged trajectories?"
"""Question of output heads with a datastore, which are not part of the transformer."""
CONTEXT_QUESTION = "how does a trained agent combine several contexts?"
"""Question of techniques that merge action distributions, which are not part of the transformer."""


def summary(technique: type) -> str:
    """Return the first paragraph of a technique's docstring in one line."""
    return " ".join((technique.__doc__ or "").split("\n\n")[0].split())
