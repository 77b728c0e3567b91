"""Attention weights and gate values of the last segments of a rollout."""

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
    """Segments of T steps of B environments with their memory of M steps, for inspection.

    Args:
        transformer: transformer that reads the segments.
        tokens: input tokens, (B, T, C).
        index: positions and episodes of the tokens, (B, T).
        state: memory before the segments.
    """

    transformer: Transformer
    tokens: Tensor
    index: Index
    state: State

    @classmethod
    def last(cls, policy: GTrXLPolicy, buffer: SegmentBuffer, environments: int) -> Self:
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
    def openness(self) -> dict[str, Tensor]:
        """Update gate z of each GRU gate, (B, T, C), by the name of its module."""
        return gate_openness(self.transformer, self.tokens, self.index, self.state)

    @cached_property
    def relation(self) -> Relation:
        """Attention mask and distances between the T queries and the M + T keys."""
        return self.transformer.relation(self.index, self.state.index.concatenate(self.index))
