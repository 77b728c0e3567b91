"""Auxiliary losses of a Decision Transformer: predictions of the next observation and return-to-go."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.agents.common.losses import masked_mean, squared_error
from rlxf.agents.decision_transformer.conditioning import Conditioning
from rlxf.attention import TransformerSpec
from rlxf.utils.checks import check_not_negative

STATE, RETURN = "state_loss", "return_loss"
"""Names of the auxiliary losses."""


@dataclass(frozen=True)
class AuxiliaryWeights:
    """Weights of the auxiliary losses; 0 for none.

    Args:
        state_loss_weight: weight of the error of the predicted next observation.
        return_loss_weight: weight of the error of the predicted next return-to-go.
    """

    state_loss_weight: float
    return_loss_weight: float

    def check(self, core: TransformerSpec, steps: int, conditioning: Conditioning) -> None:
        """Check the weights, and that the agent supports the losses.

        Args:
            core: core of the agent.
            steps: number of steps in a window.
            conditioning: conditioning of the agent.

        Raises:
            TypeError: if a weight is not a number.
            ValueError: if a weight is negative or not finite, the core exits early, a window has one step, or
                the agent already predicts the return.
        """
        for name, weight in vars(self).items():
            check_not_negative(name, weight)
        choice = ", ".join(f"{name}={weight:g}" for name, weight in vars(self).items() if weight)
        if not choice:
            return
        core.depth.check_no_early_exit(choice)
        if steps < 2:
            raise ValueError(f"{choice} predicts the next step of a window; use context_length of at least 2")
        if self.return_loss_weight and not conditioning.needs_target:
            raise ValueError(
                f"{choice} predicts the return, but so does conditioning={conditioning}; use "
                f"return_loss_weight=0"
            )

    def build(self, width: int, numbers: int) -> "AuxiliaryHeads | None":
        """Build the heads of the losses with a weight above 0; None if there are none.

        Args:
            width: width of the transformer.
            numbers: numbers in an observation.
        """
        weights = {STATE: self.state_loss_weight, RETURN: self.return_loss_weight}
        chosen = {name: weight for name, weight in weights.items() if weight}
        return AuxiliaryHeads(width, numbers, chosen) if chosen else None


class AuxiliaryHeads(nn.Module):
    r"""Linear predictions from the output y_t at the action token of each step, which has seen s_t and a_t.

    The losses are, with D numbers x in a normalized observation and N real (unpadded) steps in the batch,

    - ``state_loss = 1/N sum_t 1/D |W_s y_t + b_s - x_(t+1)|^2``
    - ``return_loss = 1/N sum_t (w_R y_t + b_R - R_(t+1) / scale)^2``

    over the steps t whose next step is in the same window; padding and burn-in are excluded. The training
    loss is ``loss + state_loss_weight state_loss + return_loss_weight return_loss``. Vectors, nested
    observations and images are predicted as their normalized numbers, images pixel by pixel. A weight of 0
    makes no head. Acting does not use the heads.

    Source: the predictions of the reference implementation of Chen et al. 2021, arXiv:2106.01345, which do
    not enter its loss; as a loss: Hu et al. 2024, arXiv:2405.17098.

    Args:
        width: width C of the transformer.
        numbers: numbers D in an observation.
        weights: weight of each loss by name, above 0.
    """

    def __init__(self, width: int, numbers: int, weights: Mapping[str, float]):
        super().__init__()
        self.weights = dict(weights)
        outputs = {STATE: numbers, RETURN: 1}
        self.nets = nn.ModuleDict({name: nn.Linear(width, outputs[name]) for name in weights})

    def add_losses(
        self, parts: dict[str, Tensor], y: Tensor, observations: Tensor, returns: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """Return "loss" with the weighted losses added, and its parts with these losses.

        Args:
            parts: "loss" and its parts.
            y: outputs at the action tokens, (B, K, C).
            observations: normalized observations, (B, K, D).
            returns: returns-to-go, divided by the scale, (B, K).
            mask: (B, K) bool, False for padding.
        """
        targets = {STATE: observations, RETURN: returns[..., None]}
        losses = {name: next_step_error(net(y), targets[name], mask) for name, net in self.nets.items()}
        weighted = [self.weights[name] * loss for name, loss in losses.items()]
        return parts | losses | {"loss": parts["loss"] + torch.stack(weighted).sum()}


def next_step_error(predictions: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute ``1/N sum_t 1/D |p_t - v_(t+1)|^2`` over the steps t with a next step; N real steps.

    The divisor N does not depend on how a batch is divided among processes.

    Args:
        predictions: p, (B, K, D).
        values: v, (B, K, D).
        mask: (B, K) bool, False for padding.
    """
    has_next = mask[:, :-1] & mask[:, 1:]
    errors = torch.where(has_next, squared_error(predictions[:, :-1], values[:, 1:]), 0)
    return masked_mean(F.pad(errors, (0, 1)), mask)
