"""Observations of environments, with or without a target return, in the encoding of the dataset."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.data import action_encoder, observation_encoder
from rlxf.data.spaces import discrete_start, encoded_parts
from rlxf.envs.return_to_go import KEYS, encoded_observation_space
from rlxf.envs.spaces import batch_of_one
from rlxf.utils.errors import FaultyEnvironmentError, RowError


@dataclass(frozen=True, eq=False)
class EncodedObservation:
    """Observations of E environments at one step, in the encoding of the dataset.

    Args:
        observations: encoded observations, (E, D) or (E, C, H, W).
        batched: False if the observation was of a single environment, without a batch axis.
    """

    observations: Tensor
    batched: bool

    @classmethod
    def encode(
        cls, observation: Any, dataset_info: DatasetInfo, device: torch.device
    ) -> "EncodedObservation":
        """Encode an observation of the dataset's space, of a single environment or of E environments.

        Raises:
            TypeError: if a Dict or a Tuple lacks a part, or another observation is a mapping.
            ValueError: if a shape differs from that of the dataset.
            FaultyEnvironmentError: if a number in it is NaN or infinite, or not in a discrete space.
        """
        space = dataset_info.observation_space
        batched = _is_batch(space, observation)
        values = observation if batched else batch_of_one(observation)
        encode = _encode_nested if isinstance(space, spaces.Dict | spaces.Tuple) else encode_observations
        return cls(torch.as_tensor(encode(values, dataset_info), device=device), batched)

    def episode_starts(self, episode_start: Any) -> Tensor:
        """Return a mask (E,) of the environments at the first step of an episode; None marks none of them.

        Raises:
            ValueError: if ``episode_start`` does not have shape (E,).
        """
        first = torch.zeros(len(self.observations), dtype=torch.bool, device=self.observations.device)
        return first if episode_start is None else first | _given_starts(episode_start, first)


@dataclass(frozen=True, eq=False)
class ConditionedObservation(EncodedObservation):
    """Return-conditioned observations of E environments at one step, in the encoding of the dataset.

    Args:
        observations: encoded observations, (E, D) or (E, C, H, W).
        batched: False if the observation was of a single environment, without a batch axis.
        return_to_go: (E,) float32.
        previous_action: (E, ...), in the encoding of the dataset.
        time_steps: (E,) int64.
    """

    return_to_go: Tensor
    previous_action: Tensor
    time_steps: Tensor

    @classmethod
    def encode(
        cls, observation: Any, dataset_info: DatasetInfo, device: torch.device
    ) -> "ConditionedObservation":
        """Encode an observation of a `ReturnToGo` wrapper, of a single environment or of E environments.

        Its ``observation`` is of the dataset's space, or, for a Dict or a Tuple, the flat vector of
        `ReturnToGo`.

        Raises:
            TypeError: if ``observation`` is not a mapping with the keys of `ReturnToGo`, or a Dict or a Tuple
                lacks a part.
            ValueError: if the shape of a part differs from that of `ReturnToGo` for the dataset.
            FaultyEnvironmentError: if a number in it is NaN or infinite, the previous action is invalid, or a
                time step is negative.
        """
        _check_keys(observation)
        batched = np.ndim(observation["return_to_go"]) == 2
        axis = ... if batched else None
        parts = {key: np.asarray(observation[key])[axis] for key in KEYS if key != "observation"}
        parts["observation"] = _encode_conditioned(observation["observation"], batched, dataset_info)
        _check_parts(parts, dataset_info)
        return_to_go = parts["return_to_go"].reshape(-1).astype(np.float32)
        if not np.isfinite(return_to_go).all():
            row = int(np.argmin(np.isfinite(return_to_go)))
            raise FaultyEnvironmentError(f"the return-to-go of environment {row} is {return_to_go[row]}")
        tensor = partial(torch.as_tensor, device=device)
        return cls(
            observations=tensor(parts["observation"]),
            return_to_go=tensor(return_to_go),
            previous_action=tensor(_encode_previous_actions(parts["previous_action"], dataset_info)),
            time_steps=tensor(parts["time_step"].reshape(-1).astype(np.int64)),
            batched=batched,
        )

    @classmethod
    def without_target(
        cls,
        observation: EncodedObservation,
        previous_action: Tensor,
        time_steps: Tensor,
    ) -> "ConditionedObservation":
        """Add previous actions (E, ...), time steps (E,) and a return-to-go of 0 to an observation."""
        return cls(
            observations=observation.observations,
            batched=observation.batched,
            return_to_go=torch.zeros_like(time_steps, dtype=torch.float32),
            previous_action=previous_action,
            time_steps=time_steps,
        )

    def episode_starts(self, episode_start: Any) -> Tensor:
        """Return a mask (E,) of the environments at the first step of an episode.

        An environment is at the first step if its time step is 0 or ``episode_start`` is True.

        Raises:
            ValueError: if ``episode_start`` does not have shape (E,).
        """
        return (self.time_steps == 0) | super().episode_starts(episode_start)


def _given_starts(episode_start: Any, like: Tensor) -> Tensor:
    """Return ``episode_start`` as a mask with the shape and the device of ``like`` (E,)."""
    given = torch.as_tensor(np.atleast_1d(episode_start), dtype=torch.bool, device=like.device)
    if given.shape != like.shape:
        raise ValueError(
            f"episode_start must have shape ({len(like)},), one value per environment, "
            f"got {tuple(given.shape)}"
        )
    return given


def _is_batch(space: spaces.Space[Any], values: Any, where: str = "the observation") -> bool:
    """Return whether values of a space have a batch axis.

    Raises:
        TypeError: if a part of a Dict or a Tuple is missing, or the values of another space are a mapping.
        ValueError: if the number of axes fits neither one value nor a batch, the shape of a part differs from
            its space, or only some parts have a batch axis.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return _is_array_batch(space, values, where)
    parts = encoded_parts(space)
    if not isinstance(values, Mapping | tuple | list) or isinstance(values, Mapping) != isinstance(
        space, spaces.Dict
    ):
        raise TypeError(f"{where} must be of the space {space}, got {type(values).__name__}: {ADVICE}")
    known = values if isinstance(values, Mapping) else range(len(values))
    if missing := [key for key in parts if key not in known]:
        raise TypeError(f"{where} lacks {missing[0]!r}, it has {', '.join(map(repr, known))}: {ADVICE}")
    batched = {_is_batch(part, values[key], f"{where}[{key!r}]") for key, part in parts.items()}
    if len(batched) > 1:
        raise ValueError(f"some parts of {where} have a batch axis and others none: {ADVICE}")
    return batched.pop()


