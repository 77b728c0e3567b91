"""Hyperparameters of an agent for TensorBoard's HPARAMS tab."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.gtrxl.checkpoint import SCHEDULES, constructor_settings
from rlxf.attention import TransformerSpec
from rlxf.training import schedule_to_text
from rlxf.training.tensorboard import write_hyperparameters, writes_tensorboard

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO

NO_HYPERPARAMETERS = ("stats_window_size", "verbose", "policy_kwargs", "core")
OF_MAKE_VEC = ("num_envs", "vectorization_mode")
"""Keywords that ``gymnasium.make_vec`` adds to the arguments of an environment."""
Plain = bool | int | float | str


def record_hyperparameters(agent: "GTrXLPPO") -> None:
    """Write the agent's `hyperparameters` to its logger, if that writes TensorBoard events."""
    if writes_tensorboard(agent.logger):
        write_hyperparameters(agent.logger, hyperparameters(agent))


def hyperparameters(agent: "GTrXLPPO") -> dict[str, Plain]:
    """Return the hyperparameters of an agent, including defaults, as numbers and short texts.

    They comprise the constructor arguments, algorithm and policy, the sizes and techniques of the core, and,
    if available, id and arguments of the environment, e.g. ``env`` and ``env.corridor_length``.
    """
    settings = constructor_settings(agent)
    values = {name: value for name, value in settings.items() if name not in NO_HYPERPARAMETERS}
    values |= {name: schedule_to_text(values[name]) for name in SCHEDULES if values[name] is not None}
    values |= {f"policy_kwargs.{name}": value for name, value in agent.policy_kwargs.items()}
    values |= {"algorithm": type(agent).__name__, "policy": type(agent.policy).__name__}
    values |= _choices(agent.core) | _task(agent.env)
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _choices(core: TransformerSpec) -> dict[str, Any]:
    """Return sizes and techniques of the core by name."""
    assert core.memory is not None
    chosen = {field.name: getattr(core, field.name) for field in fields(core)}
    return chosen | {"feed_forward": core.inner_width, "memory_length": core.memory.length}


def _task(env: VecEnv | None) -> dict[str, Any]:
    """Return id and arguments of the environments; nothing if they run in worker processes."""
    vec_env = None if env is None else env.unwrapped
    first, *_ = getattr(vec_env, "envs", None) or [getattr(vec_env, "env", None)]
    spec = getattr(getattr(first, "unwrapped", None), "spec", None)
    if not isinstance(spec, EnvSpec):
        return {}
    own = {name: value for name, value in spec.kwargs.items() if name not in OF_MAKE_VEC}
    return {"env": spec.id} | {f"env.{name}": value for name, value in own.items()}


def _plain(value: Any) -> Plain:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, Plain) else repr(value)
