"""An agent's settings in TensorBoard's HPARAMS tab, beside what it achieves with them."""

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
"""What ``gymnasium.make_vec`` puts among the arguments of an environment."""
Plain = bool | int | float | str


def record_hyperparameters(agent: "GTrXLPPO") -> None:
    """Have the agent's logger write its `hyperparameters`, if it writes TensorBoard events."""
    if writes_tensorboard(agent.logger):
        write_hyperparameters(agent.logger, hyperparameters(agent))


def hyperparameters(agent: "GTrXLPPO") -> dict[str, Plain]:
    """What the agent learns with, defaults included, each a number, a word or a short text.

    Beside the constructor's arguments: algorithm and policy; what the core is made of; the
    environment's id and arguments, ``env`` and ``env.corridor_length``, where it tells them.
    """
    settings = constructor_settings(agent)
    values = {name: value for name, value in settings.items() if name not in NO_HYPERPARAMETERS}
    values |= {name: schedule_to_text(values[name]) for name in SCHEDULES if values[name] is not None}
    values |= {f"policy_kwargs.{name}": value for name, value in agent.policy_kwargs.items()}
    values |= {"algorithm": type(agent).__name__, "policy": type(agent.policy).__name__}
    values |= _choices(agent.core) | _task(agent.env)
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _choices(core: TransformerSpec) -> dict[str, Any]:
    """The core's sizes and techniques, ``residual`` and its like by what they print."""
    assert core.memory is not None
    chosen = {field.name: getattr(core, field.name) for field in fields(core)}
    return chosen | {"feed_forward": core.inner_width, "memory_length": core.memory.length}


def _task(env: VecEnv | None) -> dict[str, Any]:
    """Id and arguments of the environments; nothing where they live in processes of their own."""
    all_of_them = None if env is None else env.unwrapped
    first, *_ = getattr(all_of_them, "envs", None) or [getattr(all_of_them, "env", None)]
    spec = getattr(getattr(first, "unwrapped", None), "spec", None)
    if not isinstance(spec, EnvSpec):
        return {}
    own = {name: value for name, value in spec.kwargs.items() if name not in OF_MAKE_VEC}
    return {"env": spec.id} | {f"env.{name}": value for name, value in own.items()}


def _plain(value: Any) -> Plain:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, Plain) else repr(value)
