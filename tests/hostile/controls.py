"""Harmful actions that the audit must detect."""

import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tests.hostile.attack import Attack, refused_or_done


def control(harm: Callable[[], object]) -> Attack:
    """Return an attack that runs harmful code."""
    return Attack(lambda world: lambda: refused_or_done(harm), None)


HARMFUL = {
    "import": control(lambda: import_module("stranger.notes")),
    "start": control(lambda: subprocess.run(["true"], check=True)),
    "write": control(lambda: Path("victims/text").write_text("yours")),
    "make a folder": control(lambda: Path("elsewhere").mkdir()),
    "take memory": control(lambda: bytearray(b"x") * (300 * 2**20)),
}
"""Harmful actions by name."""
