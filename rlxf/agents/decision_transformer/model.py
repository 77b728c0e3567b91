"""Decision Transformer model: from steps of trajectories to actions."""

from typing import Any

import torch
from torch import Tensor, nn

from rlxf.agents.calibration import check_exit_confidence
from rlxf.agents.decision_transformer.heads import Head
from rlxf.agents.decision_transformer.presets import DecisionTransformerConfig
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.trajectory_model import TOKENS, ContextWindow, TrajectoryModel
from rlxf.attention import ExitTargets, State, TokenIndex
from rlxf.attention.depth.base import ExitOutputs
from rlxf.attention.depth.calm import probability_margin
from rlxf.data import WindowBatch

STATE_TOKENS = slice(1, None, TOKENS)
"""Slice of the state tokens, which predict actions: they attend to return and state, not to the action."""
NEWEST_STATE_TOKEN = slice(1 - TOKENS, 2 - TOKENS)
"""Slice of the last state token."""


class DecisionTransformerModel(TrajectoryModel):
    """Model ``steps -> tokens -> transformer -> head``, causal over all tokens.

    If the core has a memory, the first steps of a window are burn-in: they are processed without gradient,
    and the transformer's state after them is the memory of the K following steps.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.

    Args:
        info: spaces of observations and actions.
        normalization: normalization layer of observations.
        config: arguments of the agent.
    """

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: DecisionTransformerConfig):
        check_exit_confidence(config.core.depth, info.action_space)
        super().__init__(info, normalization, config)
        self.loss = config.objective.build(config.core.width, self.tokens.actions)
        self.init_weights(self.loss)

    def losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the "loss" and its parts, averaged over the real (unpadded) steps of B windows.

        The transformer's penalty, such as that of adaptive spans, is added to the loss of the objective.
        """
        steps, first = self.steps(batch), self.burn_in_steps
        exits = self.exits(steps, STATE_TOKENS)
        actions, mask = batch.actions[:, first:], batch.mask[:, first:]
        actions = actions.expand(len(exits.loss_weights), *actions.shape)
        parts = self.loss(exits.outputs, actions, mask * exits.loss_weights[:, None, None])
        last = steps.between(first, steps.mask.shape[1])
        return self.add_penalty(self.add_exit_loss(parts, exits, actions, last))

    def add_exit_loss(
        self, parts: dict[str, Tensor], exits: ExitOutputs, actions: Tensor, steps: ContextWindow
    ) -> dict[str, Tensor]:
        """Add the loss of exit prediction, if the depth has one, to the parts of a loss.

        Args:
            parts: "loss" and its parts.
            exits: outputs of N layers at the state tokens of the steps.
            actions: the correct actions, (N, B, K, ...).
            steps: steps (B, K) of the state tokens.
        """
        if exits.auxiliary_loss is None:
            return parts
        extra = exits.auxiliary_loss(self._exit_targets(exits.outputs.detach(), actions, steps))
        return parts if extra is None else parts | {"loss": parts["loss"] + extra, "exit_lesson": extra}

    def loss_count(self, batch: WindowBatch) -> Tensor:
        """Count the real (unpadded) steps in the loss."""
        return batch.mask[:, self.burn_in_steps :].sum()

    @torch.no_grad()
    def _exit_targets(self, outputs: Tensor, actions: Tensor, steps: ContextWindow) -> ExitTargets:
        """Compute the exit targets for the outputs (N, B, K, C) of N layers."""
        head: Head = self.loss.head
        chosen = head.choose(outputs, deterministic=True)
        correct, same = (self.tokens.actions.same_action(chosen, other) for other in (actions, chosen[-1:]))
        index = steps.index.at(STATE_TOKENS)
        index = TokenIndex(index.position // TOKENS, index.episode)
        return ExitTargets(-head.error(outputs, actions), correct, same, index)

    def exits(self, steps: ContextWindow, output_slice: slice) -> ExitOutputs:
        """Return the outputs after each layer at the tokens of the slice ``output_slice``."""
        return self.transformer.exits(**self._transformer_inputs(steps), output_slice=output_slice)

    def outputs(self, steps: ContextWindow, output_slice: slice = STATE_TOKENS) -> Tensor:
        """Return the outputs at the tokens of the slice ``output_slice``.

        At the state tokens these are the inputs of the head, (B, W - burn_in_steps, C).
        """
        return self.transformer.outputs(**self._transformer_inputs(steps), output_slice=output_slice)

    @torch.no_grad()
    def newest_output(self, steps: ContextWindow) -> Tensor:
        """Return the output at the newest state token of each row, (B, C), to act by.

        Unlike `outputs`, this method exits early where the depth allows it.
        """
        y = self.transformer.early_outputs(
            **self._transformer_inputs(steps),
            output_slice=NEWEST_STATE_TOKEN,
            confidence_fn=self.confidence_margin,
        )
        return y[:, 0]

    def confidence_margin(self, y: Tensor) -> Tensor:
        """Compute the margin between the most and the second most likely action for outputs (..., C)."""
        head: Head = self.loss.head
        return probability_margin([logits.softmax(dim=-1) for logits in head.logits(y)])

    def _transformer_inputs(self, steps: ContextWindow) -> dict[str, Any]:
        """Return the arguments of the transformer: tokens, their index and the memory of earlier steps."""
        index, state = steps.index, None
        if self.burn_in_steps:
            state = self._burn_in(steps.between(self._padding(steps), self.burn_in_steps))
            steps = steps.between(self.burn_in_steps, steps.mask.shape[1])
        tokens = self.tokens(steps)
        return {"x": tokens, "index": index.last(tokens.shape[1]), "state": state}

    def _padding(self, steps: ContextWindow) -> int:
        """Count the burn-in columns that hold no step of any row; episodes may be shorter than the memory."""
        return int((steps.mask[:, : self.burn_in_steps].cumsum(1).sum(0) == 0).sum())

    @torch.no_grad()
    def _burn_in(self, steps: ContextWindow) -> State | None:
        if not steps.mask.shape[1]:
            return None
        return self.transformer.next_state(self.tokens(steps), steps.index)
