"""Results of a step of vector environments of torch tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Info = dict[str, Any]


class SparseInfos(Sequence[Info]):
    """Infos of N environments, of which few are not empty.

    Args:
        num_envs: N.
        rows: the infos that are not empty, by the number of their environment.
    """

    def __init__(self, num_envs: int, rows: dict[int, Info]):
        self._num_envs, self.rows = num_envs, rows

    def __len__(self) -> int:
        return self._num_envs

    @overload
    def __getitem__(self, i: int) -> Info: ...
    @overload
    def __getitem__(self, i: slice) -> list[Info]: ...
    def __getitem__(self, i: int | slice) -> Info | list[Info]:
        """Return the info of an environment; an empty one is a new dict."""
        numbers = range(self._num_envs)[i]
        if isinstance(numbers, int):
            return self.rows.get(numbers, {})
        return [self.rows.get(number, {}) for number in numbers]


@dataclass(frozen=True, eq=False)
class TensorStep:
    """Results of a step of N environments, as tensors on their device.

    Args:
        observations: (N, ...), before the next step.
        rewards: (N,) float32.
        ends: (N,) bool, whether the episode ended with the step.
        last: (N, ...), of which the rows ``ends`` are the last observations of their episodes; may be None if
            no episode ended.
        filler_next: (N,) bool, whether the next step is a reset step (NEXT_STEP).
        infos: infos as in `GymnasiumVecEnv`, with tensors as terminal observations. Of the infos of the
            environments they contain only ``is_success``.
        valid: bool (), False if a number is not finite, an observation is outside of its space, or an episode
            ended without last observations.
    """

    observations: Any
    rewards: Tensor
    ends: Tensor
    last: Any
    filler_next: Tensor
    infos: SparseInfos
    valid: Tensor

    @property
    def dones(self) -> NDArray[np.bool_]:
        """Return ``ends`` as an array (N,), from ``infos``, so that nothing is copied from the device."""
        dones = np.zeros(len(self.infos), np.bool_)
        dones[[i for i, info in self.infos.rows.items() if "episode" in info]] = True
        return dones

    @property
    def truncated_rows(self) -> list[int]:
        """Return the numbers of the environments whose episode was truncated and not terminated."""
        return [i for i, info in self.infos.rows.items() if info.get("TimeLimit.truncated")]
