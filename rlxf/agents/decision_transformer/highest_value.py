"""Choice of the return by a critic: the model acts for the return whose action has the highest value."""

from typing import Any

import torch
from torch import Tensor, nn

from rlxf.agents.decision_transformer.conditioning import ExpectileHead, HighestValueReturn
from rlxf.agents.decision_transformer.config import DecisionTransformerConfig
from rlxf.agents.decision_transformer.predicted_return import PredictedReturnModel
from rlxf.agents.offline.context_window import ContextWindow
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.observations import ConditionedObservation


class HighestValueReturnModel(PredictedReturnModel):
    """`PredictedReturnModel` that acts for the candidate return whose action has the highest value.

    The candidates (`HighestValueReturn`) are processed in one batch. Training is that of
    `PredictedReturnModel`. The chosen return stays in the context of later steps.

    Source: Hu et al. 2024, arXiv:2405.17098, section 4.

    Args:
        info: see `DecisionTransformerModel`.
        normalization: see `DecisionTransformerModel`.
        config: see `DecisionTransformerModel`; its conditioning is `HighestValueReturn`.

    Raises:
        ValueError: if the objective has no critic, or the core exits early.
    """

    return_head: ExpectileHead

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: DecisionTransformerConfig):
        assert isinstance(config.conditioning, HighestValueReturn)
        super().__init__(info, normalization, config)
        if not self.loss.has_critic:
            raise ValueError(
                f"conditioning={config.conditioning} chooses returns by the values of a critic, which "
                f"objective={config.objective} does not train; use objective=QRegularized(), or "
                f"conditioning=MaxReturn()"
            )
        self.candidates = config.conditioning.candidates

    @torch.no_grad()
    def append_step(
        self, state: Any, encoded: ConditionedObservation, start: Tensor, deterministic: bool = True
    ) -> Any:
        window = super().append_step(state, encoded, start, deterministic)
        predicted = window.return_to_go[:, -1]
        spread = self.return_head.spread(self.candidates)[:, None].expand(-1, len(predicted))
        candidates = torch.cat([predicted[None], spread])
        best = self._values(window, candidates).argmax(dim=0, keepdim=True)
        return window.with_newest(return_to_go=candidates.gather(0, best)[0])

    def _values(self, window: ContextWindow, returns: Tensor) -> Tensor:
        """Return the value of the action for each candidate return (N, E) of the newest step, (N, E)."""
        rows = window.repeat(len(returns)).with_newest(return_to_go=returns.flatten())
        y = self.newest_output(rows)
        return self.loss.action_values(rows.features[:, -1], y).view(returns.shape)