def _is_array_batch(space: spaces.Space[Any], values: Any, where: str) -> bool:
    """Return whether an array of a space that is not nested has a batch axis; errors as in `_is_batch`."""
    if isinstance(values, Mapping):
        raise TypeError(f"{where} must be an array of the space {space}, got a mapping: {ADVICE}")
    axes = np.ndim(values)
    space_axes = len(space.shape or ())
    if axes not in (space_axes, space_axes + 1):
        raise ValueError(
            f"{where} must have {space_axes} axes, or {space_axes + 1} for several environments, as its "
            f"space {space}, got shape {np.shape(values)}"
        )
    return axes > space_axes


ADVICE = (
    "pass observations of the environment of the data; only agents with a target return take those of "
    "rlxf.envs.ReturnToGo"
)
"""End of the messages about observations of another structure."""


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


def _encode_conditioned(values: Any, batched: bool, dataset_info: DatasetInfo) -> NDArray[Any]:
    """Encode the ``observation`` of a `ReturnToGo`, or of the dataset's space, as rows (E, ...).

    Raises the errors of `ConditionedObservation.encode`.
    """
    space = dataset_info.observation_space
    values = _as_tuples(space, values)
    if not _is_nested(space, values):
        return encode_observations(np.asarray(values)[... if batched else None], dataset_info)
    if _is_batch(space, values) != batched:
        raise ValueError(
            "observation and return_to_go must both have a batch axis, for several environments, or both none"
        )
    return _encode_nested(values if batched else batch_of_one(values), dataset_info)


