"""Acting step of a `GTrXLPPO` as a function of tensors, for export."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)
from torch import Tensor, nn

from rlxf.agents.common.cores import check_exportable
from rlxf.agents.common.environment_checks import normalizers
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.attention.functional_step import (
    copies,
    free_last_slot,
    named_tensors,
    with_tensors,
    without_empty_keys,
)
from rlxf.envs.wrapper_state import vec_wrappers
from rlxf.export.acting_step import (
    PLAIN,
    ActingStep,
    EnvironmentActions,
    as_observation,
    copy_for_export,
    observation_parts,
    tensor_name,
    zeros_of,
)
from rlxf.utils.warnings import warn_user

KEEPS_OBSERVATIONS = VecCheckNan, VecMonitor, VecNormalize, VecTransposeImage, VecVideoRecorder
"""Wrappers that do not change observations, except for those that an exported step contains."""


class GTrXLActingStep(ActingStep):
    """Acting step with the normalization of observations, all layers, and the encoding of actions inside.

    Args:
        policy: policy of the agent; it is copied.
        normalizer: the ``VecNormalize`` of the training; None for raw observations.
        envs: number of environments E.
        raw_space: observation space of the environments, which may have images with channels in the last
            axis; None for that of the normalizer, else that of the policy.

    Raises:
        ValueError: if the core cannot be exported, or the observation space is nested deeper than a Dict.
    """

    def __init__(
        self,
        policy: GTrXLPolicy,
        normalizer: VecNormalize | None,
        envs: int,
        raw_space: spaces.Space[Any] | None = None,
    ):
        check_exportable(policy.core)
        policy = copy_for_export(policy)
        policy.network_step = None
        statistics = policy.observation_space if normalizer is None else normalizer.venv.observation_space
        raw = statistics if raw_space is None else raw_space
        examples = {name: zeros_of(part, envs) for name, part in observation_parts(raw).items()}
        template = policy.initial_state(envs)
        template = replace(template, cache=without_empty_keys(template.cache))
        super().__init__("GTrXLPPO", (raw, policy.action_space), examples, named_tensors(template))
        self.policy = policy
        self._template = template
        self._statistics = statistics
        self.normalization = None if normalizer is None else ObservationNormalization(normalizer)
        self.decode = EnvironmentActions(policy.action_space)

    def forward(
        self, observations: dict[str, Tensor], episode_start: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        obs = self._policy_observations(observations)
        before = with_tensors(self._template, copies(state))
        here = replace(before, cache=free_last_slot(before.cache))
        index = here.advance(episode_start)
        latent, _ = self.policy.act(as_observation(obs), here, index)
        actions = self.policy.most_likely_actions(latent)
        here.action = self.policy.encode_actions(actions)
        return self.decode(actions), named_tensors(here)

    @property
    def most_steps(self) -> int | None:
        """Number of learned positions; None for other positions."""
        return self.policy.core.max_positions

    def user_parts(self) -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
        policy = self.policy
        obs = self._policy_observations(self.observations)
        inputs = preprocess_obs(as_observation(obs), policy.observation_space, policy.normalize_images)
        return {"features extractor": (policy.features_extractor, (inputs,))}

    def _policy_observations(self, observations: dict[str, Tensor]) -> dict[str, Tensor]:
        """Normalize raw observations, and move the channels of images where the policy expects them."""
        if self.normalization is not None:
            observations = self.normalization(_in_axes_of(self._statistics, observations))
        return _in_axes_of(self.policy.observation_space, observations)


def raw_observation_space(env: VecEnv) -> spaces.Space[Any]:
    """Return the observation space inside of the outermost ``VecNormalize`` and ``VecTransposeImage``.

    Wrappers that do not change the space are ignored. The first other one, e.g. ``VecFrameStack``, counts as
    a part of the environments.
    """
    for wrapper in vec_wrappers(env):
        if not isinstance(wrapper, VecNormalize | VecTransposeImage) and _changes_observations(wrapper):
            return wrapper.observation_space
    return env.unwrapped.observation_space


def exportable_normalizer(env: VecEnv | None) -> VecNormalize | None:
    """Return the ``VecNormalize`` around environments that normalizes observations; None if there is none.

    Raises:
        ValueError: if it is inside of a wrapper that changes the observation space.

    Warns:
        UserWarning: if it is inside of another wrapper, unless that is known to keep observations.
    """
    found = normalizers(env, "norm_obs")
    if not found:
        return None
    around = takewhile(lambda wrapper: wrapper is not found[0], vec_wrappers(env))
    outside = [wrapper for wrapper in around if not isinstance(wrapper, KEEPS_OBSERVATIONS)]
    if any(map(_changes_observations, outside)):
        raise ValueError(
            "only a VecNormalize outside of other wrappers that change observations can be exported: for "
            "example VecNormalize(VecFrameStack(env, 4)) instead of VecFrameStack(VecNormalize(env), 4)"
        )
    for each in outside:
        name = type(each).__name__
        warn_user(
            f"the exported step lacks the wrapper {name}, which is outside of VecNormalize: if it changes "
            f"observations, put it inside, VecNormalize({name}(env)), and train again"
        )
    return found[0]


def _changes_observations(wrapper: VecEnvWrapper) -> bool:
    return wrapper.observation_space != wrapper.venv.observation_space


def _in_axes_of(space: spaces.Space[Any], observations: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move the last axis of images (E, H, W, C) to the front, (E, C, H, W), where a space has it there."""
    parts = observation_parts(space)
    return {
        name: x.movedim(-1, 1) if _has_channels_last(x, parts[name].shape) else x
        for name, x in observations.items()
    }


def _has_channels_last(x: Tensor, shape: tuple[int, ...] | None) -> bool:
    """Return whether images (E, H, W, C) have this shape (C, H, W) only after a move of their last axis."""
    return x.dim() == 4 and tuple(x.shape[1:]) != shape and (x.shape[3], *x.shape[1:3]) == shape


class ObservationNormalization(nn.Module):
    """Normalization ``clip((o - mean) / sqrt(variance + epsilon))`` of a ``VecNormalize``, in float64.

    Args:
        normalizer: source of the statistics, which are copied.
    """

    def __init__(self, normalizer: VecNormalize):
        super().__init__()
        self.clip = normalizer.clip_obs
        stats: Any = normalizer.obs_rms
        keys = normalizer.norm_obs_keys or ()
        chosen = {tensor_name(key): stats[key] for key in keys} if isinstance(stats, dict) else {PLAIN: stats}
        self.means = {name: torch.as_tensor(np.array(one.mean, np.float64)) for name, one in chosen.items()}
        self.deviations = {
            name: torch.as_tensor(np.sqrt(one.var + normalizer.epsilon)) for name, one in chosen.items()
        }

    def forward(self, observations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Normalize the observations whose statistics are known."""
        return {
            name: self._normalize(name, x) if name in self.means else x for name, x in observations.items()
        }

    def _normalize(self, name: str, x: Tensor) -> Tensor:
        normalized = (x.double() - self.means[name]) / self.deviations[name]
        return normalized.clamp(-self.clip, self.clip).float()
