"""T-Maze whose observations, rewards and done flags are torch tensors on any device."""

from typing import Any, ClassVar

import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.utils import get_device
from torch import Tensor

from rlxf.envs.tmaze import PenaltyRule
from rlxf.envs.tmaze_vector import TMazeVector


class TMazeTensor(TMazeVector):
    """N environments of `TMazeVector` on a device, which take and return tensors.

    Each step is computed on the device. Only the goals are drawn on the host, once per episode, with the
    generators of `TMazeVector`: the same seeds and actions result in the same episodes.

    Shapes: observations float32 (N, 2), actions int64 (N,), rewards float32 (N,), done flags bool (N,). With
    ``SAME_STEP``, ``infos["final_obs"]`` is a tensor (N, 2).

    Args:
        num_envs, corridor_length, active, penalty, penalty_rule, autoreset_mode, render_mode: as in
            `TMazeVector`.
        device: device of all tensors; "auto" for a GPU if there is one, as in `GTrXLPPO`.

    Raises:
        ValueError: as `TMazeVector`; from `step`, if the actions are not N integers on the device. Their
            values are not checked, since that would wait for the device in each step.
        gymnasium.error.ResetNeeded: from `step`, before the first reset.
    """

    _xp: ClassVar[Any] = torch
    device: torch.device

    def __init__(
        self,
        num_envs: int = 1,
        corridor_length: int = 50,
        active: bool = False,
        penalty: float | None = None,
        penalty_rule: PenaltyRule = "schedule",
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        render_mode: str | None = None,
        device: torch.device | str = "auto",
    ):
        self.device = get_device(device)
        super().__init__(
            num_envs, corridor_length, active, penalty, penalty_rule, autoreset_mode, render_mode
        )

    def _array(self, values: NDArray[Any]) -> Tensor:
        return torch.tensor(values).to(self.device, non_blocking=True)

    def _full(self, value: float) -> Tensor:
        return torch.full((self.num_envs,), value, device=self.device)

    def _final_obs(self, observations: Tensor) -> Tensor:
        return observations

    def _check_actions(self, actions: Any) -> Tensor:
        is_whole = isinstance(actions, Tensor) and not (actions.is_floating_point() or actions.is_complex())
        if not is_whole or actions.shape != (self.num_envs,) or actions.device != self._cells.device:
            raise ValueError(
                f"actions must be a tensor of {self.num_envs} integers on {self._cells.device}, "
                f"got {actions!r}"
            )
        return actions.long()
