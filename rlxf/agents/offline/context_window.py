"""Context window of a transformer over trajectories: consecutive steps, and the positions of their tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlxf.agents.common.predict_state import check_state_rows, check_state_type
from rlxf.attention import TokenIndex
from rlxf.attention.token_index import EMPTY

TOKENS_PER_STEP = 3
"""Number of tokens of a step: return, state, action."""
NEW_CONTEXT = "pass state=None to start with an empty context"
"""Advice in messages about a state."""
WindowLayout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of a `ContextWindow` by name."""


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

    @classmethod
    def empty(cls, layout: WindowLayout, device: torch.device) -> "ContextWindow":
        """Return a window with a layout that holds no step."""
        return cls(
            **{name: torch.zeros(s, dtype=dtype, device=device) for name, (s, dtype) in layout.items()}
        )

    @property
    def index(self) -> TokenIndex:
        """Positions of the 3 W tokens, (B, 3 W).

        Token i of step k has position ``3 k + i``, where k counts from the first real step of the row.
        Positions therefore stay below 3 W for episodes of any length. The time-step embedding encodes the
        time within the episode.
        """
        tokens = self.mask.repeat_interleave(TOKENS_PER_STEP, dim=1)
        position = tokens.long().cumsum(dim=1) - 1
        return TokenIndex(position.clamp(min=0), torch.where(tokens, 0, EMPTY))

    def rows(self, rows: Tensor) -> "ContextWindow":
        """Select episodes; ``rows`` is a bool (B,) or an int64 (N,) tensor."""
        return ContextWindow(*(part[rows] for part in vars(self).values()))

    def repeat(self, times: int) -> "ContextWindow":
        """Repeat all episodes, (B, ...) -> (times B, ...), as ``Tensor.repeat`` does along the first axis."""
        return self.rows(torch.arange(len(self.mask), device=self.mask.device).repeat(times))

    def between(self, first: int, end: int | None = None) -> "ContextWindow":
        """Select the columns from ``first`` to ``end`` (exclusive), as a slice does."""
        return ContextWindow(*(part[:, first:end] for part in vars(self).values()))

    def clear_rows(self, start: Tensor) -> "ContextWindow":
        """Clear the rows that ``start`` (B,) bool marks."""
        return replace(self, mask=self.mask & ~start[:, None])

    def with_newest(self, **columns: Tensor) -> "ContextWindow":
        """Replace the newest step in these columns; the values of each are (B, ...)."""
        return replace(
            self,
            **{
                name: torch.cat([getattr(self, name)[:, :-1], x[:, None]], dim=1)
                for name, x in columns.items()
            },
        )

    def append(
        self, features: Tensor, previous_action: Tensor, return_to_go: Tensor, time_steps: Tensor
    ) -> "ContextWindow":
        """Append a step and drop the oldest one.

        Args:
            features: features of the new step, (B, F).
            previous_action: action of the previously newest step.
            return_to_go: return-to-go of the new step, (B,).
            time_steps: time step of the new step, (B,).
        """
        newest = torch.stack([previous_action, torch.zeros_like(previous_action)], dim=1)
        actions = torch.cat([self.actions[:, 1:-1], newest], dim=1)
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


def check_context(state: ContextWindow, layout: WindowLayout, batch: int, device: torch.device) -> None:
    """Raise an error unless a state passed to `predict` fits the agent and the observation.

    Args:
        state: the state.
        layout: layout of the context windows of the agent for these environments.
        batch: number of environments.
        device: device of the agent.

    Raises:
        TypeError: if the state is not a context window.
        ValueError: if the window is of another agent, device, or number of environments.
    """
    check_state_type(state, ContextWindow, NEW_CONTEXT)
    check_state_rows(state.mask, batch, device, NEW_CONTEXT)
    for name, (shape, dtype) in layout.items():
        given = getattr(state, name)
        if given.shape != shape or given.dtype != dtype:
            raise ValueError(
                f"the state is of another agent: {name} has shape {tuple(given.shape)} and {given.dtype} in "
                f"the state, {shape} and {dtype} in this agent; {NEW_CONTEXT}"
            )
