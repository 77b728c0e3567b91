"""Which tokens are hidden, and what stands in their place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.agents.decision_transformer.steps import TOKENS
from rlxf.envs.trajectories import WindowBatch

MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that are replaced: by a mask, by another token. The others stay as they are."""


@dataclass(frozen=True, eq=False)
class Masking:
    """What becomes of the three tokens of each of W steps in B windows.

    Args:
        chosen: bool (B, W, 3), tokens to predict; never padding.
        masked: bool (B, W, 3), chosen ones that a mask takes the place of.
        swapped: bool (B, W, 3), chosen ones that another token takes the place of.
        other: int64 (B, W, 3), the step, counted over all windows, whose token of the same kind that is.
    """

    chosen: Tensor
    masked: Tensor
    swapped: Tensor
    other: Tensor

    @classmethod
    def draw(cls, mask: Tensor, share: float, generator: torch.Generator) -> "Masking":
        """Choose each real token with probability ``share``, and draw what becomes of it.

        Of those chosen 80% are masked, 10% replaced by a random token of the batch, 10% left as they are: so
        the model never knows which tokens it may trust, and meets real ones at each place that it predicts.

        Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.

        Args:
            mask: bool (B, W), True where there is a step; on the CPU, as the generator is.
            share: 0.15 in the paper.
            generator: of all of it.
        """
        shape = (*mask.shape, TOKENS)
        chosen = (torch.rand(shape, generator=generator) < share) & mask[..., None]
        fate = torch.rand(shape, generator=generator)
        steps = mask.flatten().nonzero()[:, 0]
        other = steps[torch.randint(len(steps), shape, generator=generator)]
        masked, swapped = chosen & (fate < MASKED), chosen & (fate >= MASKED) & (fate < MASKED + RANDOM)
        return cls(chosen, masked, swapped, other)

    def to(self, device: torch.device | str) -> "Masking":
        """The same on another device."""
        parts = (self.chosen, self.masked, self.swapped, self.other)
        return Masking(*(part.to(device) for part in parts))

    def hide(self, contents: Tensor, masks: Tensor) -> Tensor:
        """Contents (B, W, 3, C) of all tokens, with masks (3, C), one of each kind, and others put in."""
        kinds = torch.arange(TOKENS, device=contents.device)
        others = contents.flatten(0, 1)[self.other, kinds]
        hidden = torch.where(self.swapped[..., None], others, contents)
        return torch.where(self.masked[..., None], masks, hidden)


@dataclass(frozen=True, eq=False)
class MaskedWindows:
    """What an update learns from: windows, and which of their tokens are hidden."""

    windows: WindowBatch
    masking: Masking

    def to(self, device: torch.device | str) -> "MaskedWindows":
        """The same on another device."""
        return MaskedWindows(self.windows.to(device), self.masking.to(device))
