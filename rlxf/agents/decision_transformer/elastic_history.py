"""Elastic history: the model acts with the history length that has the largest predicted return."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlxf.agents.common.predict_state import check_state_type
from rlxf.agents.decision_transformer.conditioning import ElasticHistory
from rlxf.agents.decision_transformer.config import DecisionTransformerConfig
from rlxf.agents.decision_transformer.model import NEWEST_STEP_START_TOKEN
from rlxf.agents.decision_transformer.predicted_return import PredictedReturnModel
from rlxf.agents.offline.context_window import NEW_CONTEXT, ContextWindow
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.observations import ConditionedObservation, EncodedObservation


@dataclass(frozen=True, eq=False)
class ElasticContext:
    """State of E environments that act with an elastic history.

    `DecisionTransformer.predict` returns it as ``state`` and accepts it in the next call. Its contents are
    internal.

    Args:
        window: the last K steps.
        history: number of the last steps from which the newest action is chosen, (E,) int64; at most the
            number of steps of the episode, so that rounding does not decide between equal histories.
    """

    window: ContextWindow
    history: Tensor

    def rows(self, rows: Tensor) -> "ElasticContext":
        """Return a copy of the chosen environments; ``rows`` is a bool (E,) or an int64 (N,) tensor."""
        return ElasticContext(self.window.rows(rows), self.history[rows])


class ElasticHistoryModel(PredictedReturnModel):
    """`PredictedReturnModel` that acts with the history length whose predicted return is the largest.

    The candidates are K, K - step, K - 2 step ... steps, at least 1. All of them are processed in one batch.
    Training is that of `PredictedReturnModel`, in which every window contains histories of all lengths. The
    state holds the return that was predicted with the chosen history.

    Source: Wu et al. 2023, arXiv:2307.02484, section 4.

    Args:
        info: see `DecisionTransformerModel`.
        normalization: see `DecisionTransformerModel`.
        config: see `DecisionTransformerModel`; its conditioning is `ElasticHistory`.

    Raises:
        ValueError: if the core exits early, or has a memory.
    """

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: DecisionTransformerConfig):
        assert isinstance(config.conditioning, ElasticHistory)
        if config.core.memory is not None:
            raise ValueError(
                f"conditioning={config.conditioning} chooses the steps to attend to, which a memory would "
                f"add to, got {config.core.memory}; use memory=None"
            )
        super().__init__(info, normalization, config)
        self.candidates = range(self.context_length, 0, -config.conditioning.step)

    @torch.no_grad()
    def append_step(
        self, state: Any, encoded: ConditionedObservation, start: Tensor, deterministic: bool = True
    ) -> Any:
        window = self.append_observation(_window_of(state), encoded, start)
        returns = self._predicted_returns(window, deterministic)
        best, number = returns.max(dim=0)
        chosen = torch.tensor([*self.candidates], device=best.device)[number]
        history = torch.minimum(chosen, window.mask.sum(dim=1))
        return ElasticContext(window.with_newest(return_to_go=best), history)

    def _predicted_returns(self, window: ContextWindow, deterministic: bool) -> Tensor:
        """Return the predicted return-to-go with each candidate, (N, E)."""
        batch = len(window.mask)
        rows = window.repeat(len(self.candidates))
        lengths = torch.tensor([*self.candidates], device=window.mask.device).repeat_interleave(batch)
        y = self.outputs(last_steps(rows, lengths), NEWEST_STEP_START_TOKEN)[:, 0]
        return self.return_head.choose(y, deterministic).view(-1, batch)

    def decision_inputs(self, steps: Any) -> dict[str, Any]:
        """Return the arguments of the transformer for the chosen history of an `ElasticContext`."""
        return super().decision_inputs(last_steps(steps.window, steps.history))

    def observe_action(self, state: Any, actions: Tensor) -> Any:
        return replace(state, window=super().observe_action(state.window, actions))

    def state_tensors(self, state: Any) -> dict[str, Tensor]:
        return super().state_tensors(state.window) | {"history": state.history}

    def state_from_tensors(self, tensors: Mapping[str, Tensor]) -> Any:
        window = {name: tensor for name, tensor in tensors.items() if name != "history"}
        return ElasticContext(ContextWindow(**window), tensors["history"])

    def continue_episode(
        self, observation: EncodedObservation, state: Any, start: Tensor, initial_actions: Tensor
    ) -> ConditionedObservation:
        return super().continue_episode(observation, _window_of(state), start, initial_actions)


def last_steps(window: ContextWindow, history: Tensor) -> ContextWindow:
    """Return windows in which only the last ``history`` (B,) steps are not padding."""
    columns = torch.arange(window.mask.shape[1], 0, -1, device=history.device)
    return replace(window, mask=window.mask & (columns <= history[:, None]))


def _window_of(state: Any) -> Any:
    if state is None:
        return None
    check_state_type(state, ElasticContext, NEW_CONTEXT)
    return state.window
