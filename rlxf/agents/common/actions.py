"""Encoding of actions for the model, and decoding of its outputs."""

from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.data.spaces import DiscreteSpace, discrete_sizes, discrete_start

Choice = TypeVar("Choice")
SAME_ACTION_TOLERANCE = 0.05
"""Largest difference between two numbers that count as the same action, scaled to [-1, 1]."""


class BoxActions(nn.Module):
    """Box actions scaled to [-1, 1]: ``u = (a - center) / radius``.

    Numbers without a lower or an upper bound, or with a range beyond float32, are not scaled: u = a.

    Args:
        space: action space.

    Raises:
        TypeError: if the space is boolean.
    """

    center: Tensor
    radius: Tensor
    bounded: Tensor

    def __init__(self, space: spaces.Box):
        super().__init__()
        if space.dtype == np.bool_:
            raise TypeError(f"Box actions must be numbers, got {space}; use MultiBinary({space.shape})")
        bounds = (torch.from_numpy(np.ravel(bound).astype(np.float64)) for bound in (space.low, space.high))
        low, high = bounds  # in float64: sums of bounds overflow in small integers and in float32
        center, span = ((low + high) / 2).float(), (high - low).float()
        bounded = center.isfinite() & span.isfinite() & (span > 0)
        self.register_buffer("bounded", bounded, persistent=False)
        self.register_buffer("center", torch.where(bounded, center, 0), persistent=False)
        self.register_buffer("radius", torch.where(bounded, span / 2, 1), persistent=False)
        self.width = len(low)

    def forward(self, actions: Tensor) -> Tensor:
        """Scale actions: (..., A) in units of the environment -> (..., A)."""
        return (actions - self.center) / self.radius

    def unscale(self, scaled: Tensor) -> Tensor:
        """Undo the scaling: (..., A) -> (..., A) in units of the environment."""
        return scaled * self.radius + self.center

    def same_action(self, one: Tensor, other: Tensor) -> Tensor:
        """Return whether two actions (..., A) count as the same, (...) bool. See `SAME_ACTION_TOLERANCE`."""
        return ((self(one) - self(other)).abs() <= SAME_ACTION_TOLERANCE).all(dim=-1)

    def holds(self, actions: Tensor) -> bool:
        """Return whether ``actions`` (N, ...) are valid actions in the format of the datasets."""
        fit = actions.dtype == torch.float32 and actions.shape[1:] == (self.width,)
        return fit and bool(actions.isfinite().all())

    def select(self, continuous: Choice, discrete: Choice) -> Choice:
        """Return ``continuous``."""
        return continuous


class DiscreteActions(nn.Module):
    """One-hot encoding of discrete actions, counted from 0; a bit of MultiBinary is a choice between two.

    Args:
        space: action space.
    """

    def __init__(self, space: DiscreteSpace):
        super().__init__()
        self.sizes: list[int] = discrete_sizes(space).tolist()
        self.single = isinstance(space, spaces.Discrete)
        self.width = sum(self.sizes)

    def forward(self, actions: Tensor) -> Tensor:
        """Encode actions: int64 (...) or (..., n) -> (..., sum of sizes)."""
        parts = zip(self.to_choices(actions).unbind(-1), self.sizes, strict=True)
        return torch.cat([F.one_hot(choice, size) for choice, size in parts], dim=-1).float()

    def to_choices(self, actions: Tensor) -> Tensor:
        """Add the axis of choices if the space lacks it: int64 (...) or (..., n) -> (..., n)."""
        return actions[..., None] if self.single else actions

    def from_choices(self, choices: Tensor) -> Tensor:
        """Undo `to_choices`: int64 (..., n) -> (...) for Discrete, else (..., n)."""
        return choices[..., 0] if self.single else choices

    def same_action(self, one: Tensor, other: Tensor) -> Tensor:
        """Return whether two actions are the same choices, (...) bool."""
        return (self.to_choices(one) == self.to_choices(other)).all(dim=-1)

    def holds(self, actions: Tensor) -> bool:
        """Return whether ``actions`` (N, ...) are valid actions in the format of the datasets."""
        shape = () if self.single else (len(self.sizes),)
        if actions.dtype != torch.int64 or actions.shape[1:] != shape:
            return False
        choices = self.to_choices(actions)
        return bool(((choices >= 0) & (choices < torch.tensor(self.sizes, device=choices.device))).all())

    def select(self, continuous: Choice, discrete: Choice) -> Choice:
        """Return ``discrete``."""
        return discrete


def action_encoder(space: spaces.Space[Any]) -> BoxActions | DiscreteActions:
    """Return the encoder for actions of the space.

    Raises:
        TypeError: if the space is not Box, Discrete, MultiDiscrete or MultiBinary, or is a boolean Box.
    """
    if isinstance(space, spaces.Box):
        return BoxActions(space)
    if isinstance(space, DiscreteSpace):
        return DiscreteActions(space)
    raise TypeError(f"actions must be Box, Discrete, MultiDiscrete or MultiBinary, got {space}")


def select_choices(logits: tuple[Tensor, ...], deterministic: bool) -> Tensor:
    """Sample each choice, or take the most likely one: logits, n tensors (E, A) -> int64 (E, n)."""
    if deterministic:
        return torch.stack([each.argmax(dim=-1) for each in logits], dim=-1)
    return torch.stack([torch.distributions.Categorical(logits=each).sample() for each in logits], dim=-1)


def check_discrete(space: spaces.Space[Any]) -> None:
    """Raise TypeError unless the action space is Discrete, which ``action_logits`` of an agent needs."""
    if not isinstance(space, spaces.Discrete):
        raise TypeError(f"action_logits needs Discrete actions, got {space}")


def to_environment(actions: Tensor, space: spaces.Space[Any]) -> NDArray[Any]:
    """Convert actions (E, ...) to the format of the environment.

    They get the shape and dtype of the space. Box actions are clipped to the bounds, and rounded if the space
    is integer. Discrete actions are shifted by the ``start`` of the space.
    """
    array = actions.cpu().numpy().reshape(-1, *(space.shape or ()))
    if not isinstance(space, spaces.Box):
        return (array + discrete_start(space)).astype(space.dtype)
    if space.dtype.kind == "f":
        return np.clip(array, space.low, space.high).astype(space.dtype)
    array = np.rint(array)
    with np.errstate(invalid="ignore"):  # numbers outside of the bounds are replaced
        inside = array.astype(space.dtype)
    return np.where(array <= space.low, space.low, np.where(array >= space.high, space.high, inside))