def _as_tuples(space: spaces.Space[Any], values: Any) -> Any:
    """Return values of a space with tuples in place of lists for Tuple spaces."""
    if isinstance(space, spaces.Dict) and isinstance(values, Mapping):
        parts = space.spaces
        return {key: _as_tuples(parts[key], each) if key in parts else each for key, each in values.items()}
    if not isinstance(space, spaces.Tuple) or not isinstance(values, tuple | list):
        return values
    known = min(len(space.spaces), len(values))
    return (*map(_as_tuples, space.spaces[:known], values[:known]), *values[known:])


def _is_nested(space: spaces.Space[Any], values: Any) -> bool:
    """Return whether values are nested as a Dict or a Tuple space, and not its flat vectors.

    A sequence is a value of a Tuple unless it contains numbers only, and not one for each part.
    """
    if isinstance(values, Mapping):
        return isinstance(space, spaces.Dict | spaces.Tuple)
    if not isinstance(space, spaces.Tuple) or not isinstance(values, tuple):
        return False
    return len(values) == len(encoded_parts(space)) or not all(
        np.isscalar(each) and not isinstance(each, str) for each in values
    )


def _encode_nested(values: Any, dataset_info: DatasetInfo) -> NDArray[Any]:
    """Encode E values of a Dict or a Tuple as rows (E, D); errors as in `encode_observations`."""
    encoder = observation_encoder(dataset_info.observation_space)
    with _as_environment_error("observation"):
        rows = encoder(values)
    if rows.shape[1:] != encoder.shape:
        raise ValueError(
            f"a part of the observation has another shape than in the dataset: the parts have "
            f"{rows.shape[1]} numbers, those of the dataset {encoder.shape[0]}: {ADVICE}"
        )
    return rows


def initial_actions(dataset_info: DatasetInfo, envs: int, device: torch.device) -> Tensor:
    """Return the previous actions of ``envs`` environments at the start of an episode, as `ReturnToGo` does.

    They are 0, or the ``start`` of a discrete space, in the encoding of the dataset, (E, ...).
    """
    space = dataset_info.action_space
    actions = np.zeros((envs, *(space.shape or ())), space.dtype) + discrete_start(space)
    return torch.as_tensor(action_encoder(space)(actions), device=device)


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


def _check_parts(parts: Mapping[str, NDArray[Any]], dataset_info: DatasetInfo) -> None:
    """Raise an error unless all parts of E observations of `ReturnToGo` have E rows, and steps are counts."""
    envs = len(parts["return_to_go"])
    times = parts["time_step"]
    shapes = {
        "return_to_go": (1,),
        "time_step": (1,),
        "previous_action": dataset_info.action_space.shape or (),
        "observation": parts["observation"].shape[1:],  # checked by its encoding
    }
    for key, shape in shapes.items():
        if parts[key].shape != (envs, *shape):
            raise ValueError(
                f"{key} of {envs} environments must have shape {(envs, *shape)}, got {parts[key].shape}: "
                f"pass observations of rlxf.envs.ReturnToGo"
            )
    valid = np.isfinite(times) & (times >= 0)
    if not valid.all():
        row = int(np.argmin(valid))
        raise FaultyEnvironmentError(
            f"the time step of environment {row} is {times[row, 0]}; it must be at least 0"
        )


def _check_keys(observation: Any) -> None:
    """Raise TypeError unless an observation is a mapping with the keys of `ReturnToGo`."""
    given = f"keys {sorted(observation)}" if isinstance(observation, Mapping) else type(observation).__name__
    if not isinstance(observation, Mapping) or set(observation) != set(KEYS):
        raise TypeError(
            f"the agent is conditioned on a target return: its observations need the keys "
            f"{', '.join(KEYS)}, got {given}. Wrap a VecEnv in rlxf.envs.ReturnToGo, "
            f"ReturnToGo(make_vec_env(id, n_envs), target_return), or call rlxf.evaluate(agent, "
            f"target_returns=[...])"
        )
