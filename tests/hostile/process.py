"""The process that uses the files of strangers: ``python -m tests.hostile.process FOLDER``.

It writes ``found.json`` into the folder: for each attack the exit status, what was printed, what was seen.
"""

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from tests.hostile import checkpoints, controls, datasets, episodes, memory, runs
from tests.hostile.attack import Attack
from tests.hostile.audit import Watch
from tests.hostile.world import World

ATTACKS: dict[str, Attack] = {
    f"{kind}: {name}": attack
    for kind, module in {
        "dataset": datasets,
        "episodes": episodes,
        "run": runs,
        "checkpoint": checkpoints,
        "memory": memory,
    }.items()
    for name, attack in module.ATTACKS.items()
}


def attacked(world: World, watch: Watch, attack: Attack) -> dict[str, Any]:
    """What came of one attack, whatever those before it have left."""
    world.restore()
    action = attack.prepare(world)
    with watch.on() as seen:
        try:
            status, said = action()
        except BaseException:
            status, said = 1, traceback.format_exc()
    return {"status": status, "said": said, "events": seen.events, "memory": seen.memory} | {
        "untouched": world.untouched()
    }


def main(folder: Path) -> None:
    """Use benign files, so that all is imported; then those of strangers."""
    warnings.simplefilter("ignore")
    world = World(folder)
    sys.path.append(str(world.root))  # as python -m does: a module of the stranger could be found
    world.benign()
    watch = Watch(world.writable, world.root)
    found = {name: attacked(world, watch, attack) for name, attack in (ATTACKS | controls.HARMFUL).items()}
    (world.root / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
