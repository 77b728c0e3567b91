"""Interface of an acting step as a function of tensors, and the encodings that steps share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.utils.dtypes import torch_dtype

PLAIN = "observation"
"""Name of an observation that is not a Dict."""


class ActingStep(nn.Module, ABC):
    """Deterministic acting step of E environments: observations and state in, actions and next state out.

    Args:
        agent: name of the agent, for the description.
        spaces: observation and action space of the agent.
        observations: example of the observations by name, (E, ...) each.
        state: state before the first step by name, with E rows each.
    """

    def __init__(
        self,
        agent: str,
        spaces: tuple[spaces.Space[Any], spaces.Space[Any]],
        observations: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ):
        super().__init__()
        self.agent, self.spaces = agent, spaces
        self.observations = dict(observations)
        self.state = {
            name: x.clone() for name, x in state.items()
        }  # torch.export merges inputs that share memory

    @abstractmethod
    def forward(
        self, observations: dict[str, Tensor], episode_start: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose the most likely actions.

        Args:
            observations: raw observations of the environments by name, (E, ...) each.
            episode_start: (E,) bool, which observations are the first of an episode.
            state: state after the previous step by name.

        Returns:
            Actions (E, ...) as the environments expect them, and the state after the step.
        """

    @property
    def envs(self) -> int:
        """Number of environments E."""
        return len(next(iter(self.observations.values())))

    @property
    def arguments(self) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Example arguments of `forward`, at the start of an episode."""
        return self.observations, torch.ones(self.envs, dtype=torch.bool), self.state

    def varied_observations(self, since_start: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return observations within their bounds, to compare an exported step with this one.

        Real numbers are those of the example with noise, and images are noise. Other integers do not vary.

        Args:
            since_start: number of steps since the start of the episode.
            generator: source of the noise.
        """
        parts = observation_parts(self.spaces[0])
        return {name: _varied(x, parts[name], generator) for name, x in self.observations.items()}

    @property
    def most_steps(self) -> int | None:
        """Largest number of steps of an episode; None if it is not limited."""
        return None

    def user_parts(self) -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
        """Return name -> (module, example arguments) of the parts that a user may have written."""
        return {}


class EnvironmentActions(nn.Module):
    """Conversion of actions to the action space: shape, bounds, and ``start`` of discrete spaces.

    Args:
        space: action space.
    """

    low: Tensor
    high: Tensor

    def __init__(self, space: spaces.Space[Any]):
        super().__init__()
        self.shape = tuple(space.shape or ())
        self.dtype = torch_dtype(space.dtype)
        self.is_box = isinstance(space, spaces.Box)
        self.rounds = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer)
        start = np.asarray(getattr(space, "start", 0)).astype(np.int64)  # torch adds no uint16 to int64
        low, high = (space.low, space.high) if isinstance(space, spaces.Box) else (start, start)
        self.register_buffer("low", torch.as_tensor(low), persistent=False)
        self.register_buffer("high", torch.as_tensor(high), persistent=False)

    def forward(self, actions: Tensor) -> Tensor:
        """Convert actions (E, ...)."""
        actions = actions.reshape(-1, *self.shape)
        if not self.is_box:
            return (actions + self.low).to(self.dtype)
        if self.low.is_floating_point():  # bounds in float64 are not rounded, which could exceed the space
            actions = actions.to(torch.promote_types(actions.dtype, self.low.dtype))
        actions = torch.minimum(torch.maximum(actions, self.low.to(actions)), self.high.to(actions))
        return (actions.round() if self.rounds else actions).to(self.dtype)


def copy_for_export(module: nn.Module) -> Any:
    """Return a copy of a module on the CPU in evaluation mode, whose parameters have no gradients.

    With gradients, each step of an exported program would keep the computations of all steps before it.

    Raises:
        ValueError: if the module cannot be copied; the message names the innermost part that cannot.
    """
    try:
        copied = _copy(module)
    except Exception as error:  # attributes of the user's own raise errors of many kinds
        raise ValueError(
            f"the agent cannot be exported, because an attribute of its {_part_without_copy(module)} cannot "
            f"be copied ({error}): remove it, or create its value in forward"
        ) from error
    return copied.cpu().eval().requires_grad_(False)


def _copy(module: nn.Module) -> Any:
    """Return a copy of a module; attributes that are results of operations are copied without gradient."""
    values = (value for part in module.modules() for value in vars(part).values())
    return deepcopy(module, {id(x): x.detach() for x in values if isinstance(x, Tensor) and not x.is_leaf})


def _part_without_copy(module: nn.Module) -> str:
    """Return name and class of the innermost part of a module that cannot be copied."""
    parts = list(module.named_modules())
    for name, part in reversed(parts):  # the parts of a module before the module itself
        try:
            _copy(part)
        except Exception:
            return f"{name} {type(part).__name__}".strip()
    raise AssertionError("all parts can be copied")


def zeros_of(space: spaces.Space[Any], envs: int) -> Tensor:
    """Return an example of the values of a space that is not nested, (E, ...), with its dtype."""
    value = np.zeros((envs, *(space.shape or ())), space.dtype) + np.asarray(getattr(space, "start", 0))
    return torch.as_tensor(value.astype(space.dtype))


def _varied(example: Tensor, space: spaces.Space[Any], generator: torch.Generator) -> Tensor:
    if example.dtype == torch.uint8:
        return torch.randint(256, example.shape, generator=generator, dtype=torch.uint8)
    if not example.is_floating_point() or not isinstance(space, spaces.Box):
        return example
    noisy = example + torch.randn(example.shape, generator=generator, dtype=example.dtype)
    return noisy.clamp(torch.as_tensor(space.low).to(example), torch.as_tensor(space.high).to(example))


def observation_parts(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]]:
    """Return the parts of an observation space by the names of their tensors.

    Raises:
        ValueError: if the space is nested deeper than a Dict, or a part has no numbers.
    """
    parts = {tensor_name(key): part for key, part in space.items()} if isinstance(space, spaces.Dict) else {}
    parts = parts or {PLAIN: space}
    for name, part in parts.items():
        if not isinstance(part, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise ValueError(
                f"{name} is a {part}, which cannot be exported: flatten the observations with "
                f"gymnasium.wrappers.FlattenObservation and train an agent on them"
            )
    return parts


def number_range(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return the lowest and the highest value of a discrete space, or of the dtype of a Box, as JSON.

    The bounds of a Box are not used, as environments may exceed them.

    Returns:
        "low" and "high": one number each, or, for MultiDiscrete, nested lists in the shape of the space.
    """
    if isinstance(space, spaces.MultiBinary) or space.dtype == np.bool_:
        return {"low": 0, "high": 1}
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        limits = (np.finfo if np.issubdtype(space.dtype, np.floating) else np.iinfo)(space.dtype)
        return {"low": np.asarray(limits.min).item(), "high": np.asarray(limits.max).item()}
    low = np.asarray(space.start, np.int64)
    sizes = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec, np.int64)
    return {"low": low.tolist(), "high": (low + sizes - 1).tolist()}


def tensor_name(key: str) -> str:
    """Return the name of the tensor of a part of a Dict observation."""
    return f"{PLAIN}.{key}"


def as_observation(observations: Mapping[str, Tensor]) -> Any:
    """Return tensors by name as an observation: one tensor, or a dict by the keys of the space."""
    if PLAIN in observations:
        return observations[PLAIN]
    return {name.removeprefix(f"{PLAIN}."): x for name, x in observations.items()}
