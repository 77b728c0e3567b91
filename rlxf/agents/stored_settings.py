"""Validation rules for the settings and progress of an agent in a file."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from rlxf.training.field_rules import NOTHING, Rule, number, rule_of, whole

SEED = whole(0, 2**32 - 1) | NOTHING
PROGRESS = {
    "num_timesteps": whole(0),
    "_total_timesteps": whole(0),
    "_n_updates": whole(0),
    "_current_progress_remaining": number(most=1),
}
"""Progress attributes of the agent; the last one is negative if a rollout exceeded the total steps."""


def setting_rules(agent: type[Any], names: Collection[str], bounds: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the validation rule of each setting in a file.

    Args:
        agent: class of the agent.
        names: names of the stored settings, which are arguments of the constructor.
        bounds: rules of settings with a range; the other rules follow from the type annotations.
    """
    arguments = inspect.signature(agent).parameters
    return {name: bounds.get(name) or rule_of(arguments[name].annotation) for name in names}
