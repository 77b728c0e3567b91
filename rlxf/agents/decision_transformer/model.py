"""The Decision Transformer itself: from steps to actions."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.agents.actions import action_form
from rlxf.agents.decision_transformer.heads import Categorical, Head
from rlxf.agents.decision_transformer.objectives import Objective
from rlxf.agents.decision_transformer.steps import TOKENS, Steps
from rlxf.agents.decision_transformer.trajectory_model import TrajectoryModel
from rlxf.agents.leaving import check_choices
from rlxf.attention import Index, State, TransformerSpec, Verdict
from rlxf.attention.depth.calm import lead
from rlxf.attention.depth.exits import Exits
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
        action_space: Box, Discrete, MultiDiscrete or MultiBinary.
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
        check_choices(core.depth, action_space)
        actions = action_form(action_space)
        super().__init__(observation_shape, actions, normalization, core, return_scale, episode_length)
        self.loss = objective.build(core.width, actions)
        self.start(self.loss)

    def losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """What is minimised, "loss", and its parts, over the real steps of B windows.

        To the objective's comes what the transformer's kernels add, such as the penalty of long spans.
        """
        steps, first = self.steps(batch), self.remembered
        exits = self.exits(steps, STATE_TOKENS)
        actions, mask = batch.actions[:, first:], batch.mask[:, first:]
        actions = actions.expand(len(exits.shares), *actions.shape)
        parts = self.loss(exits.outputs, actions, mask * exits.shares[:, None, None])
        last = steps.between(first, steps.mask.shape[1])
        return self.with_penalty(self.with_lesson(parts, exits, actions, last))

    def with_lesson(
        self, parts: dict[str, Tensor], exits: Exits, actions: Tensor, steps: Steps
    ) -> dict[str, Tensor]:
        """The parts of a loss, and what the depth adds to learn when to leave.

        Args:
            parts: "loss" and its parts.
            exits: outputs of N passes at the state tokens of the steps.
            actions: the right ones, (N, B, K, ...).
            steps: (B, K).
        """
        if exits.lesson is None:
            return parts
        lesson = exits.lesson(self._verdict(exits.outputs.detach(), actions, steps))
        return parts if lesson is None else parts | {"loss": parts["loss"] + lesson, "exit_lesson": lesson}

    def weight(self, batch: WindowBatch) -> Tensor:
        """Real steps that are learned from."""
        return batch.mask[:, self.remembered :].sum()

    @torch.no_grad()
    def _verdict(self, outputs: Tensor, actions: Tensor, steps: Steps) -> Verdict:
        """What came of the outputs behind N passes, (N, B, K, C)."""
        head: Head = self.loss.head
        chosen = head.choose(outputs, deterministic=True)
        right, same = (self.tokens.actions.alike(chosen, other) for other in (actions, chosen[-1:]))
        index = steps.index.at(STATE_TOKENS)
        index = Index(index.position // TOKENS, index.episode)
        return Verdict(-head.error(outputs, actions), right, same, index)

    def exits(self, steps: Steps, wanted: slice) -> Exits:
        """What may be read at the wanted tokens behind each pass."""
        return self.transformer.exits(**self._begun(steps), wanted=wanted)

    def read(self, steps: Steps, wanted: slice = STATE_TOKENS) -> Tensor:
        """Outputs at the wanted tokens; at the state tokens (B, W - remembered, C): what the head reads."""
        return self.transformer.outputs(**self._begun(steps), wanted=wanted)

    @torch.no_grad()
    def newest(self, steps: Steps) -> Tensor:
        """What to act by: `read` at the newest state token of each row alone, (B, C).

        It takes as few passes as the depth lets it take.
        """
        y = self.transformer.early(**self._begun(steps), wanted=NEWEST_STATE_TOKEN, judge=self.lead)
        return y[:, 0]

    def lead(self, y: Tensor) -> Tensor:
        """How far the likeliest action is ahead, for outputs (..., C)."""
        assert isinstance(self.loss.head, Categorical)
        return lead([logits.softmax(dim=-1) for logits in self.loss.head.logits(y)])

    def _begun(self, steps: Steps) -> dict[str, Any]:
        """The tokens to read, where they stand, and what is remembered from before them."""
        index, state = steps.index, None
        if self.remembered:
            state = self._remember(steps.between(self._padding(steps), self.remembered))
            steps = steps.between(self.remembered, steps.mask.shape[1])
        tokens = self.tokens(steps)
        return {"x": tokens, "index": index.last(tokens.shape[1]), "state": state}

    def _padding(self, steps: Steps) -> int:
        """How many columns to remember hold no step of any row: episodes may be shorter than the memory."""
        return int((steps.mask[:, : self.remembered].cumsum(1).sum(0) == 0).sum())

    @torch.no_grad()
    def _remember(self, steps: Steps) -> State | None:
        if not steps.mask.shape[1]:
            return None
        return self.transformer.remember(self.tokens(steps), steps.index)
