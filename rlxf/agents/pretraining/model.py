"""Model of masked pre-training: masks of tokens, predictions and losses."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlxf.agents.common.losses import masked_mean, squared_error
from rlxf.agents.decision_transformer.objectives import Imitation
from rlxf.agents.offline.config import OfflineConfig
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.trajectory_model import STD, TOKENS, ContextWindow, TrajectoryModel
from rlxf.attention.depth.base import ExitOutputs
from rlxf.data import WindowBatch

MASKED, RANDOM = 0.8, 0.1
"""Fractions of the chosen tokens replaced by a mask and by a random token; the others stay unchanged."""


@dataclass(frozen=True, eq=False)
class Masking:
    """Masking of the three tokens of each of W steps in B windows.

    Args:
        chosen: bool (B, W, 3), tokens to predict; never padding.
        masked: bool (B, W, 3), chosen tokens that are replaced by a mask.
        swapped: bool (B, W, 3), chosen tokens that are replaced by a token of the same kind of another step.
        replacement_step: int64 (B, W, 3), index of that step in the flattened (B * W) steps of the batch.
    """

    chosen: Tensor
    masked: Tensor
    swapped: Tensor
    replacement_step: Tensor

    @classmethod
    def draw(cls, mask: Tensor, probability: float, generator: torch.Generator) -> "Masking":
        """Choose each real token with the given probability, and draw its replacement.

        Of the chosen tokens 80% are masked, 10% are replaced by a random token of the batch, and 10% stay
        unchanged. The model therefore also sees real and wrong tokens at the positions that it predicts.

        Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.

        Args:
            mask: bool (B, W), True for real steps; on the device of the generator, the CPU.
            probability: probability that a token is chosen; 0.15 in the paper.
            generator: random generator of all draws.
        """
        shape = (*mask.shape, TOKENS)
        chosen = (torch.rand(shape, generator=generator) < probability) & mask[..., None]
        uniform = torch.rand(shape, generator=generator)
        steps = mask.flatten().nonzero()[:, 0]
        other = steps[torch.randint(len(steps), shape, generator=generator)]
        masked = chosen & (uniform < MASKED)
        swapped = chosen & (uniform >= MASKED) & (uniform < MASKED + RANDOM)
        return cls(chosen, masked, swapped, other)

    def to(self, device: torch.device | str) -> "Masking":
        """Return a copy on another device."""
        parts = (self.chosen, self.masked, self.swapped, self.replacement_step)
        return Masking(*(part.to(device) for part in parts))

    def hide(self, contents: Tensor, masks: Tensor) -> Tensor:
        """Replace masked and swapped tokens in contents (B, W, 3, C); ``masks`` (3, C) has one per kind."""
        kinds = torch.arange(TOKENS, device=contents.device)
        others = contents.flatten(0, 1)[self.replacement_step, kinds]
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


KINDS = ("return", "state", "action")


class MaskedModel(TrajectoryModel):
    r"""Masked model with the loss ``mean over the chosen tokens of error(W_kind y)``.

    The error is the squared error, for discrete actions the cross-entropy. Targets are the scaled returns
    ``R / scale``, the normalized observations (images pixel by pixel) and the actions as in `Imitation`. Each
    kind of token has a learned mask embedding, since a transformer without positions could not distinguish
    the kinds. If the core has early exits, the error is the weighted sum over the outputs of all layers. Exit
    prediction is not trained here, but with the agent.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1, for words.

    Args:
        info: spaces of observations and actions.
        normalization: normalization layer of observations.
        config: arguments of the pre-training; its core has ``causal=False``.
    """

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: OfflineConfig):
        super().__init__(info, normalization, config)
        core = config.core
        self.masks = nn.Parameter(torch.randn(TOKENS, core.width) * STD)
        self.return_head = nn.Linear(core.width, 1)
        self.state_head = nn.Linear(core.width, math.prod(info.encoder.shape))
        self.action_head = Imitation().build(core.width, self.tokens.actions).head
        self.init_weights(self.return_head, self.state_head, self.action_head)

    def losses(self, batch: MaskedWindows) -> dict[str, Tensor]:
        """Return the "loss" and the mean error of each kind of token, over the chosen tokens of B windows."""
        exits = self.exits(self.steps(batch.windows), batch.masking)
        outputs = exits.outputs.unflatten(2, (-1, TOKENS))
        layers = zip(exits.loss_weights, outputs, strict=True)
        errors = torch.stack([weight * self._errors(y, batch) for weight, y in layers]).sum(dim=0)
        chosen = batch.masking.chosen.to(errors.dtype)
        kinds = zip(KINDS, errors.unbind(-1), chosen.unbind(-1), strict=True)
        parts = {f"{kind}_loss": masked_mean(error, weight) for kind, error, weight in kinds}
        return self.add_penalty({"loss": masked_mean(errors, chosen)} | parts)

    def loss_count(self, batch: MaskedWindows) -> Tensor:
        """Count the chosen tokens."""
        return batch.masking.chosen.sum()

    def outputs(self, steps: ContextWindow, masking: Masking | None = None) -> Tensor:
        """Return the outputs at all tokens, (B, 3 W, C); ``masking=None`` masks no token."""
        return self.exits(steps, masking).outputs[-1]

    def exits(self, steps: ContextWindow, masking: Masking | None) -> ExitOutputs:
        """Return the outputs at all tokens after each of N layers that permit an exit, (N, B, 3 W, C)."""
        contents = self.tokens.embed(steps)
        if masking is not None:
            contents = masking.hide(contents, self.masks)
        return self.transformer.exits(self.tokens.add_time_embedding(contents, steps.time_steps), steps.index)

    def _errors(self, y: Tensor, batch: MaskedWindows) -> Tensor:
        """Compute the error of each token (B, W, 3) for outputs y (B, W, 3, C)."""
        windows = batch.windows
        returns = windows.return_to_go[..., None] / self.tokens.return_scale
        states = self.features.normalization(windows.observations).flatten(2)
        return torch.stack(
            [
                squared_error(self.return_head(y[:, :, 0]), returns),
                squared_error(self.state_head(y[:, :, 1]), states),
                self.action_head.error(y[:, :, 2], windows.actions),
            ],
            dim=-1,
        )
