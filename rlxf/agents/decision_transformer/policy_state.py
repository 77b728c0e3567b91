"""Conversion of environment observations to the context window of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.trajectory_model import ContextWindow
from rlxf.data import action_encoder, observation_encoder
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

    @classmethod
    def encode(
        cls, observation: Any, dataset_info: DatasetInfo, device: torch.device
    ) -> "ConditionedObservation":
        """Encode an observation of a `ReturnToGo` wrapper, of a single environment or of E environments.

        Raises:
            TypeError: if ``observation`` is not a mapping with the keys of `ReturnToGo`.
            ValueError: if its shape differs from that of the dataset.
            FaultyEnvironmentError: if a number in it is NaN or infinite.
        """
        _check_keys(observation)
        batched = np.ndim(observation["return_to_go"]) == 2
        axis = ... if batched else None
        parts = {key: np.asarray(value)[axis] for key, value in observation.items()}
        return_to_go = parts["return_to_go"].reshape(-1).astype(np.float32)
        _check_finite(return_to_go)
        actions, tensor = action_encoder(dataset_info.action_space), partial(torch.as_tensor, device=device)
        return cls(
            observations=tensor(encode_observations(parts["observation"], dataset_info)),
            return_to_go=tensor(return_to_go),
            previous_action=tensor(actions(parts["previous_action"])),
            time_steps=tensor(parts["time_step"].reshape(-1).astype(np.int64)),
            batched=batched,
        )

    def episode_starts(self, episode_start: Any) -> Tensor:
        """Return a mask (E,) of the environments at the first step of an episode.

        An environment is at the first step if its time step is 0 or ``episode_start`` is True.

        Raises:
            ValueError: if ``episode_start`` does not have shape (E,).
        """
        first = self.time_steps == 0
        if episode_start is None:
            return first
        given = torch.as_tensor(np.atleast_1d(episode_start), dtype=torch.bool, device=first.device)
        if given.shape != first.shape:
            raise ValueError(
                f"episode_start must have shape ({len(first)},), one value per environment, "
                f"got {tuple(given.shape)}"
            )
        return first | given


@torch.no_grad()
def extend_context(
    model: DecisionTransformerModel,
    state: ContextWindow | None,
    encoded: ConditionedObservation,
    start: Tensor,
    length: int,
) -> ContextWindow:
    """Append a step to a context window.

    Args:
        model: model with the feature extractor.
        state: window of the previous steps; None for an empty one.
        encoded: the new step.
        start: (E,) bool, environments at the first step of an episode, whose window is cleared first.
        length: number of steps of an empty window.

    Raises:
        ValueError: if the window is of another number of environments.
    """
    state = _empty_context(model, encoded, length) if state is None else state
    if len(state.mask) != len(start):
        raise ValueError(
            f"the state is of {len(state.mask)} environments, the observation of {len(start)}; "
            f"pass state=None to start with an empty context"
        )
    features = model.features(encoded.observations[:, None])[:, 0]
    return state.clear_rows(start).append(
        features, encoded.previous_action, encoded.return_to_go, encoded.time_steps
    )


def _empty_context(
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


def encode_observations(values: NDArray[Any], dataset_info: DatasetInfo) -> NDArray[Any]:
    """Encode observations (E, ...) as the dataset encodes them.

    Raises:
        ValueError: if their shape differs from that of the dataset.
        FaultyEnvironmentError: if a number is NaN or infinite.
    """
    encoder = observation_encoder(encoded_observation_space(dataset_info.observation_space))
    values = encoder.match_axes(values)
    if values.shape[1:] != encoder.space.shape:
        raise ValueError(
            f"observations must have the shape of the dataset, {encoder.space.shape}, got {values.shape[1:]}"
        )
    try:
        return encoder(values)
    except RowError as error:
        raise FaultyEnvironmentError(f"the observation of environment {error.row} {error.fault}") from error


def _check_keys(observation: Any) -> None:
    """Raise TypeError unless an observation is a mapping with the keys of `ReturnToGo`."""
    given = f"keys {sorted(observation)}" if isinstance(observation, Mapping) else type(observation).__name__
    if not isinstance(observation, Mapping) or set(observation) != set(KEYS):
        raise TypeError(
            f"a Decision Transformer is conditioned on a target return: its observations need the keys "
            f"{', '.join(KEYS)}, got {given}. Wrap the environment in rlxf.envs.ReturnToGo(env, "
            f"target_return), or call rlxf.evaluate(agent, target_returns=[...])"
        )


def _check_finite(return_to_go: NDArray[np.float32]) -> None:
    if not np.isfinite(return_to_go).all():
        row = int(np.argmin(np.isfinite(return_to_go)))
        raise FaultyEnvironmentError(f"the return to go of environment {row} is {return_to_go[row]}")
