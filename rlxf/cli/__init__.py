"""Command line interface ``rlxf``, with one module per command."""

from rlxf.cli.program import main

__all__ = ["main"]
