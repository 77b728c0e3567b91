"""Process that uses malicious files under an audit hook: ``python -m tests.hostile.process FOLDER``.

It writes ``results.json`` into the folder, with exit status, output and audited events of each attack.
"""

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from rlxf.collection import behavior_policy
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
    """Restore the files, run one attack, and return its result."""
    world.restore()
    action = attack.prepare(world)
    with watch.on() as seen:
        try:
            status, output = action()
        except BaseException:
            status, output = 1, traceback.format_exc()
    return {"status": status, "output": output, "events": seen.events, "memory": seen.memory} | {
        "untouched": world.untouched()
    }


def main(folder: Path) -> None:
    """Use benign files first, so that everything is imported, then run all attacks."""
    warnings.simplefilter("ignore")
    behavior_policy.SCORED_EPISODES = 2  # of 100, which the benign dataset does not need
    world = World(folder)
    sys.path.append(str(world.root))  # as python -m does, so that the module of the attacker can be found
    world.benign()
    watch = Watch(world.writable, world.root)
    results = {name: attacked(world, watch, attack) for name, attack in (ATTACKS | controls.HARMFUL).items()}
    (world.root / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
