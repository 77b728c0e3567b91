"""Argument checks, default sizes and warnings of GTrXLPPO, its training environment, and the HParams tab."""

import warnings
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Env, spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.common.arguments import did_you_mean
from rlxf.agents.gtrxl.checkpoint import SCHEDULES, constructor_settings
from rlxf.agents.gtrxl.policy import (
    POLICIES,
    SB3_POLICIES,
    CnnGTrXLPolicy,
    GTrXLPolicy,
    MlpGTrXLPolicy,
    MultiInputGTrXLPolicy,
    default_policy_name,
)
from rlxf.attention import Compressive, TransformerSpec
from rlxf.envs.make import make_vec_env
from rlxf.envs.spaces import check_spaces
from rlxf.envs.step_checks import with_checked_steps
from rlxf.envs.vector import as_vec_env, has_filler_rows, shows_filler_rows
from rlxf.training import schedule_to_text
from rlxf.training.distributed import process_group
from rlxf.training.resumed_logger import write_hyperparameters, writes_tensorboard

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.ppo import GTrXLPPO


ROLLOUT_STEPS = 2048
"""Minimum steps of a rollout over all environments if ``n_steps`` is None, as in SB3's PPO."""
BATCH_STEPS = 256
"""Minimum steps of a minibatch if ``batch_size`` is None."""


def as_training_env(env: str | Env | VecEnv | VectorEnv | None, n_envs: int, seed: int | None) -> Any:
    """Convert ``env`` to a type that SB3 accepts.

    For an id, this process's share of ``n_envs`` environments is created. A ``VectorEnv`` is wrapped.

    Raises:
        ValueError: if the id is unknown, or ``n_envs`` is less than 1.
        TypeError: if a space is not supported, or ``env`` is not an environment.
    """
    if env is None:
        return None
    if isinstance(env, str):
        env = make_vec_env(env, process_group().part("n_envs", n_envs), seed)
    if isinstance(env, VectorEnv):
        env = as_vec_env(env)
    if not isinstance(env, Env | VecEnv):
        raise TypeError(f"env must be a Gymnasium id, an Env, a VecEnv or a VectorEnv, got {env!r}")
    check_spaces(env.observation_space, env.action_space)
    return with_checked_steps(env)


