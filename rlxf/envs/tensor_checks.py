"""Checks of the tensors that an environment returns: device, dtype, shape, and values without host copies."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlxf.data.spaces import discrete_sizes, discrete_start, parts_by_key, tolerant_bounds
from rlxf.envs.batch_checks import is_whole_range
from rlxf.utils.dtypes import torch_dtype
from rlxf.utils.errors import FaultyEnvironmentError

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch does not compare."""
Leaf = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary


class TensorChecks:
    """Checks of the results of N environments whose arrays are tensors on one device.

    The layout of a tensor, its device, dtype and shape, is known on the host, so `check_observations` and
    `check_results` compare it in each step. `valid` tests the values on the device.

    Args:
        env: name of the environments, for messages.
        space: space of one observation: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these.
        num_envs: number of environments N.
        device: device of the tensors.
    """

    def __init__(self, env: str, space: spaces.Space[Any], num_envs: int, device: torch.device):
        self._env = env
        self._space = space
        self._num_envs = num_envs
        self.device = device
        self._limits = {name: _limits(leaf, device) for name, leaf in parts_by_key(space).items()}

    @property
    def only_boxes(self) -> bool:
        """Return whether no part of the observations is a choice, which a network would use as an index."""
        return all(isinstance(leaf, spaces.Box) for leaf in parts_by_key(self._space).values())

    def check_observations(self, name: str, observations: Any) -> None:
        """Raise unless observations (N, ...) have the device, dtype and shape of their space.

        A dtype is accepted if torch casts it to that of the space without a change of kind, such as float64
        to float32 or integers to floats.

        Raises:
            FaultyEnvironmentError: with the name of the array, its layout and the expected one.
        """
        for key, leaf in parts_by_key(self._space).items():
            if key is not None and not (isinstance(observations, dict) and key in observations):
                raise FaultyEnvironmentError(
                    f"{name} of {self._env} must be a dict with the entry {key!r}, "
                    f"got {_layout(observations)}"
                )
            x = observations if key is None else observations[key]
            full = name if key is None else f"{name} {key!r}"
            dtype = torch_dtype(leaf.dtype)
            accepted = isinstance(x, Tensor) and torch.can_cast(x.dtype, dtype)
            self._check(full, x, f"a {dtype}", leaf.shape or (), accepted)

    def check_results(self, rewards: Any, terminated: Any, truncated: Any) -> None:
        """Raise unless rewards are real numbers (N,), and flags bools or integers (N,), on the device.

        Raises:
            FaultyEnvironmentError: with the name of the array, its layout and the expected one.
        """
        self._check(
            "rewards", rewards, "a real", (), isinstance(rewards, Tensor) and not rewards.is_complex()
        )
        for name, flags in {"terminations": terminated, "truncations": truncated}.items():
            whole = isinstance(flags, Tensor) and not (flags.is_floating_point() or flags.is_complex())
            self._check(name, flags, "a bool", (), whole)

    def successes(self, successes: Any) -> Tensor:
        """Return ``infos["is_success"]``, which must be a tensor (N,) on the device."""
        self._check("infos['is_success']", successes, "a bool", (), isinstance(successes, Tensor))
        return successes

    def valid(self, observations: Any, rewards: Tensor) -> Tensor:
        """Return whether all numbers are finite and within the limits of their space, bool ()."""
        parts = [rewards.isfinite().all()] if rewards.is_floating_point() else []
        for key, limits in self._limits.items():
            x = observations if key is None else observations[key]
            if limits is not None:
                x = x.long() if x.dtype in UNSIGNED else x
                parts.append(((x >= limits[0]) & (x <= limits[1])).all())  # False for NaN
            elif x.is_floating_point():
                parts.append(x.isfinite().all())
        return torch.stack(parts).all() if parts else torch.ones((), dtype=torch.bool, device=self.device)

    def ignore_bounds(self) -> None:
        """Test only whether numbers are finite from now on."""
        self._limits = dict.fromkeys(self._limits)

    def _check(self, name: str, x: Any, kind: str, shape: tuple[int, ...], accepted: bool) -> None:
        if accepted and x.shape == (self._num_envs, *shape) and x.device == self.device:
            return
        raise FaultyEnvironmentError(
            f"{name} of {self._env} must be {kind} tensor of shape {(self._num_envs, *shape)} on "
            f"{self.device}, got {_layout(x)}; correct the environment, or wrap it"
        )


def _limits(space: Leaf, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the smallest and the largest valid values; None for a Box that contains all of its dtype."""
    if isinstance(space, spaces.Box):
        if is_whole_range(space):
            return None
        low, high = space.low, space.high
        if space.dtype.kind == "u":
            largest = np.uint64(np.iinfo(np.int64).max)
            low, high = (np.minimum(x.astype(np.uint64), largest).astype(np.int64) for x in (low, high))
        if space.dtype.kind == "f":
            extremes = torch.finfo(torch_dtype(space.dtype))
            bounds = (np.clip(x, extremes.min, extremes.max) for x in tolerant_bounds(space))
            low, high = (x.astype(space.dtype) for x in bounds)
    else:
        low = discrete_start(space)
        high = low + discrete_sizes(space).reshape(space.shape) - 1
    return torch.as_tensor(low, device=device), torch.as_tensor(high, device=device)


def _layout(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
    shape = getattr(x, "shape", None)
    return type(x).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
