"""Return-conditioned behavior cloning with a multilayer perceptron (RvS-R)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from rlxf.agents.common.arguments import reject_unknown_arguments
from rlxf.agents.common.precision import Precision
from rlxf.agents.mlp.acting import MLPAgent
from rlxf.agents.mlp.model import MLPConfig, MLPModel
from rlxf.agents.offline.agent import TargetReturnAgent
from rlxf.agents.offline.config import as_hidden_sizes
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.objectives import Objective
from rlxf.agents.offline.observations import ConditionedObservation, EncodedObservation
from rlxf.agents.offline.sb3_arguments import MLP_SB3_ARGUMENTS
from rlxf.agents.offline.trajectory_model import default_return_scale
from rlxf.data import Trajectories
from rlxf.data.dataset_source import Dataset
from rlxf.data.findings import differ_beyond_rounding
from rlxf.data.sampling import Sampling
from rlxf.training.json_rules import Rule, number


@dataclass(frozen=True, kw_only=True)
class ReturnConditionedMLPConfig(MLPConfig):
    """Arguments of `ReturnConditionedMLP` that its checkpoints hold.

    ``return_scale`` may be None until the dataset is known.
    """

    BOUNDS: ClassVar[dict[str, Rule]] = MLPConfig.BOUNDS | {"return_scale": number(above=0)}
    return_scale: float | None

    def settings_from_data(self, data: Trajectories) -> dict[str, Any]:
        """Return the scale of returns."""
        return {"return_scale": default_return_scale(data)} if self.return_scale is None else {}


class ReturnConditionedModel(MLPModel):
    """`MLPModel` with the scaled return-to-go ``R_t / scale`` as an additional input.

    Args:
        info: see `MLPModel`.
        normalization: see `MLPModel`.
        config: see `MLPModel`; with ``return_scale``.
    """

    condition_width = 1

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: ReturnConditionedMLPConfig):
        super().__init__(info, normalization, config)
        assert config.return_scale is not None
        self.return_scale = config.return_scale

    def condition(self, return_to_go: Tensor | None) -> list[Tensor]:
        """Return the scaled return-to-go, (B, 1)."""
        assert return_to_go is not None
        return [return_to_go[:, None] / self.return_scale]

    def check_episodes(self, data: Trajectories, episodes: NDArray[np.int64]) -> None:
        """Raise ValueError if all episodes have the same return."""
        check_returns_differ(data.returns[episodes])


class ReturnConditionedMLP(MLPAgent, TargetReturnAgent):
    """Return-conditioned behavior cloning with a multilayer perceptron (RvS-R).

    It minimizes ``mean of error(action | the last K observations, R_t / scale)`` over all steps, where R_t is
    the return-to-go of the data. While acting, R_t is that of `rlxf.envs.ReturnToGo`: the target return minus
    the rewards so far. The interface is that of `rlxf.DecisionTransformer`, including target returns,
    callbacks, loggers, files and exact resumption.

    Source: Emmons et al. 2021, arXiv:2112.10751, sections 3 and 4.1. In the paper, the condition is R_t
    divided by the remaining steps of the time limit; here it is R_t, as in a Decision Transformer. The paper
    has batches of 16,384 steps and a learning rate of 1e-3.

    Args:
        dataset: a Minari id, a ``MinariDataset``, a sequence of these, or `Trajectories`.
        context_length: number of the last observations K that an action depends on. More than 1 helps if
            observations are partial; `predict` then has a state.
        hidden_sizes: widths of the hidden layers; the default is that of the paper.
        dropout: dropout probability of the hidden layers in training; the paper has 0 or 0.1.
        learning_rate: learning rate of AdamW; a number, or a schedule of the remaining progress, from 1 to 0.
        batch_size: steps in an update, over all processes under torchrun.
        weight_decay: weight decay of AdamW.
        warmup_updates: updates over which the learning rate rises from 0; None for a tenth of the updates
            of `learn`.
        max_grad_norm: maximum gradient norm; larger gradients are clipped.
        return_scale: divisor of returns in the model's input; None for the standard deviation of the
            return-to-go over all steps of the dataset.
        objective: None for `Imitation`; `MaximumEntropy` for a stochastic policy, also of Box actions.
        weight_averaging: see `DecisionTransformer`.
        validation_fraction: see `DecisionTransformer`.
        validation_seed: see `DecisionTransformer`.
        sampling: see `DecisionTransformer`.
        gradient_accumulation_steps: see `DecisionTransformer`.
        precision: see `DecisionTransformer`.
        cuda_graphs: see `DecisionTransformer`.
        env: environment wrapped in `ReturnToGo` for callbacks that need one; None for none.
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
            not exist, or all episodes to train on have the same return.
        TypeError: if a space is not supported, or for unknown arguments.

    Warns:
        UserWarning: if episodes end neither terminated nor truncated.
    """

    NAME = "ReturnConditionedMLP"
    config_class = ReturnConditionedMLPConfig
    return_scale: float | None

    @reject_unknown_arguments(MLP_SB3_ARGUMENTS)
    def __init__(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories | None,
        context_length: int = 1,
        hidden_sizes: Sequence[int] = (1024, 1024),
        dropout: float = 0.0,
        learning_rate: float | Schedule = 3e-4,
        batch_size: int = 256,
        weight_decay: float = 0.0,
        warmup_updates: int | None = 0,
        max_grad_norm: float = 1.0,
        return_scale: float | None = None,
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
        config = ReturnConditionedMLPConfig.of(locals())
        super().__init__(
            ReturnConditionedModel,
            dataset,
            config,
            env,
            download,
            trust,
            tensorboard_log,
            device,
            _init_setup_model,
        )

    @property
    def allows_equal_returns(self) -> bool:
        """False: such data are refused."""
        return False

    def _encode(self, observation: Any) -> tuple[EncodedObservation, Tensor | None]:
        encoded = ConditionedObservation.encode(observation, self.dataset_info, self.device)
        return encoded, encoded.return_to_go


def check_returns_differ(returns: NDArray[np.float32]) -> None:
    """Raise ValueError if returns (E,) are the same, so that an agent cannot be conditioned on them."""
    if not differ_beyond_rounding(returns):
        raise ValueError(
            f"all {len(returns)} episodes have the return {returns[0]:g}, so the data do not show what a "
            f"target return changes: train rlxf.BehaviorCloning (rlxf train bc) on them, which needs no "
            f"target return"
        )
