"""Comparison of the spaces of datasets, environments and agents."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from rlxf.data.spaces import Space, encoded_parts, image_shape, is_image
from rlxf.utils.errors import DatasetError


class DatasetDescription(Protocol):
    """Protocol of a dataset or its description, such as `Trajectories`."""

    @property
    def dataset_ids(self) -> tuple[str, ...]:
        """Minari ids."""

    @property
    def observation_space(self) -> Space:
        """Observation space of the dataset."""

    @property
    def action_space(self) -> Space:
        """Action space of the dataset."""


def check_spaces_match(
    trajectories: DatasetDescription, observation_space: Space, action_space: Space
) -> None:
    """Check that the spaces of an environment match those of the dataset.

    Differences that do not change encoded observations are allowed: float precision, observation bounds,
    text, and the channel axis of an image that is the whole observation. Action bounds must be equal.

    Raises:
        DatasetError: if the spaces differ; the message describes the difference.
    """
    data = trajectories.observation_space, trajectories.action_space
    for kind, mismatch in space_mismatches(data, (observation_space, action_space)):
        raise DatasetError(
            f"the environment does not fit dataset {', '.join(trajectories.dataset_ids)}: {kind} space: "
            f"{mismatch}. Use the environment in which the dataset was recorded"
        )


def agent_mismatch(dataset_ids: Sequence[str], kind: str, mismatch: str) -> DatasetError:
    """Return the error for a dataset whose spaces differ from those of an agent.

    Args:
        dataset_ids: Minari ids of the dataset.
        kind: "observation" or "action".
        mismatch: description of the difference, of `space_mismatches`.
    """
    return DatasetError(
        f"the agent does not fit dataset {', '.join(dataset_ids)}: {kind} space: {mismatch}. Use a dataset "
        f"of the task on which the agent was trained"
    )


def space_mismatches(expected: tuple[Space, Space], actual: tuple[Space, Space]) -> Iterator[tuple[str, str]]:
    """Yield each difference of observation and action space: "observation" or "action", and its description.

    The differences that `check_spaces_match` allows are left out.

    Args:
        expected: observation and action space that are required, e.g. those of the data.
        actual: observation and action space to compare with them.
    """
    mismatches = _observation_mismatch(expected[0], actual[0]), _action_mismatch(expected[1], actual[1])
    yield from filter(all, zip(("observation", "action"), mismatches, strict=True))


def _observation_mismatch(expected: Space, actual: Space) -> str:
    """Describe how an observation space differs from the expected one.

    Empty if their encoded rows have the same format.
    """
    if any(isinstance(expected, kind) and isinstance(actual, kind) for kind in (spaces.Dict, spaces.Tuple)):
        return _parts_mismatch(encoded_parts(expected), encoded_parts(actual))  # type: ignore[arg-type]
    if is_image(expected) and is_image(actual):
        return _mismatch(expected, actual, image_shape(expected) == image_shape(actual))  # type: ignore[arg-type]
    return _mismatch(expected, actual, _same_rows(expected, actual))


def _action_mismatch(expected: Space, actual: Space) -> str:
    """Describe how an action space differs from the expected one; empty if it does not."""
    if isinstance(expected, spaces.Box) and isinstance(actual, spaces.Box) and expected.shape == actual.shape:
        same = np.allclose(expected.low, actual.low) and np.allclose(expected.high, actual.high)
    else:
        same = _same_choices(expected, actual)
    return _mismatch(expected, actual, same)


def _parts_mismatch(expected: dict[Any, Space], actual: dict[Any, Space]) -> str:
    if expected.keys() != actual.keys():
        return f"expected the parts {list(expected)}, got {list(actual)}"
    mismatches = {key: _part_mismatch(expected[key], actual[key]) for key in expected}
    return "; ".join(f"in {key!r}: {mismatch}" for key, mismatch in mismatches.items() if mismatch)


def _part_mismatch(expected: Space, actual: Space) -> str:
    """Describe the difference between parts; here the channel axes of images must agree, too."""
    if isinstance(expected, spaces.Dict | spaces.Tuple):
        return _observation_mismatch(expected, actual)
    return _mismatch(expected, actual, _same_rows(expected, actual))


def _same_rows(expected: Space, actual: Space) -> bool:
    if isinstance(expected, spaces.Box) and isinstance(actual, spaces.Box):
        return (is_image(expected), expected.shape) == (is_image(actual), actual.shape)
    return _same_choices(expected, actual)


def _same_choices(expected: Space, actual: Space) -> bool:
    """Return whether the spaces are equal, apart from the dtype of choices, which Minari does not save."""
    if isinstance(expected, spaces.Discrete) and isinstance(actual, spaces.Discrete):
        return (int(expected.n), int(expected.start)) == (int(actual.n), int(actual.start))
    if isinstance(expected, spaces.MultiDiscrete) and isinstance(actual, spaces.MultiDiscrete):
        pairs = (expected.nvec, actual.nvec), (expected.start, actual.start)
        return all(np.array_equal(one, other) for one, other in pairs)
    return expected == actual


def _mismatch(expected: Space, actual: Space, equal: bool) -> str:
    """Describe two spaces that are not equal; empty if they are."""
    return "" if equal else f"expected {expected}, got {actual}"
