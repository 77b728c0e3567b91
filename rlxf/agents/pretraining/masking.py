"""Random masking of tokens for masked pre-training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.agents.decision_transformer.steps import TOKENS
from rlxf.envs.trajectories import WindowBatch

MASKED, RANDOM = 0.8, 0.1
"""Fractions of the chosen tokens replaced by a mask and by a random token; the others stay unchanged."""


@dataclass(frozen=True, eq=False)
class Masking:
    """Masking of the three tokens of each of W steps in B windows.

    Args:
        chosen: bool (B, W, 3), tokens to predict; never padding.
        masked: bool (B, W, 3), chosen tokens that are replaced by a mask.
        swapped: bool (B, W, 3), chosen tokens that are replaced by a token of the same kind of another step.
        other: int64 (B, W, 3), index of that step in the flattened (B * W) steps of the batch.
    """

    chosen: Tensor
    masked: Tensor
    swapped: Tensor
    other: Tensor

    @classmethod
    def draw(cls, mask: Tensor, share: float, generator: torch.Generator) -> "Masking":
        """Choose each real token with probability ``share``, and draw its replacement.

        Of the chosen tokens 80% are masked, 10% are replaced by a random token of the batch, and 10% stay
        unchanged. The model therefore also sees real and wrong tokens at the positions that it predicts.

        Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.

        Args:
            mask: bool (B, W), True for real steps; on the device of the generator, the CPU.
            share: probability that a token is chosen; 0.15 in the paper.
            generator: random generator of all draws.
        """
        shape = (*mask.shape, TOKENS)
        chosen = (torch.rand(shape, generator=generator) < share) & mask[..., None]
        uniform = torch.rand(shape, generator=generator)
        steps = mask.flatten().nonzero()[:, 0]
        other = steps[torch.randint(len(steps), shape, generator=generator)]
        masked = chosen & (uniform < MASKED)
        swapped = chosen & (uniform >= MASKED) & (uniform < MASKED + RANDOM)
        return cls(chosen, masked, swapped, other)

    def to(self, device: torch.device | str) -> "Masking":
        """Return a copy on another device."""
        parts = (self.chosen, self.masked, self.swapped, self.other)
        return Masking(*(part.to(device) for part in parts))

    def hide(self, contents: Tensor, masks: Tensor) -> Tensor:
        """Replace masked and swapped tokens in contents (B, W, 3, C); ``masks`` (3, C) has one per kind."""
        kinds = torch.arange(TOKENS, device=contents.device)
        others = contents.flatten(0, 1)[self.other, kinds]
        hidden = torch.where(self.swapped[..., None], others, contents)
        return torch.where(self.masked[..., None], masks, hidden)


@dataclass(frozen=True, eq=False)
class MaskedWindows:
    """Batch of masked pre-training: windows and the masking of their tokens."""

    windows: WindowBatch
    masking: Masking

    def to(self, device: torch.device | str) -> "MaskedWindows":
        """Return a copy on another device."""
        return MaskedWindows(self.windows.to(device), self.masking.to(device))
