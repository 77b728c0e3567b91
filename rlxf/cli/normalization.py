"""Observations and rewards in units of their own deviation, in training and in evaluation."""

from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecNormalize


def normalised(env: VecEnv, observations: bool, rewards: bool, gamma: float) -> VecEnv:
    """Wrap ``env`` in SB3's ``VecNormalize``; return it unchanged if nothing is to be normalised.

    Args:
        env: the training environments.
        observations: scale the numbers of observations by their mean and deviation so far.
        rewards: divide rewards by the deviation of the discounted returns so far, and clip them to 10.
        gamma: discount of these returns: that of the agent.

    Raises:
        ValueError: if observations are to be normalised and hold no numbers, or an image.
    """
    if not observations and not rewards:
        return env
    keys = _numbers(env.observation_space) if observations else None
    return VecNormalize(env, norm_obs=observations, norm_reward=rewards, norm_obs_keys=keys, gamma=gamma)


def normalised_alike(env: VecEnv, trained: VecEnv | None) -> VecEnv:
    """Normalise ``env`` by the statistics of ``trained``, which only training updates.

    Rewards stay raw: those of an evaluation are the environment's.
    """
    if not isinstance(trained, VecNormalize) or not trained.norm_obs:
        return env
    alike = VecNormalize(env, training=False, norm_reward=False, norm_obs_keys=trained.norm_obs_keys)
    alike.obs_rms = trained.obs_rms
    return alike


def _numbers(space: spaces.Space) -> list[str] | None:
    """Return the keys of the numbers in a Dict observation; None for other spaces."""
    named = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    numbers = [key for key, part in named.items() if isinstance(part, spaces.Box)]
    if not numbers or any(is_image_space(part) for part in named.values()):
        raise ValueError(f"normalize_observations is for observations that are numbers, not for {space}")
    return numbers if isinstance(space, spaces.Dict) else None
