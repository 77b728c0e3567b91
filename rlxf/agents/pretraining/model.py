"""Bidirectional transformer that predicts masked tokens of trajectories."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.agents.actions import action_form
from rlxf.agents.decision_transformer.core import STD
from rlxf.agents.decision_transformer.objectives import Imitation
from rlxf.agents.decision_transformer.steps import TOKENS, Steps
from rlxf.agents.decision_transformer.trajectory_model import TrajectoryModel
from rlxf.agents.losses import average, squared_error
from rlxf.agents.pretraining.masking import MaskedWindows, Masking
from rlxf.attention import TransformerSpec
from rlxf.attention.depth.exits import Exits

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
        observation_shape: shape of one encoded observation.
        action_space: Box, Discrete, MultiDiscrete or MultiBinary.
        normalization: normalization layer of observations.
        core: spec of the transformer, with ``causal=False``.
        return_scale: divisor of returns.
        episode_length: number of time steps with an embedding.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        action_space: spaces.Space[Any],
        normalization: nn.Module,
        core: TransformerSpec,
        return_scale: float,
        episode_length: int,
    ):
        actions = action_form(action_space)
        super().__init__(observation_shape, actions, normalization, core, return_scale, episode_length)
        self.masks = nn.Parameter(torch.randn(TOKENS, core.width) * STD)
        self.return_head = nn.Linear(core.width, 1)
        self.state_head = nn.Linear(core.width, int(np.prod(observation_shape)))
        self.action_head = Imitation().build(core.width, actions).head
        self.start(self.return_head, self.state_head, self.action_head)

    def losses(self, batch: MaskedWindows) -> dict[str, Tensor]:
        """Return the "loss" and the mean error of each kind of token, over the chosen tokens of B windows."""
        exits = self.exits(self.steps(batch.windows), batch.masking)
        outputs = exits.outputs.unflatten(2, (-1, TOKENS))
        layers = zip(exits.shares, outputs, strict=True)
        errors = torch.stack([weight * self._errors(y, batch) for weight, y in layers]).sum(dim=0)
        chosen = batch.masking.chosen.to(errors.dtype)
        kinds = zip(KINDS, errors.unbind(-1), chosen.unbind(-1), strict=True)
        parts = {f"{kind}_loss": average(error, weight) for kind, error, weight in kinds}
        return self.with_penalty({"loss": average(errors, chosen)} | parts)

    def weight(self, batch: MaskedWindows) -> Tensor:
        """Count the chosen tokens."""
        return batch.masking.chosen.sum()

    def read(self, steps: Steps, masking: Masking | None = None) -> Tensor:
        """Return the outputs at all tokens, (B, 3 W, C); ``masking=None`` masks no token."""
        return self.exits(steps, masking).outputs[-1]

    def exits(self, steps: Steps, masking: Masking | None) -> Exits:
        """Return the outputs at all tokens after each of N layers that permit an exit, (N, B, 3 W, C)."""
        contents = self.tokens.contents(steps)
        if masking is not None:
            contents = masking.hide(contents, self.masks)
        return self.transformer.exits(self.tokens.timed(contents, steps.time_steps), steps.index)

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
