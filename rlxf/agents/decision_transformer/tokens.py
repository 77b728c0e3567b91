"""Three tokens for each step."""

import torch
from torch import Tensor, nn

from rlxf.agents.actions import BoxActions, ChoiceActions
from rlxf.agents.decision_transformer.steps import TOKENS, Steps
from rlxf.attention.dropout import Dropout


class StepTokens(nn.Module):
    r"""``LN(W_R R_t / scale + w(t)), LN(W_s s_t + w(t)), LN(W_a a_t + w(t))``, one step after the other.

    w is a learned vector for each time step. Steps beyond the last one that has a vector share that one.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3; the layer norm is the authors' code's.

    Args:
        features: numbers F of an observation's features.
        actions: how actions are read.
        width: features of a token C.
        return_scale: what returns are divided by.
        episode_length: time steps that have a vector of their own.
        dropout: probability of dropping a feature of a token in training.
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
        """(B, 3 W, C)."""
        return self.timed(self.contents(steps), steps.time_steps)

    def contents(self, steps: Steps) -> Tensor:
        """``W_R R_t / scale, W_s s_t, W_a a_t``: what each token says, without its time; (B, W, 3, C)."""
        returns = self.of_return(steps.return_to_go[..., None] / self.return_scale)
        states = self.of_state(steps.features)
        actions = self.of_action(self.actions(steps.actions))
        contents = torch.stack([returns, states, actions], dim=2)
        assert contents.shape[2] == TOKENS
        return contents

    def timed(self, contents: Tensor, time_steps: Tensor) -> Tensor:
        """Contents (B, W, 3, C) of steps at ``time_steps`` (B, W) -> tokens (B, 3 W, C)."""
        time = self.time(time_steps.clamp(max=self.time.num_embeddings - 1))
        tokens = contents + time[:, :, None]
        token: Tensor = self.dropout(self.norm(tokens.flatten(1, 2)))
        return token
