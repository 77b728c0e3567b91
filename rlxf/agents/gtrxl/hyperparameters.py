"""Hyperparameters of GTrXLPPO for the HParams tab of TensorBoard."""

from collections.abc import Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.gtrxl.config import SCHEDULES
from rlxf.attention import TransformerSpec
from rlxf.envs.specs import single_spec
from rlxf.training import schedule_to_text
from rlxf.training.tensorboard import HyperparameterValue, to_hyperparameters

EXCLUDED_FROM_HPARAMS = ("stats_window_size", "verbose", "policy_kwargs", "core")
"""Arguments that `hyperparameters` omits or replaces by their contents."""


def hyperparameters(
    settings: Mapping[str, Any], algorithm: str, policy: str, env: VecEnv | None
) -> dict[str, HyperparameterValue]:
    """Return the hyperparameters of an agent, including defaults, as numbers and short texts.

    They comprise the constructor arguments, algorithm and policy, the sizes and techniques of the core, and,
    if available, id and arguments of the environment, e.g. ``env`` and ``env.corridor_length``.

    Args:
        settings: constructor arguments by name, including "core" and "policy_kwargs".
        algorithm: name of the agent's class.
        policy: name of the policy's class.
        env: the training environments.
    """
    values = {name: value for name, value in settings.items() if name not in EXCLUDED_FROM_HPARAMS}
    values |= {name: schedule_to_text(values[name]) for name in SCHEDULES if values[name] is not None}
    values |= {f"policy_kwargs.{name}": value for name, value in settings["policy_kwargs"].items()}
    values |= {"algorithm": algorithm, "policy": policy}
    values |= _choices(settings["core"]) | _task(env)
    return to_hyperparameters(values)


def _choices(core: TransformerSpec) -> dict[str, Any]:
    """Return sizes and techniques of the core by name."""
    length = None if core.memory is None else core.memory.length
    return vars(core.resolved()) | {"memory_length": length}


def _task(env: VecEnv | None) -> dict[str, Any]:
    """Return id and arguments of the environments; nothing if they run in worker processes."""
    vec_env = None if env is None else env.unwrapped
    first, *_ = getattr(vec_env, "envs", None) or [getattr(vec_env, "env", None)]
    spec = getattr(getattr(first, "unwrapped", None), "spec", None)
    if not isinstance(spec, EnvSpec):
        return {}
    return {"env": spec.id} | {f"env.{name}": value for name, value in single_spec(spec).kwargs.items()}
