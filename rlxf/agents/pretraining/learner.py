"""Masked pre-training on trajectories, as an initialization of agents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from stable_baselines3.common.type_aliases import Schedule

from rlxf.agents.common.arguments import reject_unknown_arguments
from rlxf.agents.common.sb3_arguments import OFFLINE_SB3_ARGUMENTS
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.offline.algorithm import OfflineAlgorithm
from rlxf.agents.offline.config import OfflineConfig
from rlxf.agents.pretraining.model import MaskedModel, MaskedWindows, Masking
from rlxf.attention import TransformerSpec
from rlxf.data import Trajectories, Windows
from rlxf.data.dataset_source import Dataset
from rlxf.training.compat import Rule, number
from rlxf.training.distributed import process_group


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(OfflineConfig):
    """Arguments of `MaskedPretraining` that its checkpoints hold."""

    BOUNDS: ClassVar[dict[str, Rule]] = OfflineConfig.BOUNDS | {"mask_probability": number(0, 1)}
    mask_probability: float

    def check(self) -> None:
        """Check all numbers; errors as in `OfflineConfig`."""
        if not 0 < self.mask_probability <= 1:
            raise ValueError(
                f"mask_probability must be more than 0 and at most 1, got {self.mask_probability}"
            )
        super().check()


class MaskedPretraining(OfflineAlgorithm):
    """Masked pre-training (as in BERT) on the returns-to-go, observations and actions of trajectories.

    The model is bidirectional, so it cannot act. ``agent.load_pretrained(pretraining)`` copies its weights to
    a `DecisionTransformer` or a `GTrXLPPO`. ``learn``, ``save``, ``load``, callbacks and loggers are those of
    `DecisionTransformer`.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.

    Args:
        dataset: a Minari id, a ``MinariDataset``, a sequence of these, or `Trajectories`.
        context_length: number of steps K in a window, three tokens each.
        mask_probability: probability that a token is chosen for prediction. Of the chosen tokens 80% are
            masked, 10% are replaced by another token of the batch, and 10% stay unchanged.
        learning_rate: learning rate of AdamW; a number, or a schedule of the remaining progress, from 1 to 0.
        batch_size: number of windows in an update.
        weight_decay: weight decay of AdamW.
        warmup_updates: updates over which the learning rate rises from 0; None for a tenth of all updates.
        max_grad_norm: largest norm of the gradient.
        return_scale: divisor of returns in the model's input; None for the standard deviation of the
            return-to-go over all steps of the dataset.
        episode_length: number of time steps with an embedding; None for the longest episode of the dataset.
        core: core of the agent that receives the weights; None for `decision_transformer`. Pre-training uses
            a bidirectional version of it without memory.
        download: True to download a dataset that is not on this machine.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        verbose: 0 silent, 1 information, 2 debug messages.
        seed: seed of weights, windows, masks and dropout; None for a random one.
        device: "auto", "cpu" or "cuda".

    Raises:
        DatasetError: if the dataset is unknown, empty, damaged, or contains a NaN.
        ValueError: if a setting is out of range, or the core does not support bidirectional attention.
        TypeError: if a space is not supported.
    """

    NAME = "MaskedPretraining"
    config_class = PretrainingConfig
    mask_probability: float
    policy: MaskedModel

    @reject_unknown_arguments(OFFLINE_SB3_ARGUMENTS)
    def __init__(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories | None,
        context_length: int = 20,
        mask_probability: float = 0.15,
        learning_rate: float | Schedule = 1e-4,
        batch_size: int = 64,
        weight_decay: float = 1e-4,
        warmup_updates: int | None = None,
        max_grad_norm: float = 0.25,
        return_scale: float | None = None,
        episode_length: int | None = None,
        core: TransformerSpec | None = None,
        download: bool = False,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        core = bidirectional(decision_transformer() if core is None else core)
        process_group().check_single_process("MaskedPretraining")
        config = PretrainingConfig.of(locals())
        super().__init__(MaskedModel, dataset, config, download, tensorboard_log, device, _init_setup_model)

    def _batch(self, windows: Windows) -> MaskedWindows:
        batch = windows.sample(self.batch_size, self.generator)
        masking = Masking.draw(batch.mask, self.mask_probability, self.generator)
        return MaskedWindows(batch, masking).to(self.device)

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError: a bidirectional model cannot act."""
        raise TypeError(
            "MaskedPretraining is bidirectional and cannot act: copy its weights to an agent, "
            "DecisionTransformer(...).load_pretrained(pretraining)"
        )


def bidirectional(core: TransformerSpec) -> TransformerSpec:
    """Return a bidirectional version of an agent's core, without memory.

    Raises:
        ValueError: if the core has cross-attention or a technique that requires causal attention.
    """
    if core.cross_attention:
        raise ValueError("pre-training has no encoder context: its core needs cross_attention=False")
    return replace(core, causal=False, memory=None)
