"""Hyperparameters of an agent for TensorBoard's HPARAMS tab."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rlxf.agents.decision_transformer.checkpoint import constructor_settings
from rlxf.training import schedule_to_text
from rlxf.training.tensorboard import write_hyperparameters, writes_tensorboard

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.window_learner import WindowLearner

NO_HYPERPARAMETERS = ("verbose", "core")
Plain = bool | int | float | str


def record_hyperparameters(agent: "WindowLearner") -> None:
    """Write the agent's `hyperparameters` to its logger, if that writes TensorBoard events."""
    if writes_tensorboard(agent.logger):
        write_hyperparameters(agent.logger, hyperparameters(agent))


def hyperparameters(agent: "WindowLearner") -> dict[str, Plain]:
    """Return the agent's hyperparameters, defaults included, as numbers or short texts.

    In addition to the constructor's arguments: algorithm, datasets, environment and the fields of the core.
    """
    settings = constructor_settings(agent)
    values = {name: value for name, value in settings.items() if name not in NO_HYPERPARAMETERS}
    values |= {field.name: getattr(agent.core, field.name) for field in fields(agent.core)}
    values |= {
        "algorithm": type(agent).__name__,
        "dataset": ", ".join(agent.facts.dataset_ids),
        "env": agent.facts.env_id,
        "learning_rate": schedule_to_text(agent.learning_rate),
        "feed_forward": agent.core.inner_width,
    }
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Plain:
    return value if isinstance(value, Plain) else repr(value)
