"""Features extractor of Dict observations, and the built-in extractors."""

from typing import Any

from gymnasium import spaces
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from torch import Tensor, nn


class DictExtractor(CombinedExtractor):
    """SB3's `CombinedExtractor`, also for keys that are not allowed as names of modules.

    Args:
        observation_space: space whose keys are any text.
        options: arguments of `CombinedExtractor`.

    Raises:
        ValueError: if two keys would give modules of the same name, e.g. "a.b" and "a%2Eb".
    """

    def __init__(self, observation_space: spaces.Dict, **options: Any):
        names = {key: _module_name(key) for key in observation_space}
        if len(set(names.values())) < len(names):
            raise ValueError(f"the keys {list(names)} of the observation space are too similar: rename some")
        parts = [(names[key], part) for key, part in observation_space.items()]  # a list keeps the order
        super().__init__(spaces.Dict(parts), **options)
        self._names = names

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Return the concatenated features (N, F) of all parts."""
        return super().forward({name: observations[key] for key, name in self._names.items()})


def _module_name(key: str) -> str:
    """Return a name of a submodule for a key: the key, unless torch refuses it, as "a.b" or "values"."""
    name = key.replace(".", "%2E")
    return f"%{name}" if not name or hasattr(nn.ModuleDict(), name) else name


BUILT_IN_EXTRACTORS = (FlattenExtractor, NatureCNN, CombinedExtractor, DictExtractor)
"""Extractors of Stable-Baselines3 and of this package, whose outputs need no check."""
