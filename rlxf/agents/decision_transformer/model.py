"""Decision Transformer model: from steps to actions."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlxf.agents.common.calibration import check_exit_confidence
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.decision_transformer.acting_step import TargetReturnStep
from rlxf.agents.decision_transformer.config import DecisionTransformerConfig
from rlxf.agents.decision_transformer.retrieval import encode_windows
from rlxf.agents.offline.context_window import TOKENS_PER_STEP, ContextWindow, WindowLayout, check_context
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.heads import Head
from rlxf.agents.offline.objectives.critic import CriticWindows, warn_of_small_scale
from rlxf.agents.offline.observations import ConditionedObservation, encode_observations
from rlxf.agents.offline.trajectory_model import TrajectoryModel, default_return_scale, init_gpt2_weights
from rlxf.attention import ExitTargets, State, TokenIndex
from rlxf.attention.depth.base import ExitOutputs
from rlxf.attention.depth.calm import probability_margin
from rlxf.attention.token_index import is_tracing
from rlxf.data import Trajectories, WindowBatch, Windows
from rlxf.export.acting_step import ActingStep
from rlxf.utils.matrix_products import float32_products

DECISION_TOKENS = slice(1, None, TOKENS_PER_STEP)
"""Slice of the second token of each step, which predicts the action: it attends to return and state."""
ACTION_TOKENS = slice(2, None, TOKENS_PER_STEP)
"""Slice of the last token of each step, the action."""
NEWEST_DECISION_TOKEN = slice(1 - TOKENS_PER_STEP, 2 - TOKENS_PER_STEP)
"""Slice of the last decision token."""
STEP_START_TOKENS = slice(0, None, TOKENS_PER_STEP)
"""Slice of the token with which each step starts: the return; the state if the model predicts the return."""
NEWEST_STEP_START_TOKEN = slice(-TOKENS_PER_STEP, 1 - TOKENS_PER_STEP)
"""Slice of the token with which the newest step starts."""


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
        self.loss = config.objective.build(config.core.width, self.tokens.actions, self.features.width)
        self.init_weights(self.loss)
        self.loss.after_init()
        self.auxiliary = config.auxiliary.build(config.core.width, math.prod(info.encoder.shape))
        if self.auxiliary is not None:
            init_gpt2_weights(self.auxiliary)

    def check_processes(self, world_size: int) -> None:
        """Raise ValueError if the core or the objective does not support this number of processes."""
        self.loss.check_processes(world_size)
        super().check_processes(world_size)

    def check_data(self, data: Trajectories, device: torch.device) -> None:
        """Raise ValueError if the core is unsuitable for the data.

        Warns:
            UserWarning: if there is a critic and the scale of returns is far below that of the data.
        """
        self.check_return_scale(data)
        super().check_data(data, device)

    def check_episodes(self, data: Trajectories, episodes: NDArray[np.int64]) -> None:
        """Raise DatasetError if the objective cannot be trained on these episodes."""
        self.loss.check_episodes(data, episodes)

    def check_return_scale(self, data: Trajectories) -> None:
        """Warn if there is a critic and the scale of returns is far below that of the data."""
        if self.loss.has_critic:
            warn_of_small_scale(self.tokens.return_scale, default_return_scale(data))

    def losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the "loss" and its parts, averaged over the real (unpadded) steps of B windows.

        The transformer's penalty, such as that of adaptive spans, is added to the loss of the objective.
        """
        steps = self.steps(batch)
        first = self.window_start(batch)
        exits = self.exits(steps, slice(None) if self.uses_all_tokens else DECISION_TOKENS)
        y = exits.outputs[-1]
        if self.uses_all_tokens:
            exits = replace(exits, outputs=exits.outputs[:, :, DECISION_TOKENS])
        actions, mask = batch.actions[:, first:], batch.mask[:, first:]
        actions = actions.expand(len(exits.loss_weights), *actions.shape)
        parts = self.loss(exits.outputs, actions, mask * exits.loss_weights[:, None, None])
        parts = self.loss.add_critic(parts, exits.outputs[-1], partial(self.critic_windows, batch, steps))
        parts = self.add_auxiliary_losses(parts, batch, y)
        return self.add_penalty(self.add_exit_loss(parts, exits, actions, steps.between(first)))

    @property
    def uses_all_tokens(self) -> bool:
        """True if `add_auxiliary_losses` needs the outputs at all tokens, not only at the decision tokens."""
        return self.auxiliary is not None

    def add_auxiliary_losses(
        self, parts: dict[str, Tensor], batch: WindowBatch, y: Tensor
    ) -> dict[str, Tensor]:
        """Add the losses of `AuxiliaryHeads`, if there are any, for outputs y at all tokens of a window."""
        if self.auxiliary is None:
            return parts
        first = self.window_start(batch)
        observations = self.features.normalization(batch.observations[:, first:]).flatten(2)
        returns = batch.return_to_go[:, first:] / self.tokens.return_scale
        return self.auxiliary.add_losses(
            parts, y[:, ACTION_TOKENS], observations, returns, batch.mask[:, first:]
        )

    def validation_losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the mean error of the action as "loss", with the returns of the data as inputs."""
        return {"loss": self.action_error(batch, self.outputs(self.steps(batch)))}

    def action_error(self, batch: WindowBatch, y: Tensor) -> Tensor:
        """Compute the mean error of the action over the real steps, for outputs y at the decision tokens."""
        first = self.window_start(batch)
        return masked_mean(self.loss.head.error(y, batch.actions[:, first:]), batch.mask[:, first:])

    def critic_windows(self, batch: WindowBatch, steps: ContextWindow) -> CriticWindows:
        """Return the part of a batch from which a critic learns, without burn-in.

        Args:
            batch: B windows.
            steps: its steps with observation features.
        """
        first = self.window_start(batch)
        return CriticWindows(
            features=steps.features[:, first:],
            actions=self.tokens.actions(batch.actions[:, first:]),
            rewards=batch.rewards[:, first:] / self.tokens.return_scale,
            mask=batch.mask[:, first:],
            terminated=batch.terminated,
        )

    def after_losses(self) -> None:
        self.loss.after_losses()

    def after_update(self) -> None:
        super().after_update()
        self.loss.after_update()

    def add_exit_loss(
        self, parts: dict[str, Tensor], exits: ExitOutputs, actions: Tensor, steps: ContextWindow
    ) -> dict[str, Tensor]:
        """Add the loss of exit prediction, if the depth has one, to the parts of a loss.

        Args:
            parts: "loss" and its parts.
            exits: outputs of N layers at the decision tokens of the steps.
            actions: the correct actions, (N, B, K, ...).
            steps: steps (B, K) of the decision tokens.
        """
        if exits.auxiliary_loss is None:
            return parts
        extra = exits.auxiliary_loss(self._exit_targets(exits.outputs.detach(), actions, steps))
        return (
            parts if extra is None else parts | {"loss": parts["loss"] + extra, "exit_prediction_loss": extra}
        )

    def needed_columns(self, windows: Windows) -> Windows:
        """Return windows without the columns that are padding in all of them."""
        return windows.trimmed()

    def window_start(self, batch: WindowBatch | ContextWindow) -> int:
        """Return the column of a batch at which its last K columns begin; those before it are burn-in."""
        return max(0, batch.mask.shape[1] - self.context_length)

    def loss_count(self, batch: WindowBatch) -> Tensor:
        """Count the real (unpadded) steps in the loss."""
        return batch.mask[:, self.window_start(batch) :].sum()

    @torch.no_grad()
    def _exit_targets(self, outputs: Tensor, actions: Tensor, steps: ContextWindow) -> ExitTargets:
        """Compute the exit targets for the outputs (N, B, K, C) of N layers."""
        head: Head = self.loss.head
        chosen = head.choose(outputs, deterministic=True)
        correct, same = (self.tokens.actions.same_action(chosen, other) for other in (actions, chosen[-1:]))
        index = steps.index.at(DECISION_TOKENS)
        index = TokenIndex(index.position // TOKENS_PER_STEP, index.episode)
        return ExitTargets(-head.error(outputs, actions), correct, same, index)

    def exits(self, steps: ContextWindow, output_slice: slice) -> ExitOutputs:
        """Return the outputs after each layer at the tokens of the slice ``output_slice``."""
        inputs = self.transformer_inputs(steps)
        with self.mixed_precision():
            exits = self.transformer.exits(**inputs, output_slice=output_slice)
        self.check_outputs(exits.outputs[-1], inputs, output_slice)
        return exits

    def outputs(self, steps: ContextWindow, output_slice: slice = DECISION_TOKENS) -> Tensor:
        """Return the outputs at the tokens of the slice ``output_slice``.

        At the decision tokens these are the inputs of the head, (B, W - window_start, C).
        """
        inputs = self.transformer_inputs(steps)
        with self.mixed_precision():
            y = self.transformer.outputs(**inputs, output_slice=output_slice)
        self.check_outputs(y, inputs, output_slice)
        return y

    @torch.no_grad()
    def newest_output(self, steps: ContextWindow) -> Tensor:
        """Return the output at the newest decision token of each row, (B, C), to act by.

        Unlike `outputs`, this method exits early where the depth allows it.
        """
        inputs = self.decision_inputs(steps)
        newest = NEWEST_DECISION_TOKEN
        x = inputs["x"]
        with float32_products(x.numel() * self.transformer.spec.width, x.device):
            y = self.transformer.early_outputs(
                **inputs, output_slice=newest, confidence_fn=self.confidence_margin
            )
        self.check_outputs(y, inputs, newest)
        return y[:, 0]

    def decision_inputs(self, steps: Any) -> dict[str, Any]:
        """Return the arguments of the transformer from which `newest_output` computes its output.

        Args:
            steps: result of `append_step`.
        """
        return self.transformer_inputs(steps)

    @torch.no_grad()
    def append_step(
        self, state: Any, encoded: ConditionedObservation, start: Tensor, deterministic: bool = True
    ) -> Any:
        """Return the state after a step of E environments: a `ContextWindow` with this step as the newest.

        Args:
            state: state after the previous step; None for none. It is not modified.
            encoded: the new step.
            start: (E,) bool, environments at the first step of an episode, whose window is cleared first.
            deterministic: False to sample what the model predicts before the action; nothing here.

        Raises:
            TypeError: if the state is not a `ContextWindow`.
            ValueError: if it is of another agent, device or number of environments.
        """
        return self._extend_window(state, encoded, start, self.context_length + self.burn_in_steps)

    def encode_step(
        self, observation: Any, state: Any, episode_start: Any, info: DatasetInfo, device: torch.device
    ) -> tuple[ConditionedObservation, Tensor]:
        """Encode an observation of `rlxf.envs.ReturnToGo`; see `ConditionedObservation.encode`.

        Args:
            observation: observation of a single environment or of E environments.
            state: state after the previous step; None for none.
            episode_start: (E,) bool, environments at the first step of an episode; None if it is unknown.
            info: spaces of observations and actions.
            device: device of the model.

        Returns:
            The new step, and a mask (E,) of the environments at the first step of an episode.
        """
        encoded = ConditionedObservation.encode(observation, info, device)
        return encoded, encoded.episode_starts(episode_start)

    def encode_rows(self, observation: Any, info: DatasetInfo) -> NDArray[Any]:
        """Encode observations (E, ...) that `encode_step` accepts as in `Trajectories`."""
        return encode_observations(observation["observation"], info)

    def record_actions(
        self, state: Any, actions: NDArray[Any], info: DatasetInfo, device: torch.device
    ) -> Any:
        """Return the state after a step with actions (E, ...) of the environments; see `observe_action`."""
        return state

    def observe_action(self, state: Any, actions: Tensor) -> Any:
        """Return the state with the actions of the newest step, (E, ...); the next observation has them."""
        return state

    def state_tensors(self, state: Any) -> dict[str, Tensor]:
        """Return the tensors of a state of E environments by name, for checkpoints."""
        return dict(vars(state))

    def state_from_tensors(self, tensors: Mapping[str, Tensor]) -> Any:
        """Restore a state from the result of `state_tensors`."""
        return ContextWindow(**tensors)

    def acting_step(self, info: DatasetInfo, envs: int) -> ActingStep:
        """Return the acting step of E environments, for export.

        Args:
            info: spaces of observations and actions.
            envs: number of environments E.

        Raises:
            ValueError: see `WindowActingStep`.
        """
        return TargetReturnStep(self, info, envs)

    def _extend_window(
        self, window: ContextWindow | None, encoded: ConditionedObservation, start: Tensor, length: int
    ) -> ContextWindow:
        """Append a step to a window; None for an empty one of ``length`` steps."""
        like, layout = encoded.return_to_go, self._window_layout(encoded, length)
        if window is None:
            window = ContextWindow.empty(layout, like.device)
        else:
            check_context(window, layout, len(like), like.device)
        features = self.features(encoded.observations[:, None])[:, 0]
        return window.clear_rows(start).append(
            features, encoded.previous_action, encoded.return_to_go, encoded.time_steps
        )

    def _window_layout(self, encoded: ConditionedObservation, length: int) -> WindowLayout:
        """Return the layout of windows of ``length`` steps for the environments of ``encoded``."""
        action, returns = encoded.previous_action, encoded.return_to_go
        steps = (len(returns), length)
        return {
            "features": ((*steps, self.features.width), returns.dtype),
            "actions": ((*steps, *action.shape[1:]), action.dtype),
            "return_to_go": (steps, returns.dtype),
            "time_steps": (steps, encoded.time_steps.dtype),
            "mask": (steps, torch.bool),
        }

    @torch.no_grad()
    def encode_steps(self, windows: Windows, device: torch.device, progress_bar: bool = False) -> Tensor:
        """Return the input of the head while acting for each step of the data, (N, C)."""
        return encode_windows(self, windows, device, progress_bar)

    def check_window(self, method: str) -> None:
        """Raise ValueError if ``method`` of the agent needs a context window and the model has none."""

    def confidence_margin(self, y: Tensor) -> Tensor:
        """Compute the margin between the most and the second most likely action for outputs (..., C)."""
        head: Head = self.loss.head
        return probability_margin([logits.softmax(dim=-1) for logits in head.logits(y)])

    def transformer_inputs(self, steps: ContextWindow) -> dict[str, Any]:
        """Return the arguments of the transformer: tokens, their index and the memory of earlier steps."""
        index = steps.index
        state = None
        first = self.window_start(steps)
        if first:
            state = self._burn_in(steps.between(self._padding(steps), first))
            steps = steps.between(first)
        tokens = self.tokens(steps)
        return {"x": tokens, "index": index.last(tokens.shape[1]), "state": state}

    def _padding(self, steps: ContextWindow) -> int:
        """Count the burn-in columns that hold no step of any row; episodes may be shorter than the memory.

        While tracing, no column is left out: empty slots change nothing.
        """
        if is_tracing():
            return 0
        return int((steps.mask[:, : self.window_start(steps)].cumsum(1).sum(0) == 0).sum())

    @torch.no_grad()
    def _burn_in(self, steps: ContextWindow) -> State | None:
        if not steps.mask.shape[1]:
            return None
        return self.transformer.next_state(self.tokens(steps), steps.index)
