"""Base class of callbacks that run every few rollouts, and the segments they look at."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from stable_baselines3.common.callbacks import BaseCallback
from torch import Tensor

from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.ppo import GTrXLPPO
from rlxf.agents.gtrxl.rollout_buffer import SegmentBuffer
from rlxf.attention import State, TokenIndex, Transformer
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.inspection import attention_weights, gate_activations


class RolloutCallback(BaseCallback):
    """Callback that calls `record` at the first rollout of training, at every N-th after it and at the
    last.

    `record` is called at the end of a rollout, before its update.

    Args:
        every: rollouts N between two calls.

    Raises:
        ValueError: if ``every`` is less than 1.
        TypeError: before training starts, if the agent is not a `GTrXLPPO`.
    """

    model: GTrXLPPO

    def __init__(self, every: int):
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        super().__init__()
        self.every = every

    def _init_callback(self) -> None:
        if not isinstance(self.model, GTrXLPPO):
            raise TypeError(f"{type(self).__name__} needs a GTrXLPPO agent, got {type(self.model).__name__}")

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        last = self.num_timesteps >= self.model._total_timesteps
        if last or self.model.iterations % self.every == 0:
            self.record()

    @abstractmethod
    def record(self) -> None:
        """Record the diagnostics."""


@dataclass(frozen=True, eq=False)
class SegmentInspection:
    """Segments of T steps of B environments with their memory of M steps, for inspection.

    Args:
        transformer: transformer that reads the segments.
        tokens: input tokens, (B, T, C).
        index: positions and episodes of the tokens, (B, T).
        state: memory before the segments.
    """

    transformer: Transformer
    tokens: Tensor
    index: TokenIndex
    state: State

    @classmethod
    def from_buffer(cls, policy: GTrXLPolicy, buffer: SegmentBuffer, environments: int) -> Self:
        """Return the last segments of the first ``environments`` environments of a rollout."""
        per_environment = buffer.n_steps // buffer.segment_length
        first = torch.arange(min(environments, buffer.n_envs), device=buffer.hidden.device)
        batch = buffer.segments((first + 1) * per_environment - 1, buffer.advantages)
        with torch.no_grad():
            tokens = policy.tokens(batch.obs, batch.previous).unflatten(0, tuple(batch.index.shape))
        return cls(policy.transformer, tokens, batch.index, batch.state)

    @property
    def weights(self) -> list[Tensor]:
        """Attention weights of each layer, (B, H, T, M + T)."""
        return attention_weights(self.transformer, self.tokens, self.index, self.state)

    @property
    def gate_activations(self) -> dict[str, Tensor]:
        """Update gate z of each GRU gate, (B, T, C), by the name of its module."""
        return gate_activations(self.transformer, self.tokens, self.index, self.state)

    @cached_property
    def relation(self) -> AttentionMask:
        """Attention mask and distances between the T queries and the M + T keys."""
        return self.transformer.attention_mask(self.index, self.state.index.concatenate(self.index))
