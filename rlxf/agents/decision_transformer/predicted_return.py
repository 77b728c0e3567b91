"""Decision Transformer that predicts the return on which its actions are conditioned."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlxf.agents.common.losses import masked_mean
from rlxf.agents.decision_transformer.acting_step import CPU, PredictedReturnStep
from rlxf.agents.decision_transformer.conditioning import PredictedReturn
from rlxf.agents.decision_transformer.config import DecisionTransformerConfig
from rlxf.agents.decision_transformer.model import (
    DECISION_TOKENS,
    NEWEST_STEP_START_TOKEN,
    STEP_START_TOKENS,
    DecisionTransformerModel,
)
from rlxf.agents.offline.context_window import ContextWindow, check_context
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.observations import ConditionedObservation, EncodedObservation, initial_actions
from rlxf.agents.offline.trajectory_model import StepTokens
from rlxf.data import Trajectories, WindowBatch, action_encoder
from rlxf.data.findings import differ_beyond_rounding
from rlxf.export.acting_step import ActingStep


class StateFirstTokens(StepTokens):
    r"""Tokens ``LN(W_s s_t + w(t)), LN(W_s s_t + W_R R_t / scale + w(t)), LN(W_a a_t + w(t))`` of steps.

    The output at the second token predicts the action. In Reinformer this token contains the return only, so
    the action depends on the state through attention alone, which has to find the token of the same step
    first. With the state in the token, training needs far fewer updates.
    """

    def embed(self, steps: ContextWindow) -> Tensor:
        returns, states, actions = super().embed(steps).unbind(dim=2)
        return torch.stack([states, states + returns, actions], dim=2)


class PredictedReturnModel(DecisionTransformerModel):
    r"""`DecisionTransformerModel` with the tokens state, return, action of each step, which predicts returns.

    The output at the state token predicts the return-to-go, that at the return token the action. The loss is
    ``error of the action + error of the return``, with the returns of the data as inputs. While acting, the
    return-to-go of the newest step is the predicted one. It stays in the context of later steps.

    Source: Zhuang et al. 2024, arXiv:2405.08740, section 4, with `StateFirstTokens`.

    Args:
        info: see `DecisionTransformerModel`.
        normalization: see `DecisionTransformerModel`.
        config: see `DecisionTransformerModel`; its conditioning predicts the return.

    Raises:
        ValueError: if the core exits early.
    """

    tokens_class: ClassVar[type[StepTokens]] = StateFirstTokens

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: DecisionTransformerConfig):
        assert isinstance(config.conditioning, PredictedReturn)
        config.core.depth.check_no_early_exit(f"conditioning={config.conditioning}")
        super().__init__(info, normalization, config)
        self.conditioning = config.conditioning
        self.return_head = config.conditioning.build(config.core.width)
        self.init_weights(self.return_head)

    def fit(self, data: Trajectories) -> None:
        self.return_head.fit(data.return_to_go)

    def check_episodes(self, data: Trajectories, episodes: NDArray[np.int64]) -> None:
        """Raise ValueError if all episodes have the same return; DatasetError as the base class."""
        returns = data.returns[episodes]
        if not differ_beyond_rounding(returns):
            raise ValueError(
                f"conditioning={self.conditioning} predicts the return, but all {len(returns)} episodes "
                f"have the return {returns[0]:g}, so a return does not tell good actions from others: "
                f"use rlxf.BehaviorCloning (rlxf train bc), which needs no return"
            )
        super().check_episodes(data, episodes)

    @property
    def uses_all_tokens(self) -> bool:
        """True: returns are predicted at other tokens than actions."""
        return True

    def add_auxiliary_losses(
        self, parts: dict[str, Tensor], batch: WindowBatch, y: Tensor
    ) -> dict[str, Tensor]:
        """Add the losses of `AuxiliaryHeads`, if there are any, and the error of the return."""
        parts = super().add_auxiliary_losses(parts, batch, y)
        error = self.return_error(batch, y)
        return parts | {"loss": parts["loss"] + error, "return_loss": error}

    def validation_losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the sum of the mean errors of the action and of the return as "loss", and both errors."""
        y = self.outputs(self.steps(batch), slice(None))
        action = self.action_error(batch, y[:, DECISION_TOKENS])
        predicted = self.return_error(batch, y)
        return {"loss": action + predicted, "action_loss": action, "return_loss": predicted}

    def return_error(self, batch: WindowBatch, y: Tensor) -> Tensor:
        """Compute the mean error of the predicted return over the real steps, for outputs y at all tokens."""
        first = self.window_start(batch)
        error = self.return_head.error(y[:, STEP_START_TOKENS], batch.return_to_go[:, first:])
        return masked_mean(error, batch.mask[:, first:])

    @torch.no_grad()
    def append_step(
        self, state: Any, encoded: ConditionedObservation, start: Tensor, deterministic: bool = True
    ) -> Any:
        window = self.append_observation(state, encoded, start)
        y = self.outputs(window, NEWEST_STEP_START_TOKEN)[:, 0]
        return window.with_newest(return_to_go=self.return_head.choose(y, deterministic))

    def append_observation(self, state: Any, encoded: ConditionedObservation, start: Tensor) -> ContextWindow:
        """Return the window with a new step, whose return is not predicted yet; see `append_step`."""
        window: ContextWindow = super().append_step(state, encoded, start)
        return window

    def encode_step(
        self, observation: Any, state: Any, episode_start: Any, info: DatasetInfo, device: torch.device
    ) -> tuple[ConditionedObservation, Tensor]:
        """Encode an observation of the environments; see `EncodedObservation.encode`."""
        plain = EncodedObservation.encode(observation, info, device)
        start = plain.episode_starts(episode_start)
        return self.continue_episode(plain, state, start, initial_actions(info, len(start), device)), start

    def encode_rows(self, observation: Any, info: DatasetInfo) -> NDArray[Any]:
        rows: NDArray[Any] = EncodedObservation.encode(observation, info, CPU).observations.numpy()
        return rows

    def record_actions(
        self, state: Any, actions: NDArray[Any], info: DatasetInfo, device: torch.device
    ) -> Any:
        rows = action_encoder(info.action_space)(actions)
        return self.observe_action(state, torch.as_tensor(rows, device=device))

    def observe_action(self, state: Any, actions: Tensor) -> Any:
        """Return the state with the actions of the newest step, (E, ...)."""
        return state.with_newest(actions=actions)

    def continue_episode(
        self, observation: EncodedObservation, state: Any, start: Tensor, initial_actions: Tensor
    ) -> ConditionedObservation:
        """Return the observation with the previous action and the time step that the state contains.

        Args:
            observation: observation without a target return.
            state: state after the previous step; None for none.
            start: (E,) bool, environments at the first step of an episode.
            initial_actions: previous actions at the first step, (E, ...).

        Raises:
            TypeError, ValueError: if the state does not fit, see `append_step`.
        """
        zeros = torch.zeros_like(start, dtype=torch.long)
        encoded = ConditionedObservation.without_target(observation, initial_actions, zeros)
        if state is None:
            return encoded
        layout = self._window_layout(encoded, self.context_length + self.burn_in_steps)
        check_context(state, layout, len(start), start.device)
        first = start.view(-1, *(1,) * (initial_actions.ndim - 1))
        actions = torch.where(first, initial_actions, state.actions[:, -1])
        time_steps = (state.time_steps[:, -1] + 1).masked_fill(start, 0)
        return replace(encoded, previous_action=actions, time_steps=time_steps)

    def acting_step(self, info: DatasetInfo, envs: int) -> ActingStep:
        return PredictedReturnStep(self, info, envs)
