"""Policies for vectors, images and Dict observations, and the choice between them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor, NatureCNN

from rlxf.agents.gtrxl.extractors import DictExtractor
from rlxf.agents.gtrxl.own_modules import check_initial_values, warn_of_modes
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.utils.warnings import warn_user


class MlpGTrXLPolicy(GTrXLPolicy):
    """Policy for vectors and discrete observations: flattened, discrete ones as one-hot vectors."""


class CnnGTrXLPolicy(GTrXLPolicy):
    """Policy for images, with SB3's `NatureCNN`."""

    extractor_class = NatureCNN

    @classmethod
    def supports(cls, observation_space: spaces.Space, normalize_images: bool = True) -> bool:
        """Return whether the observations are images."""
        is_image = is_image_space(observation_space, normalized_image=not normalize_images)
        return super().supports(observation_space) and is_image


class MultiInputGTrXLPolicy(GTrXLPolicy):
    """Policy for Dict observations, with SB3's `CombinedExtractor`: a NatureCNN for each image."""

    extractor_class = DictExtractor

    @classmethod
    def supports(cls, observation_space: spaces.Space, normalize_images: bool = True) -> bool:
        """Return whether the observations are Dict."""
        return isinstance(observation_space, spaces.Dict)


POLICIES: dict[str, type[BasePolicy]] = {
    policy.__name__: policy for policy in (MlpGTrXLPolicy, CnnGTrXLPolicy, MultiInputGTrXLPolicy)
}
SB3_POLICIES: dict[str, type[BasePolicy]] = {
    name.replace("GTrXL", kind): policy for name, policy in POLICIES.items() for kind in ("", "Lstm")
}
"""Policies under the names of ``PPO`` and ``RecurrentPPO``: "MlpPolicy", "MlpLstmPolicy" ..."""


def default_policy_name(observation_space: spaces.Space) -> str:
    """Return the name of the policy for an observation space."""
    choices = MultiInputGTrXLPolicy, CnnGTrXLPolicy, MlpGTrXLPolicy
    return next(policy.__name__ for policy in choices if policy.supports(observation_space))


def check_policy(policy: Any, observation_space: spaces.Space, normalize_images: bool = True) -> None:
    """Raise TypeError unless the policy is a `GTrXLPolicy`, ValueError unless it supports the space."""
    if not (isinstance(policy, type) and issubclass(policy, GTrXLPolicy)):
        raise TypeError(
            f"policy must be one of {', '.join(POLICIES)}, or a class derived from one; got {policy}"
        )
    if policy.supports(observation_space, normalize_images):
        return
    if policy.supports(observation_space, normalize_images=False):
        raise ValueError(
            f"{policy.__name__} divides images by 255, so they must be uint8 with values from 0 to 255, got "
            f"{observation_space}; pass policy_kwargs={{'normalize_images': False}} to use them as they are"
        )
    remedy = f"use {default_policy_name(observation_space)!r}"
    if issubclass(policy, CnnGTrXLPolicy) and is_grayscale(observation_space):
        remedy = _channel_advice(observation_space)
    elif issubclass(policy, CnnGTrXLPolicy) and is_stack_of_images(observation_space):
        remedy = (
            "leave FrameStackObservation out, since the memory holds earlier frames, or stack channels with "
            "stable_baselines3.common.vec_env.VecFrameStack(make_vec_env(id, n_envs), 4)"
        )
    raise ValueError(
        f"{policy.__name__} does not support the observation space {observation_space}; {remedy}"
    )


def check_policy_kwargs(policy_kwargs: Any) -> None:
    """Raise TypeError unless the argument ``policy_kwargs`` is None or a mapping of names."""
    if not isinstance(policy_kwargs, Mapping | None):
        raise TypeError(
            f"policy_kwargs must be a dict of arguments of the policy, such as "
            f"{{'normalize_images': False}}, got {policy_kwargs!r}"
        )


def check_new_policy(policy: GTrXLPolicy) -> None:
    """Check the weights and modules of a policy that is not loaded from a file, which replaces the weights.

    Raises:
        ValueError: if values are not 0.

    Warns:
        UserWarning: if the policy flattens images, its first actions do not fit the bounds of the action
            space, or a module acts in updates otherwise than in rollouts.
    """
    check_initial_values(policy)
    warn_of_flattened_images(policy)
    std = policy.mean_std()
    if std is not None and type(policy).build_heads is GTrXLPolicy.build_heads:
        warn_of_action_bounds(policy.action_space, std.item())
    warn_of_modes(policy)


LEAST_STD, MOST_STD = 0.1, 5.0
"""Smallest and largest standard deviation of first actions, in half ranges of the action space."""


def warn_of_action_bounds(space: spaces.Space[Any], std: float) -> None:
    """Warn if first actions, which have mean 0, hardly explore the range of an action space.

    Samples outside of the bounds are clipped to them.

    Args:
        space: action space; only a Box has bounds.
        std: standard deviation of the first actions.
    """
    if not isinstance(space, spaces.Box):
        return
    half = (space.high.astype(np.float64) - space.low) / 2
    outside = (space.low > std) | (space.high < -std)
    if not (outside | (std < LEAST_STD * half) | (std > MOST_STD * half)).any():
        return
    warn_user(
        f"first actions have mean 0 and standard deviation {std:.3g}, and are clipped to the action space "
        f"{space}, of which they explore little: wrap the environment in "
        f"gymnasium.wrappers.RescaleAction(env, -1, 1)"
    )


SMALLEST_IMAGE = 36
"""Minimum height and width, in pixels, of images for SB3's ``NatureCNN``."""


def is_grayscale(space: spaces.Space[Any]) -> bool:
    """Return whether observations are images without an axis of channels, large enough for ``NatureCNN``."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 2 or min(space.shape) < SMALLEST_IMAGE:
        return False
    return is_image_space(spaces.Box(space.low[None], space.high[None], dtype=space.dtype.type))


def is_stack_of_images(space: spaces.Space[Any]) -> bool:
    """Return whether observations are images in a further axis, as those of ``FrameStackObservation``."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 4:
        return False
    return is_image_space(spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type))


def _channel_advice(space: spaces.Space[Any]) -> str:
    shape = (*(space.shape or ()), 1)
    return (
        f"add an axis of channels with gymnasium.wrappers, GrayscaleObservation(env, keep_dim=True) or "
        f"ReshapeObservation(env, {shape}), and use 'CnnGTrXLPolicy'"
    )


def warn_of_flattened_images(policy: BasePolicy) -> None:
    """Warn if the policy flattens images that `CnnGTrXLPolicy` supports, also without an axis of channels."""
    space = policy.observation_space
    if not isinstance(policy, MlpGTrXLPolicy) or policy.features_extractor_class is not FlattenExtractor:
        return
    is_image = default_policy_name(space) == CnnGTrXLPolicy.__name__
    if is_grayscale(space):
        remedy = _channel_advice(space)
    elif is_image and sorted(space.shape or ())[-2] >= SMALLEST_IMAGE:
        remedy = "use 'CnnGTrXLPolicy'"
    else:
        return
    warn_user(
        f"{type(policy).__name__} flattens images of shape {space.shape} and loses their spatial structure: "
        f"{remedy}, which reads them with convolutions"
    )
