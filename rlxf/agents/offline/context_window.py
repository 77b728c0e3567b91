"""Context windows of steps: the input of the model and the state while acting."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention import TokenIndex
from rlxf.attention.token_index import EMPTY

TOKENS = 3
"""Number of tokens of a step: return-to-go, state, action."""


@dataclass(frozen=True, eq=False)
class ContextWindow:
    """W consecutive steps of B episodes, padded on the left.

    Args:
        features: features of the observations, (B, W, F).
        actions: Box (B, W, A), Discrete (B, W) or MultiDiscrete (B, W, A), in the encoding of the dataset.
            While acting, the action of the newest step is a placeholder, since it is not chosen yet.
        return_to_go: (B, W), in units of the rewards.
        time_steps: (B, W) int64, counted from the start of the episode.
        mask: (B, W) bool, False for padding.
    """

    features: Tensor
    actions: Tensor
    return_to_go: Tensor
    time_steps: Tensor
    mask: Tensor

    @property
    def index(self) -> TokenIndex:
        """Positions of the 3 W tokens, (B, 3 W).

        Token i of step k has position ``3 k + i``, where k counts from the first real step of the row.
        Positions therefore stay below 3 W for episodes of any length. The time-step embedding encodes the
        time within the episode.
        """
        tokens = self.mask.repeat_interleave(TOKENS, dim=1)
        position = tokens.long().cumsum(dim=1) - 1
        return TokenIndex(position.clamp(min=0), torch.where(tokens, 0, EMPTY))

    def rows(self, rows: Tensor) -> "ContextWindow":
        """Select episodes; ``rows`` is a bool (B,) or an int64 (N,) tensor."""
        parts = (self.features, self.actions, self.return_to_go, self.time_steps, self.mask)
        return ContextWindow(*(part[rows] for part in parts))

    def between(self, first: int, end: int) -> "ContextWindow":
        """Select the columns from ``first`` to ``end`` (exclusive)."""
        parts = (self.features, self.actions, self.return_to_go, self.time_steps, self.mask)
        return ContextWindow(*(part[:, first:end] for part in parts))

    def clear_rows(self, start: Tensor) -> "ContextWindow":
        """Clear the rows that ``start`` (B,) bool marks."""
        return ContextWindow(
            self.features, self.actions, self.return_to_go, self.time_steps, self.mask & ~start[:, None]
        )

    def followed_by(
        self, features: Tensor, previous_action: Tensor, return_to_go: Tensor, time_steps: Tensor
    ) -> "ContextWindow":
        """Append a step and drop the oldest one.

        Args:
            features: features of the new step, (B, F).
            previous_action: action of the previously newest step.
            return_to_go: return-to-go of the new step, (B,).
            time_steps: time step of the new step, (B,).
        """
        actions = torch.cat(
            [self.actions[:, 1:-1], previous_action[:, None], torch.zeros_like(previous_action)[:, None]],
            dim=1,
        )
        return ContextWindow(
            _push(self.features, features),
            actions[:, -self.mask.shape[1] :],
            _push(self.return_to_go, return_to_go),
            _push(self.time_steps, time_steps),
            _push(self.mask, torch.ones_like(self.mask[:, 0])),
        )


def _push(old: Tensor, new: Tensor) -> Tensor:
    """Drop the first column of ``old`` (B, W, ...) and append ``new`` (B, ...) as the last."""
    return torch.cat([old[:, 1:], new[:, None]], dim=1)
