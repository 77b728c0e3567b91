"""Masked pre-training of transformers on trajectories: model and algorithm."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from rlxf.agents.common.arguments import reject_unknown_arguments
from rlxf.agents.common.losses import masked_mean, squared_error
from rlxf.agents.common.precision import Precision
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.offline.config import Converter
from rlxf.agents.offline.context_window import TOKENS_PER_STEP, ContextWindow
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.heads import Head
from rlxf.agents.offline.objectives import Imitation
from rlxf.agents.offline.sb3_arguments import OFFLINE_SB3_ARGUMENTS
from rlxf.agents.offline.trajectory_algorithm import TrajectoryAlgorithm
from rlxf.agents.offline.trajectory_model import INITIAL_STD, TrajectoryConfig, TrajectoryModel
from rlxf.agents.token_masking import KINDS, MaskedWindows, Masking
from rlxf.attention import TransformerSpec
from rlxf.attention.depth.base import ExitOutputs
from rlxf.data import Trajectories, WindowBatch, Windows
from rlxf.data.dataset_source import Dataset
from rlxf.data.sampling import Sampling
from rlxf.training.distributed import process_group
from rlxf.training.json_rules import Rule, number


class MaskedModel(TrajectoryModel):
    r"""Masked model with the loss ``mean over the chosen tokens of error(W_kind y)``.

    The error is the squared error, for discrete actions the cross-entropy. Targets are the scaled returns
    ``R / scale``, the normalized observations (images pixel by pixel) and the actions as in `Imitation`.
    Kinds that are not among ``config.predicted_tokens`` have no head. Each kind of token has a learned mask
    embedding, since a transformer without positions could not distinguish the kinds. If the core has early
    exits, the error is the weighted sum over the outputs of all layers. Exit prediction is not trained here,
    but with the agent.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1, for words.

    Args:
        info: spaces of observations and actions.
        normalization: normalization layer of observations.
        config: arguments of the pre-training; its core is that of `pretraining_core`.
    """

    return_head: nn.Linear
    state_head: nn.Linear
    action_head: Head

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: "PretrainingConfig"):
        super().__init__(info, normalization, config)
        self.predicted_tokens = config.predicted_tokens
        width = config.core.width
        self.mask_embeddings = nn.Parameter(torch.randn(TOKENS_PER_STEP, width) * INITIAL_STD)
        if "return" in self.predicted_tokens:
            self.return_head = nn.Linear(width, 1)
        if "state" in self.predicted_tokens:
            self.state_head = nn.Linear(width, math.prod(info.encoder.shape))
        if "action" in self.predicted_tokens:
            self.action_head = Imitation().build(width, self.tokens.actions, self.features.width).head
        self.init_weights(*(getattr(self, f"{kind}_head") for kind in self.predicted_tokens))

    def losses(self, batch: MaskedWindows) -> dict[str, Tensor]:
        """Return the "loss" and the error of each predicted kind, means over the chosen tokens."""
        return self.add_penalty(self._mean_errors(batch))

    def validation_losses(self, batch: MaskedWindows) -> dict[str, Tensor]:
        """Return the "loss" without penalties, over the chosen tokens of B windows."""
        return {"loss": self._mean_errors(batch)["loss"]}

    def _mean_errors(self, batch: MaskedWindows) -> dict[str, Tensor]:
        exits = self.exits(self.steps(batch.windows), batch.masking)
        outputs = exits.outputs.unflatten(2, (-1, TOKENS_PER_STEP))
        layers = zip(exits.loss_weights, outputs, strict=True)
        errors = torch.stack([weight * self._errors(y, batch.windows) for weight, y in layers]).sum(dim=0)
        by_kind = dict(zip(KINDS, batch.masking.chosen.unbind(-1), strict=True))
        chosen = torch.stack([by_kind[kind] for kind in self.predicted_tokens], dim=-1).to(errors.dtype)
        kinds = zip(self.predicted_tokens, errors.unbind(-1), chosen.unbind(-1), strict=True)
        parts = {f"{kind}_loss": masked_mean(error, weight) for kind, error, weight in kinds}
        return {"loss": masked_mean(errors, chosen)} | parts

    def product_size(self, batch: Any) -> int:
        """Return the multiply-adds of a product of the tokens of a batch of `MaskedWindows`."""
        return super().product_size(batch.windows)

    def loss_count(self, batch: MaskedWindows) -> Tensor:
        """Count the chosen tokens."""
        return batch.masking.chosen.sum()

    def outputs(self, steps: ContextWindow, masking: Masking | None = None) -> Tensor:
        """Return the outputs at all tokens, (B, 3 W, C); ``masking=None`` masks no token."""
        return self.exits(steps, masking).outputs[-1]

    def exits(self, steps: ContextWindow, masking: Masking | None) -> ExitOutputs:
        """Return the outputs at all tokens after each of N layers that permit an exit, (N, B, 3 W, C)."""
        contents = self.tokens.embed(steps)
        if masking is not None:
            contents = masking.hide(contents, self.mask_embeddings)
        inputs: dict[str, Any] = {
            "x": self.tokens.add_time_embedding(contents, steps.time_steps),
            "index": steps.index,
        }
        with self.mixed_precision():
            exits = self.transformer.exits(**inputs)
        self.check_outputs(exits.outputs[-1], inputs, slice(None))
        return exits

    def _errors(self, y: Tensor, windows: WindowBatch) -> Tensor:
        """Compute the errors (B, W, P) of the P predicted kinds of tokens for outputs y (B, W, 3, C)."""
        tokens = dict(zip(KINDS, y.unbind(2), strict=True))
        return torch.stack([self._error(kind, tokens[kind], windows) for kind in self.predicted_tokens], -1)

    def _error(self, kind: str, y: Tensor, windows: WindowBatch) -> Tensor:
        """Compute the errors (B, W) of the tokens of a kind for their outputs y (B, W, C)."""
        if kind == "action":
            return self.action_head.error(y, windows.actions)
        if kind == "state":
            states = self.features.normalization(windows.observations).flatten(2)
            return squared_error(self.state_head(y), states)
        return squared_error(self.return_head(y), windows.return_to_go[..., None] / self.tokens.return_scale)


def as_predicted_tokens(kinds: Any) -> tuple[str, ...]:
    """Return kinds of tokens as a tuple in the order of `KINDS`.

    Raises:
        TypeError: if they are not a sequence of strings.
        ValueError: if there is none, or one is unknown.
    """
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        raise TypeError(f"predicted_tokens must be a sequence of strings such as ('action',), got {kinds!r}")
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"predicted_tokens must be one or more of {', '.join(KINDS)}, got {kinds!r}")
    return tuple(kind for kind in KINDS if kind in kinds)


def _are_predicted_tokens(stored: Any) -> bool:
    return isinstance(stored, list) and bool(stored) and stored == [kind for kind in KINDS if kind in stored]


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(TrajectoryConfig):
    """Arguments of `MaskedPretraining` that its checkpoints hold."""

    BOUNDS: ClassVar[dict[str, Rule]] = TrajectoryConfig.BOUNDS | {
        "mask_probability": number(above=0, most=1),
        "predicted_tokens": Rule(
            f"a list of some of {', '.join(KINDS)}, in this order", _are_predicted_tokens
        ),
    }
    JSON: ClassVar[dict[str, tuple[Converter, Converter]]] = TrajectoryConfig.JSON | {
        "predicted_tokens": (list, tuple)
    }
    MODEL_SETTINGS: ClassVar[tuple[str, ...]] = (*TrajectoryConfig.MODEL_SETTINGS, "predicted_tokens")
    mask_probability: float
    predicted_tokens: tuple[str, ...]

    def check(self) -> None:
        """Check all numbers; errors as in `OfflineConfig`."""
        super().check()
        if self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"MaskedPretraining replaces tokens by those of other windows, so a batch cannot be divided, "
                f"got gradient_accumulation_steps={self.gradient_accumulation_steps}; use 1, and a smaller "
                f"batch_size to save memory"
            )


class MaskedPretraining(TrajectoryAlgorithm):
    """Masked pre-training (as in BERT) on trajectories of returns-to-go, observations and actions.

    The model predicts masked tokens, by default actions, from the other tokens, and cannot act. It is
    bidirectional, or causal if its core has a recurrence. ``agent.load_pretrained(pretraining)`` copies its
    weights to a `DecisionTransformer` or a `GTrXLPPO`. ``learn``, ``save``, ``load``, callbacks and loggers
    are those of `DecisionTransformer`.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.

    Args:
        dataset: a Minari id, a ``MinariDataset``, a sequence of these, or `Trajectories`.
        context_length: number of steps K in a window, three tokens each.
        mask_probability: probability that a token of the predicted kinds is chosen for prediction. Of the
            chosen tokens 80% are masked, 10% are replaced by a token of the same kind from a random step of
            the batch, and 10% stay unchanged.
        predicted_tokens: kinds of tokens that are masked and predicted: one or more of "return", "state" and
            "action". The default is actions alone: with the other two, Decision Transformers that started
            from these weights had lower returns than with random ones (docs/benchmarks).
        learning_rate: learning rate of AdamW; a number, or a schedule of the remaining progress, from 1 to 0.
        batch_size: number of windows in an update.
        weight_decay: weight decay of AdamW.
        warmup_updates: updates over which the learning rate rises from 0; None for a tenth of all updates.
        max_grad_norm: maximum gradient norm; larger gradients are clipped.
        return_scale: divisor of returns in the model's input; None for the standard deviation of the
            return-to-go over all steps of the dataset.
        episode_length: number of time steps with an embedding; None for the longest episode of the dataset.
        core: core of the agent that receives the weights; None for `decision_transformer`. Pre-training uses
            a version of it without memory, which is bidirectional unless it has a recurrence.
        weight_averaging: see `DecisionTransformer`.
        validation_fraction: see `DecisionTransformer`.
        validation_seed: see `DecisionTransformer`.
        sampling: see `DecisionTransformer`.
        gradient_accumulation_steps: 1. The masks of a batch contain tokens of other windows of the batch, so
            it cannot be divided.
        precision: see `DecisionTransformer`.
        cuda_graphs: see `DecisionTransformer`.
        download: True to download a dataset that is not on this machine.
        tensorboard_log: folder of the TensorBoard log; None for no log.
        verbose: 0 silent, 1 information, 2 debug messages.
        seed: seed of weights, windows, masks and dropout; None for a random one. This seeds torch's
            global generator, which dropout uses, as in SB3: to repeat results, train an agent before the next
            one is built.
        device: "auto", "cpu" or "cuda".

    Raises:
        DatasetError: if the dataset is unknown, empty, damaged, or contains a NaN.
        ValueError: if a setting is out of range, a kind of token is unknown, or the core does not support
            bidirectional attention.
        TypeError: if a space is not supported, or ``predicted_tokens`` is not a sequence.
    """

    NAME = "MaskedPretraining"
    config_class = PretrainingConfig
    mask_probability: float
    predicted_tokens: tuple[str, ...]
    policy: MaskedModel

    @reject_unknown_arguments(OFFLINE_SB3_ARGUMENTS)
    def __init__(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories | None,
        context_length: int = 20,
        mask_probability: float = 0.15,
        predicted_tokens: Sequence[str] = ("action",),
        learning_rate: float | Schedule = 1e-4,
        batch_size: int = 64,
        weight_decay: float = 1e-4,
        warmup_updates: int | None = None,
        max_grad_norm: float = 0.25,
        return_scale: float | None = None,
        episode_length: int | None = None,
        core: TransformerSpec | None = None,
        weight_averaging: float | None = None,
        validation_fraction: float | None = None,
        validation_seed: int = 0,
        sampling: Sampling | None = None,
        gradient_accumulation_steps: int = 1,
        precision: Precision = "float32",
        cuda_graphs: bool = True,
        download: bool = False,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        core = pretraining_core(decision_transformer() if core is None else core)
        predicted_tokens = as_predicted_tokens(predicted_tokens)
        process_group().check_single_process("MaskedPretraining")
        config = PretrainingConfig.of(locals())
        super().__init__(MaskedModel, dataset, config, download, tensorboard_log, device, _init_setup_model)

    def _batch(self, windows: Windows) -> MaskedWindows:
        batch = windows.sample(self.batch_size, self.generator)
        return self._mask(batch, self.generator).to(self.device)

    def _validation_batches(self, windows: Windows) -> Iterator[MaskedWindows]:
        """Yield the held-out windows with masks that depend on ``validation_seed`` only."""
        generator = torch.Generator().manual_seed(self.validation_seed)
        for batch in super()._validation_batches(windows):
            yield self._mask(batch, generator)

    def _mask(self, batch: WindowBatch, generator: torch.Generator) -> MaskedWindows:
        """Choose tokens of the predicted kinds in windows on the CPU."""
        masking = Masking.draw(batch.mask, self.mask_probability, generator)
        return MaskedWindows(batch, masking.only(self.predicted_tokens))

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError: the model predicts masked tokens and cannot act."""
        raise TypeError(
            "MaskedPretraining predicts masked tokens and cannot act: copy its weights to an agent, "
            "DecisionTransformer(...).load_pretrained(pretraining)"
        )


def pretraining_core(core: TransformerSpec) -> TransformerSpec:
    """Return the core for masked pre-training: bidirectional if it has no recurrence, and without memory.

    A core with a recurrence reads tokens in order and stays causal: it predicts masked tokens from the tokens
    before them.

    Raises:
        ValueError: if the core has cross-attention or a technique that requires causal attention.
    """
    if core.cross_attention:
        raise ValueError("pre-training has no encoder context: its core needs cross_attention=False")
    return replace(core, causal=core.has_recurrence, memory=None)
