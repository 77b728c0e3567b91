"""Command line interface ``rlxf``, with one module per command."""

from rlxf.cli.entry_point import main

__all__ = ["main"]
