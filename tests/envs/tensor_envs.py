"""Vector environments of tensors for tests."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import VectorWrapper

try:
    from gymnasium.wrappers.vector import ArrayConversion
except ImportError:  # Gymnasium 1.1, which also has no extra "array-api"
    ArrayConversion = None

needs_array_conversion = pytest.mark.skipif(ArrayConversion is None, reason="needs Gymnasium 1.2")


def as_tensors(values: Any) -> Any:
    """Convert arrays and dicts of them; an object array holds an observation, or None, in each row."""
    if isinstance(values, dict):
        return {key: as_tensors(value) for key, value in values.items()}
    if values.dtype != object:
        return torch.from_numpy(np.array(values))
    some = next(value for value in values if value is not None)
    rows = [some if value is None else value for value in values]
    if isinstance(some, dict):
        return {key: as_tensors(np.stack([row[key] for row in rows])) for key in some}
    return as_tensors(np.stack(rows))


class Tensors(VectorWrapper):
    """Vector environment of arrays that takes and gives tensors, with batches as ``final_obs``.

    Gymnasium's ``NumpyToTorch`` cannot convert the object array ``final_obs``.
    """

    device = torch.device("cpu")

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options:
            options = {"reset_mask": options["reset_mask"].numpy()}
        observations, _infos = self.env.reset(seed=seed, options=options)
        return as_tensors(observations), {}

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor)
        actions += 0  # an environment may change its arguments in place
        *results, infos = self.env.step(actions.numpy())
        final = {key: infos[key] for key in ("final_obs", "final_info", "is_success") if key in infos}
        return *map(as_tensors, results), as_tensors(final)


class Overwriting(Tensors):
    """Vector environment that writes the results of each step into the same tensors, as simulators do."""

    _kept: dict[str, torch.Tensor]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed=seed, options=options)
        if options:
            self._kept["rewards"].zero_()
        else:
            self._kept = {}
        return self._written("observations", observations), infos

    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        written = [
            self._written(name, value)
            for name, value in {
                "observations": observations,
                "rewards": rewards,
                "terminated": terminated,
                "truncated": truncated,
            }.items()
        ]
        return *written, infos

    def _written(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self._kept.setdefault(name, torch.zeros_like(value)).copy_(value)
