"""Malicious run folders: their configuration names code, and their files are links."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.attack import Action, Attack
from tests.hostile.world import PLAY, World, configured

MODULE = "a module that a file names is not imported"
LINK = "is a symbolic link to"
EVALUATE = f"evaluate {{run}} {PLAY}"
COLLECT = "collect {run} --dataset stranger/of-{name}-v0 --episodes 2 --no-progress-bar"
DISTILL = "distill {run} --steps 32 --no-progress-bar"
RESUME = "resume {run} --no-progress-bar"


def config(run: str, command: str, message: str | None, **changes: Any) -> Attack:
    """Run a command on a run with a modified ``config.json``."""

    def prepare(world: World) -> Action:
        number = len(list(Path("runs").iterdir()))
        make = world.cut_off if command == RESUME else world.copy
        path = configured(make(run, str(number)), **changes)
        return lambda: world.run(command.format(run=path, name=path.name))

    return Attack(prepare, message)


def linked(name: str, run: str = "gtrxl", command: str = RESUME, folder: bool = False) -> Attack:
    """Run a command on a run that contains a symbolic link to a file or folder outside of it."""

    def prepare(world: World) -> Action:
        number = len(list(Path("runs").iterdir()))
        path = (world.cut_off if command == RESUME else world.copy)(run, str(number))
        link = path / name
        if link.is_dir():
            link.rename(path / "aside")
        link.unlink(missing_ok=True)
        link.symlink_to(world.victims if folder else world.victims / "text")
        return lambda: world.run(command.format(run=path, name=path.name))

    return Attack(prepare, LINK)


def shared(content: str, message: str) -> Attack:
    """Evaluate a run whose ``shared.json`` has this content."""

    def prepare(world: World) -> Action:
        path = world.copy("gtrxl", str(len(list(Path("runs").iterdir()))))
        (path / "shared.json").write_text(content)
        return lambda: world.run(EVALUATE.format(run=path))

    return Attack(prepare, message)


def hard_linked(
    name: str, run: str, command: str, change: Callable[[Path], None] = lambda path: None
) -> Attack:
    """Run a command on a run that contains a hard link; writes must replace it by a new file."""

    def prepare(world: World) -> Action:
        number = len(list(Path("runs").iterdir()))
        path = (world.cut_off if command == RESUME else world.copy)(run, str(number))
        change(path)
        (path / name).unlink(missing_ok=True)
        os.link(world.victims / "text", path / name)
        return lambda: world.run(command.format(run=path, name=path.name))

    return Attack(prepare, None)


ATTACKS = {
    "module, evaluate": config("gtrxl", EVALUATE, MODULE, env="stranger.notes:CartPole-v1"),
    "module, resume": config("gtrxl", RESUME, MODULE, env="stranger.notes:CartPole-v1"),
    "module, distill": config("gtrxl", DISTILL, MODULE, env="stranger.notes:CartPole-v1"),
    "module, collect": config("gtrxl", COLLECT, MODULE, env="stranger.notes:CartPole-v1"),
    "module of Python": config("gtrxl", EVALUATE, MODULE, env="antigravity:CartPole-v1"),
    "two modules": config("gtrxl", EVALUATE, MODULE, env="stranger:notes:CartPole-v1"),
    "module, evaluate an offline run": config("dt", EVALUATE, MODULE, env="stranger.notes:CartPole-v1"),
    "module, resume an offline run": config("dt", RESUME, MODULE, env="stranger.notes:CartPole-v1"),
    "module, collect with an offline run": config("dt", COLLECT, MODULE, env="antigravity:CartPole-v1"),
    "window": config("gtrxl", EVALUATE, "render_mode='human'", env_kwargs={"render_mode": "human"}),
    "arguments that read a file": config(
        "gtrxl", RESUME, "xml_file", env="Hopper-v5", env_kwargs={"xml_file": "/etc/passwd"}
    ),
    "arguments of an offline run": config("dt", RESUME, "g=1", env_kwargs={"g": 1}),
    "wrappers among arguments": config(
        "gtrxl", EVALUATE, "wrappers=", env_kwargs={"wrappers": ["os.system"]}
    ),
    "endless episodes": config(
        "gtrxl", EVALUATE, "max_episode_steps=", env_kwargs={"max_episode_steps": 10**18}
    ),
    "trust that the file claims": config(
        "dt", RESUME, MODULE, env="stranger.notes:CartPole-v1", trust_data=True, trust=True
    ),
    "environment that is no text": config("gtrxl", EVALUATE, "must be a Gymnasium id", env=["os", "system"]),
    "agent that is code": config("gtrxl", EVALUATE, "is a run of", agent="os:system"),
    "agent that is code, resume": config("gtrxl", RESUME, "is a run of agent", agent="stranger.notes:Agent"),
    "dataset in another folder": config("dt", RESUME, "is not a Minari id", dataset=["../../victims"]),
    "core that is code": config("gtrxl", RESUME, "", core={"name": "os.system"}),
    "policy that is code": config("gtrxl", RESUME, "", policy="stranger.notes.Policy"),
    "schedule that is code": config("gtrxl", RESUME, "a schedule is", learning_rate="__import__('os')"),
    "objective that is code": config("dt", RESUME, "", objective="stranger.notes"),
    "context that is code": config("dt", RESUME, "context", context="stranger.notes"),
    "weights of another folder": config("gtrxl", RESUME, None, pretrained="victims"),
    "name of a checkpoint that is a path": shared(
        '{"checkpoint": "../../victims/text"}', "must be last or best"
    ),
    "name of a checkpoint that is deep": shared("[" * 10**5, "shared.json cannot be read"),
    "best checkpoint elsewhere": linked("best.zip", "dt", EVALUATE),
    "checkpoint elsewhere": linked("checkpoint.zip"),
    "log elsewhere": linked("progress.csv"),
    "checkpoints elsewhere": linked("checkpoints", folder=True),
    "configuration elsewhere": linked("torchrun.json"),
    "evaluation elsewhere": linked("evaluation", command=EVALUATE, folder=True),
    "log elsewhere, offline": linked("progress.csv", "dt"),
    "hard link to a checkpoint": hard_linked("checkpoint.zip", "gtrxl", f"{RESUME}"),
    "hard link to a log": hard_linked("progress.csv", "gtrxl", RESUME),
    "hard link to a picture": hard_linked(
        "evaluation/targets.png", "dt", f"{EVALUATE} --target-returns 9 10"
    ),
}
"""Attacks by name."""
