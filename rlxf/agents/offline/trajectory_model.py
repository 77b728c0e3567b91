"""Transformer over trajectories: settings, the tokens of steps, and the outputs."""

import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions, action_encoder
from rlxf.agents.common.checkpoint import state_memory, window_memory
from rlxf.agents.common.compiled_losses import check_transformer
from rlxf.agents.common.numerics import check_outputs
from rlxf.agents.common.weights import check_stored_parameters, core_error_context
from rlxf.agents.offline.config import Converter, OfflineConfig
from rlxf.agents.offline.context_window import TOKENS_PER_STEP, ContextWindow
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.model import ObservationFeatures, OfflineModel, feature_width
from rlxf.attention import Transformer, TransformerSpec
from rlxf.attention.dropout import Dropout
from rlxf.attention.positions.base import LayerPosition
from rlxf.attention.recurrent.base import RecurrentMixer
from rlxf.data import Trajectories, WindowBatch, Windows
from rlxf.data.findings import MANY_TIME_STEPS
from rlxf.training.json_rules import Rule, number, whole
from rlxf.utils.warnings import warn_user

INITIAL_STD = 0.02
"""Standard deviation of the initial weights, as in GPT-2."""


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig(OfflineConfig):
    """Arguments of an agent with a transformer over trajectories that its checkpoints hold.

    ``return_scale`` and ``episode_length`` may be None until the dataset is known.
    """

    BOUNDS: ClassVar[dict[str, Rule]] = OfflineConfig.BOUNDS | {
        "return_scale": number(above=0),
        "episode_length": whole(1),
    }
    JSON: ClassVar[dict[str, tuple[Converter, Converter]]] = OfflineConfig.JSON | {
        "core": (TransformerSpec.to_dict, TransformerSpec.from_dict)
    }
    TYPES: ClassVar[dict[str, tuple[type, ...]]] = {"core": (TransformerSpec,)}
    MODEL_SETTINGS: ClassVar[tuple[str, ...]] = ("episode_length",)
    return_scale: float | None
    episode_length: int | None
    core: TransformerSpec

    @property
    def layers(self) -> int:
        """Number of layers of the core with weights of their own."""
        return self.core.distinct_layers

    def inference_memory(self, info: DatasetInfo) -> dict[str, int]:
        """See `OfflineConfig`."""
        shape = info.encoder.shape
        steps = self.context_length + memory_steps(self.core)
        numbers = feature_width(shape) + action_encoder(info.action_space).width
        return {
            "acting with the core's memory": state_memory(self.core),
            "an observation": window_memory(1, math.prod(shape), 0),
            "the context of an episode": self.acting_windows * window_memory(steps, numbers, self.core.width),
        }

    @property
    def acting_windows(self) -> int:
        """Number of context windows that an acting step of one environment processes at once."""
        return 1

    def settings_from_data(self, data: Trajectories) -> dict[str, Any]:
        """Return the scale of returns, and the number of time-step embeddings.

        Warns:
            UserWarning: if the number of time-step embeddings is derived and large.
        """
        longest = int(data.lengths.max())
        if self.episode_length is None:
            _warn_of_embeddings(longest, self.core.width)
        derived = {
            "return_scale": default_return_scale(data),
            "episode_length": longest,
        }
        return {name: value for name, value in derived.items() if getattr(self, name) is None}

    @contextmanager
    def load_error_context(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Add the first difference of a passed core from the stored one; see `OfflineConfig`."""
        others = {name: value for name, value in changes.items() if name != "core"}
        with core_error_context(self.core, changes.get("core")), super().load_error_context(others):
            yield

    def _loggable_settings(self) -> dict[str, Any]:
        settings = {name: value for name, value in super()._loggable_settings().items() if name != "core"}
        return settings | vars(self.core.resolved())


def default_return_scale(data: Trajectories) -> float:
    """Return the population standard deviation of the return-to-go over all steps; 1 if it is 0."""
    return float(np.std(data.return_to_go, dtype=np.float64)) or 1.0


def _warn_of_embeddings(episode_length: int, width: int) -> None:
    """Warn if there are more than `MANY_TIME_STEPS` time-step embeddings of this width."""
    if episode_length > MANY_TIME_STEPS:
        warn_user(
            f"the longest episode has {episode_length:,} steps, so the embeddings of time steps have "
            f"{episode_length * width:,} parameters, and the optimizer twice as many numbers. With, for "
            f"example, episode_length={MANY_TIME_STEPS}, later steps share the last embedding"
        )


class StepTokens(nn.Module):
    r"""Tokens ``LN(W_R R_t / scale + w(t)), LN(W_s s_t + w(t)), LN(W_a a_t + w(t))`` of consecutive steps.

    w(t) is the learned embedding of time step t. Time steps beyond the last embedding share the last one.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3; layer normalization as in the authors' code.

    Args:
        features: number of features F of an observation.
        actions: conversion of actions to network inputs.
        config: arguments of the agent, with ``return_scale`` and ``episode_length``.
    """

    def __init__(self, features: int, actions: BoxActions | DiscreteActions, config: TrajectoryConfig):
        super().__init__()
        assert config.return_scale is not None
        assert config.episode_length is not None
        width = config.core.width
        self.return_scale = config.return_scale
        self.actions = actions
        self.time = nn.Embedding(config.episode_length, width)
        self.return_embedding = nn.Linear(1, width)
        self.state_embedding = nn.Linear(features, width)
        self.action_embedding = nn.Linear(actions.width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(config.core.dropout)

    def forward(self, steps: ContextWindow) -> Tensor:
        """Embed steps (B, W) as tokens (B, 3 W, C)."""
        return self.add_time_embedding(self.embed(steps), steps.time_steps)

    def embed(self, steps: ContextWindow) -> Tensor:
        """Compute ``W_R R_t / scale, W_s s_t, W_a a_t``, the embeddings without time, (B, W, 3, C)."""
        returns = self.return_embedding(steps.return_to_go[..., None] / self.return_scale)
        states = self.state_embedding(steps.features)
        actions = self.action_embedding(self.actions(steps.actions))
        return torch.stack([returns, states, actions], dim=2)

    def add_time_embedding(self, contents: Tensor, time_steps: Tensor) -> Tensor:
        """Add time-step embeddings to contents (B, W, 3, C), then normalize and flatten: (B, 3 W, C)."""
        time = self.time(time_steps.clamp(max=self.time.num_embeddings - 1))
        tokens = contents + time[:, :, None]
        token: Tensor = self.dropout(self.norm(tokens.flatten(1, 2)))
        return token


class TrajectoryModel(OfflineModel):
    """Base class of models ``steps -> tokens -> transformer``; subclasses add heads.

    Args:
        info: spaces of observations and actions.
        normalization: normalization layer of observations.
        config: arguments of the agent, with ``return_scale`` and ``episode_length``.

    Raises:
        ValueError: if a window has more tokens than the core has positions.
    """

    tokens_class: ClassVar[type[StepTokens]] = StepTokens
    """Class of the tokens of the steps."""

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: TrajectoryConfig):
        super().__init__()
        self.context_length = config.context_length
        self.burn_in_steps = memory_steps(config.core)
        check_window_positions(config.core, self.context_length + self.burn_in_steps)
        self.precision = config.precision
        self.features = ObservationFeatures(info.encoder.shape, normalization)
        self.tokens = self.tokens_class(self.features.width, action_encoder(info.action_space), config)
        self.transformer = config.core.build()

    def init_weights(self, *heads: nn.Module) -> None:
        """Initialize all modules except the image feature extractor and recurrent mixers as in GPT-2.

        Positions then set their initial scores.
        """
        for part in (self.tokens, self.transformer, *heads):
            init_gpt2_weights(part)
        scale_residual_projections(self.transformer)
        for module in self.transformer.modules():
            if isinstance(module, LayerPosition):
                module.init_scores()

    def windows(self, trajectories: Trajectories) -> Windows:
        """Return windows of K steps, with the preceding steps that fill the core's memory as burn-in."""
        return Windows(trajectories, self.context_length, burn_in=self.burn_in_steps)

    def steps(self, batch: WindowBatch) -> ContextWindow:
        """Convert a batch of windows to steps with observation features."""
        features = self.features(batch.observations)
        return ContextWindow(features, batch.actions, batch.return_to_go, batch.time_steps, batch.mask)

    def product_size(self, batch: WindowBatch) -> int:
        """Return the multiply-adds of a product of the tokens of a batch with a weight of the core."""
        width: int = self.transformer.spec.width
        return TOKENS_PER_STEP * batch.mask.numel() * width**2

    @abstractmethod
    def outputs(self, steps: ContextWindow) -> Tensor:
        """Return the transformer outputs that are the inputs of the heads."""

    @torch.no_grad()
    def check_data(self, data: Trajectories, device: torch.device) -> None:
        """Run a forward pass on a full window, so that an unsuitable core raises its ValueError early."""
        steps = self.eval().steps(self.windows(data).starting_at([0]).to(device))
        self.outputs(replace(steps, mask=torch.ones_like(steps.mask)))

    def check_processes(self, world_size: int) -> None:
        """Raise ValueError if the kernel of the core does not support this number of processes."""
        self.transformer.spec.kernel.check_processes(world_size)

    def check_stored_parameters(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError if tensors of a file would make a recurrent state overflow."""
        check_stored_parameters(self, tensors)

    def capture_settings(self) -> Hashable:
        """Return the precision and the scale of returns, which `load_pretrained` changes."""
        return super().capture_settings(), self.tokens.return_scale

    def check_capture(self) -> None:
        """Raise CompilationError if the branches of the core depend on values of tensors."""
        check_transformer(self.transformer)

    def after_update(self) -> None:
        """Update the state of techniques that depends on the weights."""
        self.transformer.after_update()

    def check_outputs(self, outputs: Tensor, inputs: Mapping[str, Any], output_slice: slice) -> None:
        """Raise NumericalError if outputs are not finite; the message names the layer and the cause.

        Args:
            outputs: outputs of the tokens ``output_slice``, (B, T, C).
            inputs: arguments of the transformer.
            output_slice: tokens with outputs.
        """
        episode = inputs["index"].episode[:, output_slice]
        after = partial(self.transformer.next_state, **inputs)
        check_outputs(self, outputs, episode, inputs["x"], None, lambda: after().recurrent)

    def add_penalty(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the transformer's penalty, such as that of adaptive spans, and its mean depth to the parts."""
        penalty = self.transformer.penalty()
        depth = self.transformer.mean_depth()
        if penalty is not None:
            parts = parts | {"loss": parts["loss"] + penalty, "penalty": penalty}
        return parts if depth is None else parts | {"mean_depth": depth}


def memory_steps(core: TransformerSpec) -> int:
    """Return the number of steps that fill the core's memory; 0 without memory."""
    return 0 if core.memory is None else -(-core.memory.capacity // TOKENS_PER_STEP)


def check_window_positions(core: TransformerSpec, steps: int) -> None:
    """Raise ValueError if a window of so many steps, burn-in included, has more tokens than positions.

    Positions that count from the start of a segment, as those of `RMT`, are not checked.
    """
    tokens, most = TOKENS_PER_STEP * steps, core.max_positions
    if most is not None and most < tokens and not core.counts_positions_by_segment:
        raise ValueError(
            f"a window has {steps} steps, including those that fill the memory, and so {tokens} tokens, but "
            f"{core.position} has only {most} positions; use max_length={tokens} or a relative position"
        )


@torch.no_grad()
def init_gpt2_weights(module: nn.Module) -> None:
    """Initialize linear and embedding weights from ``N(0, 0.02^2)`` and biases with 0.

    Recurrent mixers keep their initial weights, whose biases determine how long a state lasts.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    mixers = [part for part in module.modules() if isinstance(part, RecurrentMixer)]
    kept = {part for mixer in mixers for part in mixer.modules()}
    for part in module.modules():
        if part in kept:
            continue
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=INITIAL_STD)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def residual_projections(transformer: Transformer) -> Iterator[nn.Linear]:
    """Yield the output projections of the 2 L sublayers."""
    for name, part in transformer.named_modules():
        if name.endswith((".attention.out", ".feed_forward.outer")) and isinstance(part, nn.Linear):
            yield part


@torch.no_grad()
def scale_residual_projections(transformer: Transformer) -> None:
    """Scale the output projections of the 2 L sublayers by ``1 / sqrt(2 L)``; source: `init_gpt2_weights`."""
    for part in residual_projections(transformer):
        part.weight /= (2 * transformer.spec.layers) ** 0.5
