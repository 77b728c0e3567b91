"""Multilayer perceptron over the last observations: settings, history of observations, and model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlxf.agents.common.actions import action_encoder
from rlxf.agents.common.checkpoint import window_memory
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.common.numerics import check_parameters
from rlxf.agents.common.predict_state import check_state_rows, check_state_type
from rlxf.agents.offline.config import (
    MAX_HIDDEN_LAYERS,
    Converter,
    OfflineConfig,
    technique_converter,
)
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.model import ObservationFeatures, OfflineModel
from rlxf.agents.offline.objectives import OBJECTIVES, Imitation, Objective
from rlxf.attention.dropout import Dropout
from rlxf.attention.linear import Linear
from rlxf.data import Trajectories, WindowBatch, Windows
from rlxf.training import NumericalError
from rlxf.training.json_rules import Rule, number, whole

_SIZE = whole(1)
HIDDEN_SIZES = Rule(
    f"a list of at most {MAX_HIDDEN_LAYERS} integers of at least 1",
    lambda sizes: (
        isinstance(sizes, list) and len(sizes) <= MAX_HIDDEN_LAYERS and all(map(_SIZE.holds, sizes))
    ),
)
"""Rule of the widths of hidden layers in a file."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig(OfflineConfig):
    """Arguments of an agent with a multilayer perceptron that its checkpoints hold."""

    BOUNDS: ClassVar[dict[str, Rule]] = OfflineConfig.BOUNDS | {
        "hidden_sizes": HIDDEN_SIZES,
        "dropout": number(0, below=1),
    }
    JSON: ClassVar[dict[str, tuple[Converter, Converter]]] = OfflineConfig.JSON | {
        "hidden_sizes": (list, tuple),
        "objective": technique_converter("objective", OBJECTIVES),
    }
    TYPES: ClassVar[dict[str, tuple[type, ...]]] = {
        "hidden_sizes": (Sequence,),
        "objective": tuple(OBJECTIVES.values()),
    }
    DEFAULTS: ClassVar[dict[str, Any]] = OfflineConfig.DEFAULTS | {"objective": Imitation()}
    MODEL_SETTINGS: ClassVar[tuple[str, ...]] = ("context_length", "hidden_sizes", "objective")
    hidden_sizes: tuple[int, ...]
    dropout: float
    objective: Objective

    @property
    def layers(self) -> int:
        """Number of hidden layers, and the layer of the head."""
        return len(self.hidden_sizes) + 1

    def inference_memory(self, info: DatasetInfo) -> dict[str, int]:
        """See `OfflineConfig`."""
        width = max((math.prod(info.encoder.shape), *self.hidden_sizes))
        return {"the last observations": window_memory(self.context_length, width, 0)}

    def check(self) -> None:
        """Check all numbers.

        Raises:
            TypeError: if a number has the wrong type.
            ValueError: if a value is out of range.
        """
        super().check()
        self.objective.check_windows(1)


@dataclass(frozen=True, eq=False)
class ObservationHistory:
    """Features of the last K observations of E environments, padded on the left.

    Args:
        features: (E, K, F), 0 for padding.
        mask: (E, K) bool, False for padding.
    """

    features: Tensor
    mask: Tensor

    def rows(self, rows: Tensor) -> "ObservationHistory":
        """Select environments; ``rows`` is a bool (E,) or an int64 (N,) tensor."""
        return ObservationHistory(self.features[rows], self.mask[rows])

    def append(self, features: Tensor, start: Tensor) -> "ObservationHistory":
        """Return the history with one more observation, without the oldest one.

        Args:
            features: features of the new observation, (E, F).
            start: (E,) bool, environments at the first step of an episode, whose history is cleared first.
        """
        mask = torch.cat([self.mask[:, 1:] & ~start[:, None], torch.ones_like(self.mask[:, :1])], dim=1)
        stacked = torch.cat([self.features[:, 1:], features[:, None]], dim=1)
        return ObservationHistory(stacked.masked_fill(~mask[..., None], 0), mask)

    def check(self, like: "ObservationHistory") -> None:
        """Raise an error unless this state, passed to `predict`, fits the agent and the observation.

        Args:
            like: empty history of the agent for the environments of the observation.

        Raises:
            TypeError: if this is not an `ObservationHistory`.
            ValueError: if it is of another agent, device, or number of environments.
        """
        check_state_type(self, ObservationHistory, NEW_HISTORY)
        check_state_rows(self.mask, len(like.mask), like.mask.device, NEW_HISTORY)
        own, expected = ((*each.features.shape, each.mask.shape[1]) for each in (self, like))
        if own != expected:
            raise ValueError(
                f"the state is of another agent: its features have shape {tuple(self.features.shape)}, those "
                f"of this agent {tuple(like.features.shape)}; {NEW_HISTORY}"
            )


NEW_HISTORY = "pass state=None to start with an empty history"
"""Advice in messages about a state."""


