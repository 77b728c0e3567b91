"""Windows to train on, held-out episodes, and the loss on them, which needs no environment."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from rlxf.agents.common.checkpoint import CheckpointedAlgorithm
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.model import OfflineModel
from rlxf.data import Sampling, Trajectories, Windows
from rlxf.utils.matrix_products import float32_products
from rlxf.utils.rng import preserve_rng_state


class ValidatedAlgorithm(CheckpointedAlgorithm):
    """Part of `OfflineAlgorithm` that divides the data into windows to train on and held-out episodes."""

    policy: OfflineModel  # type: ignore[assignment]
    trajectories: Trajectories | None
    dataset_info: DatasetInfo
    batch_size: int
    validation_fraction: float | None
    validation_seed: int
    sampling: Sampling

    def windows(self, trajectories: Trajectories) -> Windows:
        """Return the windows of trajectories that the model is trained on."""
        return self.policy.windows(trajectories)

    def _data(self) -> Trajectories:
        if self.trajectories is None:
            raise ValueError("the agent was loaded without data: use load(path, dataset=...) to train it")
        return self.trajectories

    def _training_info(self) -> DatasetInfo:
        """Return the information about the current dataset, with the spaces for which the agent was made."""
        current = self.dataset_info
        new = current if self.trajectories is None else DatasetInfo.of(self.trajectories)
        return replace(new, observation_space=current.observation_space, action_space=current.action_space)

    def _training_windows(self, windows: Windows) -> Windows:
        """Return windows without held-out episodes, drawn with the probabilities of ``sampling``.

        Raises:
            ValueError: if the episodes are too few to hold some out, or do not suit model or ``sampling``.
        """
        if self.validation_fraction is not None:
            windows, _ = windows.split(self.validation_fraction, self.validation_seed)
        self.policy.check_episodes(windows.trajectories, windows.episodes)
        return windows.with_sampling(self.sampling)

    def validation_losses(self) -> dict[str, float]:
        """Measure the "loss" of the policy on the held-out episodes, without an environment.

        Each step of these episodes is predicted from the logged steps before it in its window (teacher
        forcing), without dropout. Windows are consecutive, so the context has 1 to K steps, as in training.
        Steps count once, except that a core with memory predicts the steps before the last window of an
        episode twice if that window is shorter than K.
        The loss is the mean error of the action head: squared error, cross-entropy or negative
        log-likelihood. If the model predicts the return, the error of the return is added, and both are
        returned, too. Equal weights have equal losses. Random states are not changed.

        Raises:
            ValueError: if the agent has no ``validation_fraction``, or was loaded without a dataset.
        """
        if self.validation_fraction is None:
            raise ValueError(
                "there are no held-out episodes: build the agent with validation_fraction, e.g. 0.1, or load "
                "it with validation_fraction=0.1 before training"
            )
        windows = self.policy.needed_columns(self.windows(self._data()))
        _, windows = windows.split(self.validation_fraction, self.validation_seed)
        batches = (batch.to(self.device) for batch in self._validation_batches(windows))
        with preserve_rng_state():
            torch.manual_seed(self.validation_seed)
            return mean_validation_losses(self.policy.eval(), batches)

    def _validation_batches(self, windows: Windows) -> Iterator[Any]:
        """Yield batches that contain each step of these windows once."""
        yield from windows.iterate_once(self.batch_size)


@torch.no_grad()
def mean_validation_losses(model: OfflineModel, batches: Iterable[Any]) -> dict[str, float]:
    """Return the `OfflineModel.validation_losses` over all batches, in which each step counts the same.

    Args:
        model: model in evaluation mode.
        batches: batches on the device of the model.

    Raises:
        ValueError: if no step has a loss.
    """
    sums: dict[str, float] = defaultdict(float)
    count = 0
    for batch in batches:
        steps = int(model.loss_count(batch))
        count += steps
        with float32_products(model.product_size(batch), next(model.parameters()).device):
            losses = model.validation_losses(batch)
        for name, loss in losses.items():
            sums[name] += steps * loss.item()
    if count == 0:
        raise ValueError(
            "no token of the held-out episodes is predicted, so there is no validation loss: hold out more "
            "episodes, with a larger validation_fraction, or choose another validation_seed"
        )
    return {name: value / count for name, value in sums.items()}
