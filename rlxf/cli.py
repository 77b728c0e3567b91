"""The command ``rlxf``."""

import argparse

from rlxf import __version__


def main() -> None:
    """Run the command line given in ``sys.argv``."""
    parser = argparse.ArgumentParser("rlxf", description="Transformer agents for reinforcement learning.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.parse_args()
