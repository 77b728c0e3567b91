"""Environments: Gymnasium tasks with memory, and the helpers that make and wrap them."""

if __name__ != "rlxf.envs":
    raise ImportError(
        f"imported as {__name__!r}: the top-level link is for readers; write 'import rlxf.envs'"
    )
