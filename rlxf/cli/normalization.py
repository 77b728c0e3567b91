"""Observations in units of their own deviation, in training and in evaluation."""

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize


def normalised(env: VecEnv) -> VecNormalize:
    """``env`` with the numbers of its observations scaled by their mean and deviation so far.

    Rewards stay as they are: the agent scales its losses itself.

    Raises:
        ValueError: if the observation holds no numbers, or an image.
    """
    space = env.observation_space
    named = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    numbers = [key for key, part in named.items() if isinstance(part, spaces.Box)]
    if not numbers or any(is_image_space(part) for part in named.values()):
        raise ValueError(f"normalize_observations is for observations that are numbers, not for {space}")
    keys = numbers if isinstance(space, spaces.Dict) else None
    return VecNormalize(env, norm_reward=False, norm_obs_keys=keys)


def normalised_alike(env: VecEnv, trained: VecEnv | None) -> VecEnv:
    """``env`` as the agent saw ``trained``: under the same statistics, which only training moves on."""
    if not isinstance(trained, VecNormalize):
        return env
    alike = VecNormalize(env, training=False, norm_reward=False, norm_obs_keys=trained.norm_obs_keys)
    alike.obs_rms = trained.obs_rms
    return alike