class MLPModel(OfflineModel):
    """Model ``y = MLP(x_(t-K+1) ... x_t)``, ``action = head(y)``, for features x of observations.

    Hidden layers are followed by ReLU, and by dropout in training. The features of steps before the start of
    the episode are 0, which is the mean of normalized vectors. Weights are initialized as in ``nn.Linear``.

    Args:
        info: spaces of observations and actions.
        normalization: normalization layer of observations.
        config: arguments of the agent.
    """

    condition_width = 0
    """Number of inputs in addition to the observations."""

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: MLPConfig):
        super().__init__()
        self.context_length = config.context_length
        self.precision = config.precision
        self.features = ObservationFeatures(info.encoder.shape, normalization)
        inputs = self.context_length * self.features.width + self.condition_width
        sizes = (inputs, *config.hidden_sizes)
        layers = [
            nn.Sequential(Linear(size, width), nn.ReLU(), Dropout(config.dropout))
            for size, width in pairwise(sizes)
        ]
        self.body = nn.Sequential(*layers)
        self.loss = config.objective.build(sizes[-1], action_encoder(info.action_space), self.features.width)

    def windows(self, trajectories: Trajectories) -> Windows:
        """Return windows of one step, with the K - 1 observations before it as burn-in."""
        return Windows(trajectories, 1, burn_in=self.context_length - 1)

    def losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the "loss" and its parts, averaged over the newest steps of B windows."""
        y = self.outputs(self.history(batch), batch.return_to_go[:, -1])
        parts: dict[str, Tensor] = self.loss(y, batch.actions[:, -1], batch.mask[:, -1])
        return parts

    def validation_losses(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the mean error of the action at the newest steps as "loss"."""
        y = self.outputs(self.history(batch), batch.return_to_go[:, -1])
        error = self.loss.head.error(y, batch.actions[:, -1])
        return {"loss": masked_mean(error, batch.mask[:, -1])}

    def product_size(self, batch: WindowBatch) -> int:
        """Return the multiply-adds of a product of a batch with the largest weight of a hidden layer."""
        return len(batch.mask) * max((weight.numel() for weight in self.body.parameters()), default=0)

    def loss_count(self, batch: WindowBatch) -> Tensor:
        """Count the steps in the loss, one for each window."""
        return batch.mask[:, -1].sum()

    def history(self, batch: WindowBatch) -> ObservationHistory:
        """Return the features of the observations in B windows of K steps."""
        features = self.features(batch.observations)
        return ObservationHistory(features.masked_fill(~batch.mask[..., None], 0), batch.mask)

    def outputs(self, history: ObservationHistory, return_to_go: Tensor | None) -> Tensor:
        """Return the inputs of the head, (B, C), for histories of B environments or windows.

        Args:
            history: the last K observations.
            return_to_go: return-to-go at the newest step, (B,); None if the agent has none.
        """
        x = torch.cat([history.features.flatten(1), *self.condition(return_to_go)], dim=1)
        with self.mixed_precision():
            y: Tensor = self.body(x)
        return y

    def condition(self, return_to_go: Tensor | None) -> list[Tensor]:
        """Return the `condition_width` inputs in addition to the observations, parts (B, n); none here."""
        return []

    @torch.no_grad()
    def act(self, history: ObservationHistory, return_to_go: Tensor | None, deterministic: bool) -> Tensor:
        """Choose actions (E, ...) in the encoding of the dataset; arguments as in `outputs` and `predict`.

        Raises:
            NumericalError: if an output of the network is not finite; the message names the cause.
        """
        actions: Tensor = self.loss.head.choose(self.checked_outputs(history, return_to_go), deterministic)
        return actions

    def checked_outputs(self, history: ObservationHistory, return_to_go: Tensor | None) -> Tensor:
        """Return `outputs`, or raise NumericalError if one is not finite."""
        y = self.outputs(history, return_to_go)
        if not y.isfinite().all():
            check_parameters(self)
            raise NumericalError(
                "the outputs of the network are not finite, although its parameters are: the observations "
                "or the return-to-go exceed the range of float32; scale them down"
            )
        return y

    @torch.no_grad()
    def append_step(self, state: Any, observations: Tensor, start: Tensor) -> ObservationHistory:
        """Return the state after a step of E environments, which is not modified itself.

        Args:
            state: state after the previous step; None for an empty history.
            observations: new observations, (E, D) or (E, C, H, W).
            start: (E,) bool, environments at the first step of an episode, whose history is cleared first.

        Raises:
            TypeError, ValueError: if the state does not fit, see `ObservationHistory.check`.
        """
        features = self.features(observations[:, None])[:, 0]
        empty = self._empty_history(features)
        if state is not None:
            ObservationHistory.check(state, empty)
        return (empty if state is None else state).append(features, start)

    def _empty_history(self, features: Tensor) -> ObservationHistory:
        shape = (len(features), self.context_length)
        mask = torch.zeros(shape, dtype=torch.bool, device=features.device)
        return ObservationHistory(features.new_zeros((*shape, features.shape[1])), mask)
