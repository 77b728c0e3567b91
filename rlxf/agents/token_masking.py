"""Masks of the tokens of trajectories for masked pre-training."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.agents.offline.context_window import TOKENS_PER_STEP
from rlxf.data import WindowBatch

MASKED, RANDOM = 0.8, 0.1
"""Fractions of the chosen tokens replaced by a mask and by a random token; the others stay unchanged."""
KINDS = ("return", "state", "action")
"""Kinds of the three tokens of a step, in this order."""


@dataclass(frozen=True, eq=False)
class Masking:
    """Masking of the three tokens of each of W steps in B windows.

    Args:
        chosen: bool (B, W, 3), tokens to predict; never padding.
        masked: bool (B, W, 3), chosen tokens that are replaced by a mask.
        swapped: bool (B, W, 3), chosen tokens that are replaced by a token of the same kind from a random
            step.
        replacement_step: int64 (B, W, 3), index of the random step in the flattened (B * W) steps of the
            batch.
    """

    chosen: Tensor
    masked: Tensor
    swapped: Tensor
    replacement_step: Tensor

    @classmethod
    def draw(cls, real_steps: Tensor, probability: float, generator: torch.Generator) -> "Masking":
        """Choose each real token with the given probability, and draw its replacement.

        Of the chosen tokens 80% are masked, 10% are replaced by a token of the same kind from a random step
        of the batch, and 10% stay unchanged. The model therefore also sees real and wrong tokens at the
        positions that it predicts.

        Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.

        Args:
            real_steps: bool (B, W), False for padding; on the device of the generator, the CPU.
            probability: probability that a token is chosen; 0.15 in the paper.
            generator: random generator of all draws.
        """
        shape = (*real_steps.shape, TOKENS_PER_STEP)
        chosen = (torch.rand(shape, generator=generator) < probability) & real_steps[..., None]
        uniform = torch.rand(shape, generator=generator)
        steps = real_steps.flatten().nonzero()[:, 0]
        other = steps[torch.randint(len(steps), shape, generator=generator)]
        masked = chosen & (uniform < MASKED)
        swapped = chosen & (uniform >= MASKED) & (uniform < MASKED + RANDOM)
        return cls(chosen, masked, swapped, other)

    def only(self, kinds: Collection[str]) -> "Masking":
        """Return the masking of the tokens of some `KINDS`; other tokens are visible and not predicted."""
        kept = torch.tensor([kind in kinds for kind in KINDS], device=self.chosen.device)
        chosen, masked, swapped = (part & kept for part in (self.chosen, self.masked, self.swapped))
        return Masking(chosen, masked, swapped, self.replacement_step)

    def to(self, device: torch.device | str) -> "Masking":
        """Return a copy on another device."""
        return Masking(*(part.to(device) for part in vars(self).values()))

    def hide(self, contents: Tensor, mask_embeddings: Tensor) -> Tensor:
        """Replace masked and swapped tokens in contents (B, W, 3, C).

        ``mask_embeddings`` (3, C) has one vector for each kind of token.
        """
        kinds = torch.arange(TOKENS_PER_STEP, device=contents.device)
        others = contents.flatten(0, 1)[self.replacement_step, kinds]
        hidden = torch.where(self.swapped[..., None], others, contents)
        return torch.where(self.masked[..., None], mask_embeddings, hidden)


@dataclass(frozen=True, eq=False)
class MaskedWindows:
    """Batch of masked pre-training: windows and the masking of their tokens."""

    windows: WindowBatch
    masking: Masking

    def to(self, device: torch.device | str) -> "MaskedWindows":
        """Return a copy on another device."""
        return MaskedWindows(self.windows.to(device), self.masking.to(device))
