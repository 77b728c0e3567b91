"""Base classes of training objectives and of their losses."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from rlxf.agents.offline.heads import (
    Head,
    StochasticHead,
)
from rlxf.agents.offline.objectives.critic import (
    CriticWindows,
)
from rlxf.attention import TransformerSpec
from rlxf.data import Trajectories
from rlxf.utils.checks import PythonNumbers


class ObjectiveLoss(nn.Module, ABC):
    """Base class of the losses of objectives, with their action head."""

    head: Head

    @abstractmethod
    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Compute "loss" and its parts from y (..., C), the actions of the dataset, and weights (...).

        Padding has weight 0.
        """

    def add_critic(
        self, parts: dict[str, Tensor], y: Tensor, windows: Callable[[], CriticWindows]
    ) -> dict[str, Tensor]:
        """Return the parts of the loss with those of a critic; without one, they are unchanged.

        Args:
            parts: result of `forward`.
            y: outputs of the transformer, (B, K, C).
            windows: function that returns the batch for the critic.
        """
        return parts

    @property
    def has_critic(self) -> bool:
        """True if the objective trains a critic, in units of the agent's ``return_scale``."""
        return type(self).add_critic is not ObjectiveLoss.add_critic

    def action_values(self, features: Tensor, y: Tensor) -> Tensor:
        """Return the critic's values (B,) of the deterministic actions, if there is a critic.

        Args:
            features: features of the observations, (B, F).
            y: outputs of the transformer, (B, C).
        """
        raise NotImplementedError(f"{type(self).__name__} has no critic")

    def after_init(self) -> None:  # optional
        """Set state that depends on the initial weights."""

    def after_losses(self) -> None:  # optional
        """Check the numbers that the losses of a batch have stored in buffers."""

    def after_update(self) -> None:  # optional
        """Update state that depends on the weights, after each optimizer step."""

    def check_processes(self, world_size: int) -> None:  # optional
        """Raise ValueError if the objective does not support this number of processes."""

    def check_episodes(self, data: Trajectories, episodes: NDArray[np.int64]) -> None:  # optional
        """Raise DatasetError if the objective cannot be trained on these episodes; see `OfflineModel`."""

    def check_online(self) -> None:
        """Raise ValueError unless the policy can be fine-tuned online: by default, if it is stochastic."""
        if not isinstance(self.head, StochasticHead):
            raise ValueError(
                "learn_online needs a policy that explores: train the agent with objective=MaximumEntropy(), "
                "whose policy is stochastic, or with QRegularized(), whose critic learns from noisy actions"
            )


class ObjectiveSpec(PythonNumbers):
    """Base class of the objectives.

    A subclass of an objective is a frozen dataclass, too: files hold its name and its fields. A file does not
    import it: ``load`` of an agent with a subclass of your own needs the argument ``objective``.
    """

    def check_windows(self, steps: int) -> None:  # optional
        """Raise ValueError unless the objective can be trained on windows of this number of steps."""

    def check_accumulation(self, steps: int) -> None:  # optional
        """Raise ValueError unless the loss of a batch is the mean of its parts, weighted by real steps.

        Args:
            steps: number of micro-batches of each batch, ``gradient_accumulation_steps``.
        """

    def check_core(self, core: TransformerSpec, context: str) -> None:  # optional
        """Raise ValueError unless the objective supports a core and a `DecisionTransformer`'s ``context``."""
