"""Settings that were published, as options."""

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from rlxf.agents.decision_transformer import KZL, ODT, Imitation
from rlxf.cli.offline_learner import OfflineLearner
from rlxf.training import schedule_to_text

PUBLISHED = {"kzl": KZL, "odt": ODT}
"""By the name that they have on the command line."""


def named(args: Sequence[str]) -> str | None:
    """The settings that ``--settings NAME`` asks for; None if there are none of that name."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--settings", nargs="?")
    name = parser.parse_known_args(args)[0].settings
    return name if name in PUBLISHED else None


def as_options(name: str) -> dict[str, Any]:
    """What a command is left at by the published settings of this name."""
    learner = {**PUBLISHED[name]}
    core = learner.pop("core")
    learner["learning_rate"] = str(schedule_to_text(learner["learning_rate"]))
    learner["objective"] = type(learner.get("objective", Imitation())).__name__
    return {"settings": name, "learner": OfflineLearner(**learner), "core": core}
