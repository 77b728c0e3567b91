"""Ensembles of networks that run as batched matrix products; features and actions of logged steps."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rlxf.agents.common.actions import action_encoder
from rlxf.data import Trajectories
from rlxf.data.encoders import MIN_IMAGE_SIZE, has_image_extractor

HIDDEN_LAYERS = 2
"""Number of hidden layers."""
PREDICTED_AT_ONCE = 8192
"""Largest number of steps in one forward pass of trained networks."""


class EnsembleLinear(nn.Module):
    """M independent linear layers ``y_m = x_m W_m + b_m``.

    Args:
        members: number of layers M.
        inputs: input features of each.
        outputs: output features of each.
        generator: source of the initial weights, uniform in ``+-1 / sqrt(inputs)`` as in torch.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, members: int, inputs: int, outputs: int, generator: torch.Generator):
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        for name, rows in (("weight", inputs), ("bias", 1)):
            values = (2 * torch.rand(members, rows, outputs, generator=generator) - 1) * bound
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x: Tensor) -> Tensor:
        """Map (M, B, inputs) to (M, B, outputs)."""
        return torch.baddbmm(self.bias, x, self.weight)


class EnsembleMLP(nn.Module):
    """M independent networks with two hidden layers, each ``relu(layer_norm(W x + b))``.

    Layer normalization bounds the outputs on inputs far from the data and thus prevents most divergence (Ball
    et al. 2023, arXiv:2302.02948, section 4.2). It has no parameters here.

    Args:
        members: number of networks M.
        inputs: input features.
        width: features of a hidden layer.
        outputs: output features.
        generator: source of the initial weights.
    """

    def __init__(self, members: int, inputs: int, width: int, outputs: int, generator: torch.Generator):
        super().__init__()
        sizes = [inputs, *[width] * HIDDEN_LAYERS]
        self.hidden = nn.ModuleList(EnsembleLinear(members, *pair, generator) for pair in pairwise(sizes))
        self.out = EnsembleLinear(members, width, outputs, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (M, B, inputs) to (M, B, outputs)."""
        for layer in self.hidden:
            y = layer(x)
            x = F.layer_norm(y, y.shape[-1:]).relu()
        outputs: Tensor = self.out(x)
        return outputs


class DiscreteQ(EnsembleMLP):
    """Q networks with an output for each Discrete action: ``Q(s, w) = sum_a w_a f_a(s)``.

    w is the one-hot vector of an action, or the probabilities of all actions for an expectation.

    Args:
        members: number of networks M.
        features: features of a state.
        actions: number of actions A.
        width: features of a hidden layer.
        generator: source of the initial weights.
    """

    def __init__(self, members: int, features: int, actions: int, width: int, generator: torch.Generator):
        super().__init__(members, features, width, actions, generator)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:  # type: ignore[override]
        """Compute values (M, B) of states (M, B, D) and actions (M, B, A)."""
        return (super().forward(states) * actions).sum(dim=-1)


class ContinuousQ(EnsembleMLP):
    """Q networks whose input is the state and the encoded action: ``Q(s, a) = f([s, a])``.

    Args:
        members: number of networks M.
        features: features of a state.
        actions: numbers A in an encoded action.
        width: features of a hidden layer.
        generator: source of the initial weights.
    """

    def __init__(self, members: int, features: int, actions: int, width: int, generator: torch.Generator):
        super().__init__(members, features + actions, width, 1, generator)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:  # type: ignore[override]
        """Compute values (M, B) of states (M, B, D) and actions (M, B, A)."""
        return super().forward(torch.cat([states, actions], dim=-1))[..., 0]


def q_class(space: spaces.Space) -> type[DiscreteQ | ContinuousQ]:
    """Return the class of Q networks for an action space."""
    return DiscreteQ if isinstance(space, spaces.Discrete) else ContinuousQ


def check_no_large_images(data: Trajectories) -> None:
    """Raise TypeError if observations are images of at least 36 x 36 pixels, which need a convolution."""
    shape = data.encoder.shape
    if has_image_extractor(shape):
        raise TypeError(
            f"off-policy evaluation needs vector observations, or images below {MIN_IMAGE_SIZE} x "
            f"{MIN_IMAGE_SIZE} pixels, got images {shape}: evaluate the agent in its environment instead"
        )


def padded_steps(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return M tensors of steps as one, (M, L), and the mask (M, L) of the places that are no padding."""
    lengths = torch.tensor([len(part) for part in parts])
    index = pad_sequence([*parts], batch_first=True)
    return index, torch.arange(index.shape[1]) < lengths[:, None]


class StepFeatures:
    """Network inputs of logged steps: normalized observations and, if given, the normalized return-to-go.

    The actions of a return-conditioned agent depend on its return-to-go, so its values do, too.

    Args:
        data: logged episodes.
        return_to_go: return-to-go of each step as the agent observes it, (N,), or None.
    """

    def __init__(self, data: Trajectories, return_to_go: NDArray[np.float64] | None = None):
        self._observations = data.observations
        self._normalize = data.normalization()
        self.width = math.prod(data.encoder.shape)
        self._condition: NDArray[np.float32] | None = None
        if return_to_go is not None:
            spread = return_to_go.std() or 1.0
            self._condition = ((return_to_go - return_to_go.mean()) / spread).astype(np.float32)
            self.width += 1

    def __call__(self, steps: NDArray[np.int64]) -> Tensor:
        """Return the inputs (..., D) of steps (...)."""
        rows = torch.from_numpy(self._observations.take(steps, axis=0))
        features: Tensor = self._normalize(rows).flatten(steps.ndim)
        if self._condition is None:
            return features
        return torch.cat([features, torch.from_numpy(self._condition[steps])[..., None]], dim=-1)


class StepActions:
    """Network inputs of the actions of N steps. Discrete choices are encoded when they are requested.

    Args:
        actions: int64 choices in the format of the data, (N,) or (N, n), or float32 inputs (N, A).
        space: action space.
    """

    def __init__(self, actions: Tensor, space: spaces.Space):
        self._actions = actions
        encoder = action_encoder(space)
        self._encode = nn.Identity() if actions.is_floating_point() else encoder
        self.width = encoder.width

    @classmethod
    def logged(cls, data: Trajectories) -> "StepActions":
        """Return the logged actions of a dataset."""
        encoder, actions = action_encoder(data.action_space), torch.from_numpy(np.array(data.actions))
        return cls(encoder.select(encoder, nn.Identity())(actions), data.action_space)

    def __call__(self, steps: Tensor) -> Tensor:
        """Return the inputs (..., A) of steps, int64 (...); one-hot for choices."""
        encoded: Tensor = self._encode(self._actions[steps])
        return encoded
