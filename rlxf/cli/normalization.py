"""Normalization of observations and rewards in training, and of observations afterwards."""

from pathlib import Path

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from rlxf.training import RunFolder, load_normalizer


def normalize_env(env: VecEnv, observations: bool, rewards: bool, gamma: float) -> VecEnv:
    """Wrap ``env`` in SB3's ``VecNormalize``; return it unchanged if nothing is normalized.

    Args:
        env: the training environments.
        observations: normalize observations by their running mean and standard deviation.
        rewards: divide rewards by the running standard deviation of discounted returns; clip them to +-10.
        gamma: discount factor of these returns, equal to that of the agent.

    Raises:
        ValueError: if ``observations`` is True, and observations contain an image or no `Box`.
    """
    if not observations and not rewards:
        return env
    keys = _box_keys(env.observation_space) if observations else None
    return VecNormalize(env, norm_obs=observations, norm_reward=rewards, norm_obs_keys=keys, gamma=gamma)


def _box_keys(space: spaces.Space) -> list[str] | None:
    """Return the keys of the `Box` entries of a Dict observation space; None for other spaces.

    Raises:
        ValueError: if there is no such entry, or if an entry is an image.
    """
    named = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    numbers = [key for key, part in named.items() if isinstance(part, spaces.Box)]
    if not numbers or any(is_image_space(part) for part in named.values()):
        raise ValueError(f"--normalize-observations needs Box observations that are not images, got {space}")
    return numbers if isinstance(space, spaces.Dict) else None


def normalize_as_in_training(run: RunFolder, env: VecEnv, checkpoint: Path) -> VecEnv:
    """Normalize the observations of ``env`` with the statistics of a checkpoint, without updating them.

    Rewards are not normalized.
    """
    if not run.config.get("normalize_observations", False):
        return env
    normalized = load_normalizer(run.best_normalizer if checkpoint == run.best else run.normalizer, env)
    normalized.training = normalized.norm_reward = False
    return normalized
