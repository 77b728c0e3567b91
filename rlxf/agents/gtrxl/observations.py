"""Batches of observations as trees: an array or tensor, or the entries of Dict observations."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor


def map_obs(function: Callable[..., Any], obs: Any, *others: Any) -> Any:
    """Apply a function to observations, or to each entry of Dict observations."""
    if isinstance(obs, dict):
        return {key: function(x, *(other[key] for other in others)) for key, x in obs.items()}
    return function(obs, *others)


def obs_tensors(obs: PyTorchObs) -> list[Tensor]:
    """Return observations as a list of tensors, those of a dict in the order of its sorted keys."""
    return [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]


def batch_size(obs: PyTorchObs) -> int:
    """Return the number of observations."""
    return len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)


def named_obs(name: str, obs: Any) -> dict[str, Tensor]:
    """Return the tensor of observations by ``name``, or those of the entries by ``name[key]``."""
    if isinstance(obs, dict):
        return {f"{name}[{key}]": torch.as_tensor(part) for key, part in obs.items()}
    return {name: torch.as_tensor(obs)}


def obs_from_named(name: str, values: Mapping[str, Any]) -> Any:
    """Return the observations of `named_obs`."""
    if name in values:
        return values[name]
    start = f"{name}["
    return {key[len(start) : -1]: value for key, value in values.items() if key.startswith(start)}


def as_array(x: np.ndarray | Tensor) -> np.ndarray:
    """Return an array, or a tensor as an array; bfloat16, which NumPy lacks, becomes float32."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def as_step_input(x: Tensor) -> Tensor:
    """Return a contiguous tensor, real numbers as float32; a compiled step does not check its arguments.

    The network itself converts real numbers to float32.
    """
    return (x.float() if x.is_floating_point() else x).contiguous()


def normalized_space(space: spaces.Space[Any], normalizer: VecNormalize | None) -> spaces.Space[Any]:
    """Return the space of the observations that a ``VecNormalize`` returns; it keeps that of the environment.

    The Box spaces that it normalizes become float32.
    """
    if normalizer is None or not normalizer.norm_obs:
        return space
    if not isinstance(space, spaces.Dict):
        return spaces.Box(-np.inf, np.inf, space.shape, np.float32)
    keys = normalizer.norm_obs_keys or ()
    parts = {key: normalized_space(part, normalizer) if key in keys else part for key, part in space.items()}
    return spaces.Dict(parts)
