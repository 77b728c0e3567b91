"""The Decision Transformer itself: from steps to actions."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.agents.decision_transformer.actions import action_form
from rlxf.agents.decision_transformer.objectives import Objective
from rlxf.agents.decision_transformer.steps import TOKENS, Steps
from rlxf.agents.decision_transformer.trajectory_model import TrajectoryModel
from rlxf.attention import State, TransformerSpec
from rlxf.envs.trajectories import WindowBatch

STATE_TOKENS = slice(1, None, TOKENS)
"""Where actions are read: the second of a step's three tokens has seen return and state, not the action."""
NEWEST_STATE_TOKEN = slice(1 - TOKENS, 2 - TOKENS)
"""The last of them."""


class DecisionTransformerModel(TrajectoryModel):
    """``steps -> tokens -> transformer -> head``, causal over all tokens.

    With memory, the first steps of a window are only remembered: they are read without gradient, and
    the transformer's state after them is the memory of the K steps behind.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.

    Args:
        observation_shape: of one encoded observation.
        action_space: Box, Discrete or MultiDiscrete.
        normalization: brings observations to one scale.
        core: the transformer.
        objective: what is minimised.
        return_scale: what returns are divided by.
        episode_length: time steps that have an embedding of their own.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        action_space: spaces.Space[Any],
        normalization: nn.Module,
        core: TransformerSpec,
        objective: Objective,
        return_scale: float,
        episode_length: int,
    ):
        actions = action_form(action_space)
        super().__init__(observation_shape, actions, normalization, core, return_scale, episode_length)
        self.loss = objective.build(core.width, actions)
        self.start(self.loss)

    def losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """What is minimised, "loss", and its parts, over the real steps of B windows.

        To the objective's comes what the transformer's kernels add, such as the penalty of long spans.
        """
        y, first = self.read(self.steps(batch)), self.remembered
        return self.with_penalty(self.loss(y, batch.actions[:, first:], batch.mask[:, first:].to(y.dtype)))

    def read(self, steps: Steps, wanted: slice = STATE_TOKENS) -> Tensor:
        """Outputs at the wanted tokens; at the state tokens (B, W - remembered, C): what the head reads."""
        index = steps.index
        state = None
        if self.remembered:
            state = self._remember(steps.between(0, self.remembered))
            steps = steps.between(self.remembered, steps.mask.shape[1])
        tokens = self.tokens(steps)
        y, _ = self.transformer.encode(tokens, index.last(tokens.shape[1]), state, wanted=wanted)
        return y

    def newest(self, steps: Steps) -> Tensor:
        """`read` at the newest state token of each row alone, (B, C)."""
        return self.read(steps, NEWEST_STATE_TOKEN)[:, 0]

    @torch.no_grad()
    def _remember(self, steps: Steps) -> State | None:
        return self.transformer(self.tokens(steps), steps.index)[1]
