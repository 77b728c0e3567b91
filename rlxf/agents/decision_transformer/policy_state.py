"""Conversion of environment observations to the context window of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.context_window import ContextWindow
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.data import action_encoder, observation_encoder
from rlxf.data.encoders import ImageEncoder
from rlxf.envs.wrappers.return_to_go import KEYS, encoded_observation_space
from rlxf.utils.errors import FaultyEnvironmentError, RowError


@dataclass(frozen=True, eq=False)
class ConditionedObservation:
    """Return-conditioned observations of E environments at one step, in the encoding of the dataset.

    Args:
        observations: encoded observations, (E, D) or (E, C, H, W).
        return_to_go: (E,) float32.
        previous_action: (E, ...), in the encoding of the dataset.
        time_steps: (E,) int64.
        batched: False if the observation was of a single environment, without a batch axis.
    """

    observations: Tensor
    return_to_go: Tensor
    previous_action: Tensor
    time_steps: Tensor
    batched: bool


def encode_conditioned_observation(
    observation: Any, facts: DatasetInfo, device: torch.device
) -> ConditionedObservation:
    """Encode an observation of a `ReturnToGo` wrapper, of a single environment or of E environments.

    Raises:
        TypeError: if ``observation`` is not a mapping with the keys of `ReturnToGo`.
        ValueError: if its shape differs from that of the dataset.
        FaultyEnvironmentError: if a number in it is NaN or infinite.
    """
    if not isinstance(observation, Mapping) or set(observation) != set(KEYS):
        given = (
            f"keys {sorted(observation)}" if isinstance(observation, Mapping) else type(observation).__name__
        )
        raise TypeError(
            f"a Decision Transformer is conditioned on a target return: its observations need the keys "
            f"{', '.join(KEYS)}, got {given}. Wrap the environment in rlxf.envs.ReturnToGo(env, "
            f"target_return), or call rlxf.evaluate(agent, target_returns=[...])"
        )
    batched = np.ndim(observation["return_to_go"]) == 2
    parts = {
        key: np.asarray(value) if batched else np.asarray(value)[None] for key, value in observation.items()
    }
    actions = action_encoder(facts.action_space)
    return_to_go = parts["return_to_go"].reshape(-1).astype(np.float32)
    _check_finite(return_to_go)
    return ConditionedObservation(
        observations=torch.as_tensor(encode_observations(parts["observation"], facts), device=device),
        return_to_go=torch.as_tensor(return_to_go, device=device),
        previous_action=torch.as_tensor(actions(parts["previous_action"]), device=device),
        time_steps=torch.as_tensor(parts["time_step"].reshape(-1).astype(np.int64), device=device),
        batched=batched,
    )


def empty_context(
    model: DecisionTransformerModel, encoded: ConditionedObservation, length: int
) -> ContextWindow:
    """Return an empty context window of ``length`` steps for the environments of ``encoded``."""
    rows, like = len(encoded.return_to_go), encoded.return_to_go
    return ContextWindow(
        features=like.new_zeros(rows, length, model.features.width),
        actions=encoded.previous_action.new_zeros(rows, length, *encoded.previous_action.shape[1:]),
        return_to_go=like.new_zeros(rows, length),
        time_steps=encoded.time_steps.new_zeros(rows, length),
        mask=torch.zeros(rows, length, dtype=torch.bool, device=like.device),
    )


@torch.no_grad()
def append_step(
    model: DecisionTransformerModel, state: ContextWindow, encoded: ConditionedObservation, start: Tensor
) -> ContextWindow:
    """Append the step ``encoded`` to the context window.

    ``start`` (E,) bool marks the environments at the first step of an episode; their window is cleared first.
    """
    features = model.features(encoded.observations[:, None])[:, 0]
    return state.clear_rows(start).followed_by(
        features, encoded.previous_action, encoded.return_to_go, encoded.time_steps
    )


def episode_start_mask(encoded: ConditionedObservation, episode_start: Any) -> Tensor:
    """Return a mask (E,) of the environments at the first step of an episode.

    An environment is at the first step if its time step is 0 or ``episode_start`` is True.

    Raises:
        ValueError: if ``episode_start`` does not have shape (E,).
    """
    first = encoded.time_steps == 0
    if episode_start is None:
        return first
    given = torch.as_tensor(np.atleast_1d(episode_start), dtype=torch.bool, device=first.device)
    if given.shape != first.shape:
        raise ValueError(
            f"episode_start must have shape ({len(first)},), one value per environment, "
            f"got {tuple(given.shape)}"
        )
    return first | given


def encode_observations(values: NDArray[Any], facts: DatasetInfo) -> NDArray[Any]:
    """Encode observations (E, ...) as the dataset encodes them.

    Raises:
        ValueError: if their shape differs from that of the dataset.
        FaultyEnvironmentError: if a number is NaN or infinite.
    """
    encoder = observation_encoder(encoded_observation_space(facts.observation_space))
    if isinstance(encoder, ImageEncoder):
        values = _axes_as_in_data(values, encoder)
    if values.shape[1:] != encoder.space.shape:
        raise ValueError(
            f"observations must have the shape of the dataset, {encoder.space.shape}, got {values.shape[1:]}"
        )
    try:
        return encoder(values)
    except RowError as error:
        raise FaultyEnvironmentError(f"the observation of environment {error.row} {error.fault}") from error


def _axes_as_in_data(images: NDArray[Any], encoder: ImageEncoder) -> NDArray[Any]:
    """Move the channel axis of images (E, ...) to its position in the dataset, first or last."""
    shape = encoder.space.shape
    transposed = (np.moveaxis(images, 1, -1), np.moveaxis(images, -1, 1)) if images.ndim == 4 else ()
    return next((view for view in (images, *transposed) if view.shape[1:] == shape), images)


def _check_finite(return_to_go: NDArray[np.float32]) -> None:
    if not np.isfinite(return_to_go).all():
        row = int(np.argmin(np.isfinite(return_to_go)))
        raise FaultyEnvironmentError(f"the return to go of environment {row} is {return_to_go[row]}")
