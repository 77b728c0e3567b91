"""Normalization of observations and rewards with SB3's ``VecNormalize``."""

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize


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
    keys = _numbers(env.observation_space) if observations else None
    return VecNormalize(env, norm_obs=observations, norm_reward=rewards, norm_obs_keys=keys, gamma=gamma)


def normalize_like(env: VecEnv, trained: VecEnv | None) -> VecEnv:
    """Normalize the observations of ``env`` with the statistics of ``trained``, without updating them.

    Rewards are not normalized, because evaluations report the rewards of the environment.
    """
    if not isinstance(trained, VecNormalize) or not trained.norm_obs:
        return env
    alike = VecNormalize(env, training=False, norm_reward=False, norm_obs_keys=trained.norm_obs_keys)
    alike.obs_rms = trained.obs_rms
    return alike


def _numbers(space: spaces.Space) -> list[str] | None:
    """Return the keys of the `Box` entries of a Dict observation space; None for other spaces."""
    named = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    numbers = [key for key, part in named.items() if isinstance(part, spaces.Box)]
    if not numbers or any(is_image_space(part) for part in named.values()):
        raise ValueError(f"normalize_observations needs Box observations that are not images, got {space}")
    return numbers if isinstance(space, spaces.Dict) else None
