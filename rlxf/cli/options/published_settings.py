"""Published settings of Decision Transformers as options of ``rlxf train dt``."""

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from rlxf.agents.decision_transformer import KZL, ODT, Imitation
from rlxf.cli.options.offline_options import OfflineOptions
from rlxf.training import schedule_to_text

PUBLISHED = {"kzl": KZL, "odt": ODT}
"""Name on the command line -> settings."""


def settings_name(args: Sequence[str]) -> str | None:
    """Return the value of ``--settings NAME``; None if it is missing or unknown."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--settings", nargs="?")
    name = parser.parse_known_args(args)[0].settings
    return name if name in PUBLISHED else None


def default_options(name: str) -> dict[str, Any]:
    """Return the default options of the command with the published settings of this name."""
    learner = {**PUBLISHED[name]}
    core = learner.pop("core")
    learner["learning_rate"] = str(schedule_to_text(learner["learning_rate"]))
    learner["objective"] = type(learner.get("objective", Imitation())).__name__
    return {"settings": name, "learner": OfflineOptions(**learner), "core": core}
