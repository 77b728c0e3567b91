"""Behavior cloning: imitation of all episodes of the data, or of those with the highest returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rlxf.agents.common.arguments import reject_unknown_arguments
from rlxf.agents.common.precision import Precision
from rlxf.agents.mlp.acting import MLPAgent
from rlxf.agents.mlp.model import MLPConfig, MLPModel
from rlxf.agents.offline.config import as_hidden_sizes
from rlxf.agents.offline.objectives import Objective
from rlxf.agents.offline.observations import EncodedObservation
from rlxf.agents.offline.sb3_arguments import MLP_SB3_ARGUMENTS
from rlxf.data import Trajectories, Windows
from rlxf.data.dataset_source import Dataset
from rlxf.data.findings import differ_beyond_rounding
from rlxf.data.sampling import Sampling
from rlxf.training.json_rules import Rule, number
from rlxf.utils.warnings import warn_user

MIN_EPISODES = 10
"""Smallest number of episodes of which a fraction can be chosen."""


@dataclass(frozen=True, kw_only=True)
class BehaviorCloningConfig(MLPConfig):
    """Arguments of `BehaviorCloning` that its checkpoints hold."""

    BOUNDS: ClassVar[dict[str, Rule]] = MLPConfig.BOUNDS | {"best": number(most=1, above=0)}
    best: float


class BehaviorCloning(MLPAgent):
    """Behavior cloning: a multilayer perceptron that imitates the actions of the data.

    It minimizes ``mean of error(action | the last K observations)`` over the steps of all episodes, or of the
    fraction ``best`` with the highest returns. Steps are drawn with equal probability. The agent acts without
    a target return, in environments that are not wrapped in `rlxf.envs.ReturnToGo`. Otherwise its interface
    is that of `rlxf.DecisionTransformer`, including callbacks, loggers, files and exact resumption.

    Observations are normalized with the mean and standard deviation over all episodes, whatever ``best`` is:
    a feature that hardly varies in a few good episodes would otherwise be magnified while acting.

    Source: Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation"; the
    fraction of the best episodes, as %BC: Chen et al. 2021, arXiv:2106.01345, section 5. Sizes and learning
    rate are those of CORL (Tarasov et al. 2022, arXiv:2210.07105).

    Args:
        dataset: a Minari id, a ``MinariDataset``, a sequence of these, or `Trajectories`.
        best: fraction of the episodes to imitate, above 0 and at most 1: ``floor(best E)`` of E episodes, at
            least one, those with the highest returns. A fraction below 1 needs at least ten episodes.
        context_length: number of the last observations K that an action depends on. More than 1 helps if
            observations are partial; `predict` then has a state.
        hidden_sizes: widths of the hidden layers; () for a linear policy.
        dropout: dropout probability of the hidden layers in training.
        learning_rate: learning rate of AdamW; a number, or a schedule of the remaining progress, from 1 to 0.
        batch_size: steps in an update, over all processes under torchrun.
        weight_decay: weight decay of AdamW.
        warmup_updates: updates over which the learning rate rises from 0; None for a tenth of the updates
            of `learn`.
        max_grad_norm: maximum gradient norm; larger gradients are clipped.
        objective: None for `Imitation`; `MaximumEntropy` for a stochastic policy, also of Box actions.
        weight_averaging: see `DecisionTransformer`.
        validation_fraction: see `DecisionTransformer`.
        validation_seed: see `DecisionTransformer`.
        sampling: see `DecisionTransformer`.
        gradient_accumulation_steps: see `DecisionTransformer`.
        precision: see `DecisionTransformer`.
        cuda_graphs: see `DecisionTransformer`.
        env: environment for callbacks that need one; None for none.
        download: True to download a dataset that is not on this machine.
        trust: use the full description of the environment in the dataset or the file of `load`: entry point,
            arguments and wrappers, which can run code. Not saved.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        verbose: 0 silent, 1 information, 2 debug messages.
        seed: seed of weights, batches and dropout; None for a random one. This seeds torch's global
            generator, which dropout and samples use, as in SB3: to repeat results, train an agent before the
            next one is built.
        device: "auto", "cpu" or "cuda".

    Raises:
        DatasetError: if the dataset is unknown, empty, damaged, or contains a NaN.
        ValueError: if a setting is out of range (the message names it and an allowed value), the device does
            not exist, ``best`` is below 1 and there are fewer than ten episodes, or all episodes have the
            same return and the sampling needs returns.
        TypeError: if a space is not supported, or for unknown arguments.

    Warns:
        UserWarning: if ``best`` is below 1 and all episodes have the same return.
    """

    NAME = "BehaviorCloning"
    config_class = BehaviorCloningConfig
    best: float

    @reject_unknown_arguments(MLP_SB3_ARGUMENTS)
    def __init__(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories | None,
        best: float = 1.0,
        context_length: int = 1,
        hidden_sizes: Sequence[int] = (256, 256),
        dropout: float = 0.0,
        learning_rate: float | Schedule = 3e-4,
        batch_size: int = 256,
        weight_decay: float = 0.0,
        warmup_updates: int | None = 0,
        max_grad_norm: float = 1.0,
        objective: Objective | None = None,
        weight_averaging: float | None = None,
        validation_fraction: float | None = None,
        validation_seed: int = 0,
        sampling: Sampling | None = None,
        gradient_accumulation_steps: int = 1,
        precision: Precision = "float32",
        cuda_graphs: bool = True,
        env: VecEnv | None = None,
        download: bool = False,
        trust: bool = False,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        hidden_sizes = as_hidden_sizes("hidden_sizes", hidden_sizes)
        config = BehaviorCloningConfig.of(locals())
        super().__init__(
            MLPModel, dataset, config, env, download, trust, tensorboard_log, device, _init_setup_model
        )

    def _warn_of_data(self, trajectories: Trajectories) -> None:
        super()._warn_of_data(trajectories)
        warn_of_equal_returns(trajectories, self.best)

    def windows(self, trajectories: Trajectories) -> Windows:
        """Return the windows that end at the steps of the chosen episodes, with K observations each.

        Raises:
            ValueError: if ``best`` is below 1 and there are fewer than ten episodes.
        """
        windows = super().windows(trajectories)
        if self.best == 1:
            return windows
        check_fraction(trajectories, self.best)
        return windows.of_episodes(trajectories.best_episodes(self.best))

    def _encode(self, observation: Any) -> tuple[EncodedObservation, Tensor | None]:
        return EncodedObservation.encode(observation, self.dataset_info, self.device), None


def warn_of_equal_returns(data: Trajectories, best: float) -> None:
    """Warn if a fraction of the episodes below 1 is requested of episodes with the same return."""
    if best < 1 and not differ_beyond_rounding(data.returns):
        warn_user(
            f"best={best:g} has no meaning: all {data.episodes} episodes have the return "
            f"{data.returns[0]:g}; the first ones are chosen"
        )


def check_fraction(data: Trajectories, best: float) -> None:
    """Raise ValueError if a fraction of the episodes below 1 is requested of fewer than ten episodes."""
    if best < 1 and data.episodes < MIN_EPISODES:
        raise ValueError(
            f"best={best:g} chooses the episodes with the highest returns, which needs at least "
            f"{MIN_EPISODES} episodes, got {data.episodes}: use best=1, or more data"
        )
