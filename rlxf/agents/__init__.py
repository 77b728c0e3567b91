"""Agents built on the shared attention core, one folder each."""

if __name__ != "rlxf.agents":
    raise ImportError(
        f"imported as {__name__!r}: the top-level link is for readers; write 'import rlxf.agents'"
    )
