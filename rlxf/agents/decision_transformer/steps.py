"""Steps side by side, as the model reads them; and what acting remembers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention import Index
from rlxf.attention.index import EMPTY

TOKENS = 3
"""Of a step: return to go, state, action."""


@dataclass(frozen=True, eq=False)
class Steps:
    """W consecutive steps of B episodes; the last one stands last, what is missing is empty on the left.

    Args:
        features: what the model makes of the observations, (B, W, F).
        actions: as the data have them, Box (B, W, A), Discrete (B, W), MultiDiscrete (B, W, A). Those of
            the newest step count for nothing while acting: it is yet to be chosen.
        return_to_go: (B, W), in units of the rewards.
        time_steps: (B, W) int64, from the start of the episode.
        mask: (B, W) bool, False where there is no step.
    """

    features: Tensor
    actions: Tensor
    return_to_go: Tensor
    time_steps: Tensor
    mask: Tensor

    @property
    def index(self) -> Index:
        """Where the 3 W tokens stand, (B, 3 W).

        Token i of step k of the row has position ``3 k + i``, k counted from the first step that is there.
        So positions stay below 3 W however long an episode is: what step of the episode it is, the time
        step embedding says.
        """
        tokens = self.mask.repeat_interleave(TOKENS, dim=1)
        position = tokens.long().cumsum(dim=1) - 1
        return Index(position.clamp(min=0), torch.where(tokens, 0, EMPTY))

    def rows(self, rows: Tensor) -> "Steps":
        """The chosen episodes: ``rows`` is a bool (B,) or an int64 (N,) tensor."""
        parts = (self.features, self.actions, self.return_to_go, self.time_steps, self.mask)
        return Steps(*(part[rows] for part in parts))

    def between(self, first: int, end: int) -> "Steps":
        """The columns from ``first`` to before ``end``."""
        parts = (self.features, self.actions, self.return_to_go, self.time_steps, self.mask)
        return Steps(*(part[:, first:end] for part in parts))

    def begun(self, start: Tensor) -> "Steps":
        """The same, without the steps of the rows that ``start`` (B,) bool marks."""
        return Steps(
            self.features, self.actions, self.return_to_go, self.time_steps, self.mask & ~start[:, None]
        )

    def followed_by(
        self, features: Tensor, previous_action: Tensor, return_to_go: Tensor, time_steps: Tensor
    ) -> "Steps":
        """One step on, the oldest is forgotten.

        Args:
            features: of the new step, (B, F).
            previous_action: taken in the step that was the newest so far.
            return_to_go: of the new step, (B,).
            time_steps: of the new step, (B,).
        """
        actions = torch.cat(
            [self.actions[:, 1:-1], previous_action[:, None], torch.zeros_like(previous_action)[:, None]],
            dim=1,
        )
        return Steps(
            _pushed(self.features, features),
            actions[:, -self.mask.shape[1] :],
            _pushed(self.return_to_go, return_to_go),
            _pushed(self.time_steps, time_steps),
            _pushed(self.mask, torch.ones_like(self.mask[:, 0])),
        )


def _pushed(old: Tensor, new: Tensor) -> Tensor:
    """(B, W, ...) without the first column, behind it the new one (B, ...)."""
    return torch.cat([old[:, 1:], new[:, None]], dim=1)
