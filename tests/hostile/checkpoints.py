"""Malicious checkpoints: they name code and folders, and contain data that rlxf never writes."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.attack import Action, Attack, refused_or_done
from tests.hostile.world import World

PICKLE = b"cposix\nsystem\n(S'touch victims/ran'\ntR."


def agent_class(run: str) -> Any:
    from rlxf import DecisionTransformer, GTrXLPPO

    return {"gtrxl": GTrXLPPO, "dt": DecisionTransformer}[run]


def described(
    run: str,
    path: tuple[str, ...],
    value: Any,
    message: str | None,
    use: Callable[[Any], object] = lambda agent: None,
) -> Attack:
    """Load and use a checkpoint with a valid seal and another value in ``agent.json``."""

    def prepare(world: World) -> Action:
        from rlxf.training import read_archive, write_archive

        archive = read_archive(f"runs/{run}/checkpoint.zip")
        document = archive.documents["agent"]
        for name in path[:-1]:
            document = document[name]
        document[path[-1]] = value
        file = Path("tmp", f"hostile{len(list(Path('tmp').iterdir()))}.zip")
        write_archive(file, archive.documents, archive.tensors)
        return lambda: refused_or_done(lambda: use(agent_class(run).load(file, device="cpu")))

    return Attack(prepare, message)


def zipped(change: Callable[[zipfile.ZipFile], None], message: str) -> Attack:
    """Load a checkpoint with an additional zip member."""

    def prepare(world: World) -> Action:
        file = Path("tmp", f"hostile{len(list(Path('tmp').iterdir()))}.zip")
        with zipfile.ZipFile("runs/gtrxl/checkpoint.zip") as whole, zipfile.ZipFile(file, "w") as hostile:
            for name in whole.namelist():
                hostile.writestr(name, whole.read(name))
            change(hostile)
            hostile.comment = b"0" * 64
        return lambda: refused_or_done(lambda: agent_class("gtrxl").load(file, device="cpu"))

    return Attack(prepare, message)


def bytes_of(data: Callable[[], bytes], message: str) -> Attack:
    """Load a file with arbitrary content."""

    def prepare(world: World) -> Action:
        file = Path("tmp", f"hostile{len(list(Path('tmp').iterdir()))}.zip")
        file.write_bytes(data())
        return lambda: refused_or_done(lambda: agent_class("gtrxl").load(file, device="cpu"))

    return Attack(prepare, message)


def evaluated(agent: Any) -> None:
    from rlxf import evaluate

    evaluate(agent, episodes=2)


def another_digest(world: World) -> Action:
    return lambda: refused_or_done(
        lambda: agent_class("gtrxl").load("runs/gtrxl/checkpoint.zip", sha256="0" * 64, device="cpu")
    )


SETTINGS = ("settings",)
ATTACKS = {
    "log folder": described("gtrxl", (*SETTINGS, "tensorboard_log"), "victims", "tensorboard_log"),
    "log folder, offline": described("dt", (*SETTINGS, "tensorboard_log"), "victims", "tensorboard_log"),
    "trust": described("dt", (*SETTINGS, "trust"), True, "trust"),
    "policy that is code": described("gtrxl", ("policy",), "stranger.notes.Policy", "user-defined policy"),
    "features extractor that is code": described(
        "gtrxl", (*SETTINGS, "policy_kwargs"), {"features_extractor_class": {"class": "os.system"}}, ""
    ),
    "optimizer that is code": described(
        "gtrxl", (*SETTINGS, "policy_kwargs"), {"optimizer_class": {"class": "stranger.notes"}}, ""
    ),
    "schedule that is code": described(
        "gtrxl", (*SETTINGS, "learning_rate"), {"name": "stranger.notes", "call": "os.system"}, ""
    ),
    "core that is code": described("dt", (*SETTINGS, "core", "position"), {"name": "os.system"}, ""),
    "objective that is code": described("dt", (*SETTINGS, "objective"), {"name": "stranger.notes"}, ""),
    "sampling that is code": described("dt", (*SETTINGS, "sampling"), {"name": "stranger.notes"}, "sampling"),
    "fraction that is code": described(
        "dt", (*SETTINGS, "validation_fraction"), {"name": "stranger.notes"}, "validation_fraction"
    ),
    "decay that is code": described(
        "dt", (*SETTINGS, "weight_averaging"), "stranger.notes", "weight_averaging"
    ),
    "average that is missing": described("dt", (*SETTINGS, "weight_averaging"), 0.9, "trained_policy"),
    "context that is code": described("dt", (*SETTINGS, "context"), {"name": "stranger.notes"}, "context"),
    "space that is code": described("gtrxl", ("observation_space",), {"type": "stranger.notes"}, ""),
    "environment in a module": described(
        "dt", ("dataset_info", "env_id"), "stranger.notes:CartPole-v1", "is not imported", evaluated
    ),
    "environment with arguments": described(
        "dt", ("dataset_info", "env_kwargs"), {"xml_file": "/etc/passwd"}, "xml_file", evaluated
    ),
    "environment in wrappers": described(
        "dt", ("dataset_info", "env_wrappers"), ["stranger.notes:Wrapper"], "wrapper", evaluated
    ),
    "member that is a pickle": zipped(lambda file: file.writestr("data.pkl", PICKLE), "neither JSON nor"),
    "member in another folder": zipped(
        lambda file: file.writestr("../victims/ran.json", "{}"), "neither JSON nor"
    ),
    "member with a full path": zipped(lambda file: file.writestr("/tmp/ran.json", "{}"), "neither JSON nor"),
    "member that is compressed": zipped(
        lambda file: file.writestr("big.json", b" " * 10**8, zipfile.ZIP_DEFLATED), "compressed"
    ),
    "member that is there twice": zipped(lambda file: file.writestr("agent.json", "{}"), ""),
    "a pickle": bytes_of(lambda: PICKLE, "it is not a zip file"),
    "header of tensors that is too long": bytes_of(
        lambda: (2**62).to_bytes(8, "little") + json.dumps({}).encode(), "it is not a zip file"
    ),
    "another file than asked for": Attack(another_digest, "but 0000"),
}
"""Attacks by name."""
