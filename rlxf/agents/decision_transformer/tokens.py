"""Embedding of steps as three tokens each."""

import torch
from torch import Tensor, nn

from rlxf.agents.actions import BoxActions, ChoiceActions
from rlxf.agents.decision_transformer.steps import TOKENS, Steps
from rlxf.attention.dropout import Dropout


class StepTokens(nn.Module):
    r"""Tokens ``LN(W_R R_t / scale + w(t)), LN(W_s s_t + w(t)), LN(W_a a_t + w(t))`` of consecutive steps.

    w(t) is the learned embedding of time step t. Time steps beyond the last embedding share the last one.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3; layer normalization as in the authors' code.

    Args:
        features: number of features F of an observation.
        actions: conversion of actions to network inputs.
        width: number of features C of a token.
        return_scale: divisor of returns.
        episode_length: number of time steps with an embedding.
        dropout: dropout probability of token features in training.
    """

    def __init__(
        self,
        features: int,
        actions: BoxActions | ChoiceActions,
        width: int,
        return_scale: float,
        episode_length: int,
        dropout: float,
    ):
        super().__init__()
        self.return_scale = return_scale
        self.actions = actions
        self.time = nn.Embedding(episode_length, width)
        self.of_return = nn.Linear(1, width)
        self.of_state = nn.Linear(features, width)
        self.of_action = nn.Linear(actions.width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, steps: Steps) -> Tensor:
        """Embed steps (B, W) as tokens (B, 3 W, C)."""
        return self.timed(self.contents(steps), steps.time_steps)

    def contents(self, steps: Steps) -> Tensor:
        """Compute ``W_R R_t / scale, W_s s_t, W_a a_t``, the embeddings without time, (B, W, 3, C)."""
        returns = self.of_return(steps.return_to_go[..., None] / self.return_scale)
        states = self.of_state(steps.features)
        actions = self.of_action(self.actions(steps.actions))
        contents = torch.stack([returns, states, actions], dim=2)
        assert contents.shape[2] == TOKENS
        return contents

    def timed(self, contents: Tensor, time_steps: Tensor) -> Tensor:
        """Add time-step embeddings to contents (B, W, 3, C), then normalize and flatten: (B, 3 W, C)."""
        time = self.time(time_steps.clamp(max=self.time.num_embeddings - 1))
        tokens = contents + time[:, :, None]
        token: Tensor = self.dropout(self.norm(tokens.flatten(1, 2)))
        return token