def default_n_steps(env: Env | VecEnv | None, n_envs: int, segment_length: int) -> int:
    """Return the steps of each environment for a rollout of at least `ROLLOUT_STEPS`, in whole segments.

    Args:
        env: the training environments; None if they are not known yet.
        n_envs: environments of all processes if ``env`` is None.
        segment_length: steps of a segment.
    """
    per_process = env.num_envs if isinstance(env, VecEnv) else 1
    number = n_envs if env is None else per_process * process_group().count
    segments = -(-ROLLOUT_STEPS // max(1, number * segment_length))
    return max(1, segments) * segment_length


def default_batch_size(segment_length: int) -> int:
    """Return the steps of a minibatch: whole segments, and at least `BATCH_STEPS`."""
    return max(1, -(-BATCH_STEPS // max(1, segment_length))) * segment_length


def check_sizes(n_steps: int | None, segment_length: int, batch_size: int, n_epochs: int) -> None:
    """Raise ValueError unless rollouts and minibatches consist of whole segments and sizes are positive.

    ``n_steps`` may be None, since `default_n_steps` returns whole segments.
    """
    n_steps = segment_length if n_steps is None else n_steps
    sizes = {"segment_length": segment_length, "n_steps": n_steps, "n_epochs": n_epochs}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name, value in {"n_steps": n_steps, "batch_size": batch_size}.items():
        if value < segment_length or value % segment_length:
            raise ValueError(f"{name} must be a multiple of segment_length={segment_length}, got {value}")


def check_coefficients(
    gamma: float,
    gae_lambda: float,
    critic_lambda: float | None,
    vf_coef: float,
    max_grad_norm: float,
    target_kl: float | None,
    advantage_epsilon: float,
    reconstruction_coef: float,
) -> None:
    """Raise ValueError unless each number is in its range; NaN is never allowed."""
    discounts = {"gamma": gamma, "gae_lambda": gae_lambda, "critic_lambda": critic_lambda}
    for name, value in discounts.items():
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {value}")
    for name, value in {"vf_coef": vf_coef, "reconstruction_coef": reconstruction_coef}.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    for name, value in {"max_grad_norm": max_grad_norm, "advantage_epsilon": advantage_epsilon}.items():
        if not value > 0:
            raise ValueError(f"{name} must be more than 0, got {value}")
    if target_kl is not None and not target_kl > 0:
        raise ValueError(f"target_kl must be more than 0, or None for no limit, got {target_kl}")


def check_schedule(name: str, value: float | Schedule, progress: float = 1.0) -> None:
    """Raise unless a number, or the value of a schedule, is finite and at least 0.

    Args:
        name: name of the argument, for the message.
        value: a number, or a function of the progress remaining.
        progress: progress remaining at which a function is evaluated: 1 at the start, 0 at the end.

    Raises:
        ValueError: if the number is negative or not finite.
        TypeError: if there is no number.
    """
    given = value(progress) if callable(value) else value
    if not hasattr(given, "__float__"):
        raise TypeError(f"{name} must be a number or a function of the progress remaining, got {given!r}")
    if not 0 <= given < float("inf"):
        raise ValueError(f"{name} must be finite and at least 0, got {given} at progress {progress:g}")


def check_has_env(env: VecEnv | None) -> None:
    """Raise ValueError if the agent has no training environment."""
    if env is None:
        raise ValueError(
            "the agent was loaded without an environment to train in: load it with load(path, env=...), or "
            "call set_env(...) before learn"
        )


def policy_class_by_name(name: str) -> type[BasePolicy]:
    """Return a policy class by its name in rlxf or Stable-Baselines3.

    Raises:
        ValueError: if the name is unknown; the message lists all names and the most similar one.
    """
    known = POLICIES | SB3_POLICIES
    if name not in known:
        raise ValueError(
            f"unknown policy {name!r}; use one of {', '.join(POLICIES)}{did_you_mean(name, list(known))}"
        )
    return known[name]


def check_value_clipping(clip_range_vf: float | Schedule | None) -> None:
    """Raise like `check_schedule`, and ValueError if the bound is 0, which would freeze the values."""
    if clip_range_vf is not None:
        check_schedule("clip_range_vf", clip_range_vf)
    if clip_range_vf == 0:
        raise ValueError("clip_range_vf must be more than 0, or None for no clipping, got 0")


def check_policy(policy: type[BasePolicy], observation_space: spaces.Space) -> None:
    """Raise ValueError unless the policy supports the observation space; TypeError if it is another class."""
    if not issubclass(policy, GTrXLPolicy):
        raise TypeError(
            f"policy must be one of {', '.join(POLICIES)}, or a class derived from one; got {policy}"
        )
    needs_dict, has_dict = (
        issubclass(policy, MultiInputGTrXLPolicy),
        isinstance(observation_space, spaces.Dict),
    )
    needs_image = issubclass(policy, CnnGTrXLPolicy)
    if needs_dict != has_dict or (
        needs_image and default_policy_name(observation_space) != CnnGTrXLPolicy.__name__
    ):
        raise ValueError(
            f"{policy.__name__} does not support the observation space {observation_space}; "
            f"use {default_policy_name(observation_space)!r}"
        )


SMALLEST_IMAGE = 36
"""Minimum height and width, in pixels, of images for SB3's ``NatureCNN``."""


def warn_of_flattened_images(policy: BasePolicy) -> None:
    """Warn if the policy flattens images that `CnnGTrXLPolicy` supports."""
    space = policy.observation_space
    flattens = isinstance(policy, MlpGTrXLPolicy) and policy.features_extractor_class is FlattenExtractor
    is_image = default_policy_name(space) == CnnGTrXLPolicy.__name__
    if flattens and is_image and sorted(space.shape or ())[-2] >= SMALLEST_IMAGE:
        warnings.warn(
            f"{type(policy).__name__} flattens images of shape {space.shape} and loses their spatial "
            f"structure: use 'CnnGTrXLPolicy', which reads them with convolutions",
            stacklevel=4,
        )


def warn_of_filler_rows(env: VecEnv, observation: Any) -> bool:
    """Warn if an observation of the agent's environments holds filler rows; return whether it does."""
    if not shows_filler_rows(env, observation):
        return False
    warnings.warn(
        "with persist_memory_across_episodes=True predict treats filler rows as steps and stores them in "
        "memory, although "
        "training skips them: predict in environments with autoreset_mode=AutoresetMode.SAME_STEP",
        stacklevel=3,
    )
    return True


def check_compressive_blocks(core: TransformerSpec, env: VecEnv) -> None:
    """Raise ValueError if filler rows would break the blocks of a `Compressive` memory across episodes."""
    if isinstance(core.memory, Compressive) and has_filler_rows(env):
        raise ValueError(
            f"autoreset_mode=NEXT_STEP inserts a filler row after each episode, and with "
            f"persist_memory_across_episodes=True {core.memory} would discard every block with a filler row "
            f"as incomplete; "
            f"create the environments with autoreset_mode=AutoresetMode.SAME_STEP"
        )


def stack_observations(
    observations: list[np.ndarray] | list[dict[str, np.ndarray]],
) -> np.ndarray | dict[str, np.ndarray]:
    """Stack N single observations to a batch."""
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    return np.stack(observations)


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
