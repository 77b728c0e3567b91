"""Harm done on purpose, to see that the watch sees it."""

import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tests.hostile.attack import Action, Attack, refused_or_done
from tests.hostile.world import World


def control(harm: Callable[[], object]) -> Attack:
    """Code that a file could have made run; what it leaves behind is taken away by the next control."""

    def prepare(world: World) -> Action:
        (world.victims / "ran").unlink(missing_ok=True)
        (world.victims / "text").write_text("mine")
        return lambda: refused_or_done(harm)

    return Attack(prepare, None)


HARMFUL = {
    "import": control(lambda: import_module("stranger.notes")),
    "start": control(lambda: subprocess.run(["true"], check=True)),
    "write": control(lambda: Path("victims/text").write_text("yours")),
    "rename": control(lambda: Path("tmp/mine").rename("victims/ran")),
    "take memory": control(lambda: bytearray(b"x") * (300 * 2**20)),
}
"""By name."""
