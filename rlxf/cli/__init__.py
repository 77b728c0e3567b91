"""The command ``rlxf``: one file for each of its commands."""

from rlxf.cli.program import main

__all__ = ["main"]
