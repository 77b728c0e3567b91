"""The end of a rollout, ready to be read once more and looked at."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.agents.gtrxl.rollout import SegmentBuffer
from rlxf.attention import Index, State, Transformer
from rlxf.attention.inspection import attention_weights, gate_openness
from rlxf.attention.relation import Relation


@dataclass(frozen=True, eq=False)
class Reading:
    """A segment of T steps of each of B environments, and the M steps remembered from before it.

    Args:
        transformer: what reads it.
        tokens: (B, T, C).
        index: where they stand, (B, T).
        state: what is remembered.
    """

    transformer: Transformer
    tokens: Tensor
    index: Index
    state: State

    @classmethod
    def last(cls, policy: GTrXLPolicy, buffer: SegmentBuffer, environments: int) -> Self:
        """The last segment of each of the first environments of a rollout."""
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
    def openness(self) -> dict[str, Tensor]:
        """z of each GRU gate, (B, T, C), by the name of its module."""
        return gate_openness(self.transformer, self.tokens, self.index, self.state)

    @cached_property
    def relation(self) -> Relation:
        """Which of the M + T steps each of the T may see, and from how far."""
        return self.transformer.relation(self.index, self.state.index.concatenate(self.index))
