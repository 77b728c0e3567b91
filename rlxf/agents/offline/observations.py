"""Observations that condition a Decision Transformer on a target return, in the encoding of the dataset."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlxf.agents.offline.config import DatasetInfo
from rlxf.data import action_encoder, observation_encoder
from rlxf.envs.wrappers import KEYS, encoded_observation_space
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
            FaultyEnvironmentError: if a number in it is NaN or infinite, or the previous action is invalid.
        """
        _check_keys(observation)
        batched = np.ndim(observation["return_to_go"]) == 2
        axis = ... if batched else None
        parts = {key: np.asarray(value)[axis] for key, value in observation.items()}
        return_to_go = parts["return_to_go"].reshape(-1).astype(np.float32)
        if not np.isfinite(return_to_go).all():
            row = int(np.argmin(np.isfinite(return_to_go)))
            raise FaultyEnvironmentError(f"the return-to-go of environment {row} is {return_to_go[row]}")
        tensor = partial(torch.as_tensor, device=device)
        return cls(
            observations=tensor(encode_observations(parts["observation"], dataset_info)),
            return_to_go=tensor(return_to_go),
            previous_action=tensor(_encode_previous_actions(parts["previous_action"], dataset_info)),
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
    with _as_environment_error("observation"):
        return encoder(values)


def _encode_previous_actions(values: NDArray[Any], dataset_info: DatasetInfo) -> NDArray[Any]:
    with _as_environment_error("previous action"):
        return action_encoder(dataset_info.action_space)(values)


@contextmanager
def _as_environment_error(name: str) -> Iterator[None]:
    """Convert a `RowError` to a `FaultyEnvironmentError` that names the environment of the row."""
    try:
        yield
    except RowError as error:
        raise FaultyEnvironmentError(f"the {name} of environment {error.row} {error.fault}") from error


def _check_keys(observation: Any) -> None:
    """Raise TypeError unless an observation is a mapping with the keys of `ReturnToGo`."""
    given = f"keys {sorted(observation)}" if isinstance(observation, Mapping) else type(observation).__name__
    if not isinstance(observation, Mapping) or set(observation) != set(KEYS):
        raise TypeError(
            f"a Decision Transformer is conditioned on a target return: its observations need the keys "
            f"{', '.join(KEYS)}, got {given}. Wrap the environment in rlxf.envs.ReturnToGo(env, "
            f"target_return), or call rlxf.evaluate(agent, target_returns=[...])"
        )
