"""Recent observations, kept to recompute memory with the current weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor
from torch.nn.functional import pad

from rlxf.attention import Index, State, TransformerSpec
from rlxf.attention.index import EMPTY

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy
    from rlxf.agents.gtrxl.rollout import SegmentBuffer


@dataclass(frozen=True, eq=False)
class Past:
    """Inputs of the last P steps of E environments, from which memory can be recomputed with new weights.

    The hidden states of a rollout depend on the weights that acted in it. With P = `steps_that_count`, `read`
    returns the same memory as a forward pass over the whole episode.

    Args:
        obs: observations (E, P, ...).
        previous: (E, P, A), the encoded previous actions.
        index: (E, P), positions and episodes of the steps; only filler rows are empty slots.
    """

    obs: PyTorchObs
    previous: Tensor
    index: Index

    @classmethod
    def before(cls, buffer: "SegmentBuffer") -> Self:
        """Return an empty past, P = 0, for the environments of a buffer."""
        return cls(_steps(buffer.obs, slice(0)), buffer.previous[:, :0], buffer.index.at(slice(0)))

    def followed_by(self, buffer: "SegmentBuffer", most: int) -> "Past":
        """Append the steps of a rollout, and return the last ``most`` steps."""
        rollout, last = slice(buffer.step), slice(-most, None)
        obs = _joined(self.obs, _steps(buffer.obs, rollout))
        previous = torch.cat([self.previous, buffer.previous[:, rollout]], dim=1)
        index = self.index.concatenate(buffer.steps_index.at(rollout))
        return Past(_steps(obs, last), previous[:, last], index.at(last))

    @torch.no_grad()
    def read(self, policy: "GTrXLPolicy", segment_length: int) -> State:
        """Recompute the memory with the current weights; that of past episodes may be incomplete.

        Args:
            policy: the policy with the current weights.
            segment_length: steps that are read at a time.
        """
        state = policy.transformer.initial_state(len(self.previous))
        for start in range(self._first, self.index.shape[1], segment_length):
            part = slice(start, start + segment_length)
            index, previous = self.index.at(part), self.previous[:, part].flatten(0, 1)
            tokens = policy.tokens(_flat(_steps(self.obs, part)), previous).unflatten(0, tuple(index.shape))
            state = policy.transformer.remember(tokens, index, state)
        return state

    @property
    def _first(self) -> int:
        """Number of steps before the first one that belongs to the current episode of any environment."""
        episode = self.index.episode
        last = pad(episode, (1, 0), value=EMPTY).amax(dim=1, keepdim=True)
        current = ((episode == last) & (episode != EMPTY)).any(dim=0)
        return int((current.cumsum(dim=0) == 0).sum())


def steps_that_count(core: TransformerSpec) -> int:
    """Return ``L M``, the receptive field of the memory: each of L passes attends M steps back.

    A memory with a longer reach in one pass, e.g. `KNN`, adds these steps.
    """
    assert core.memory is not None
    return (core.layers - 1) * core.memory.length + core.memory.holds


def _steps(obs: PyTorchObs, steps: slice) -> PyTorchObs:
    return {key: x[:, steps] for key, x in obs.items()} if isinstance(obs, dict) else obs[:, steps]


def _flat(obs: PyTorchObs) -> PyTorchObs:
    return {key: x.flatten(0, 1) for key, x in obs.items()} if isinstance(obs, dict) else obs.flatten(0, 1)


def _joined(earlier: PyTorchObs, later: PyTorchObs) -> PyTorchObs:
    if isinstance(earlier, dict) and isinstance(later, dict):
        return {key: torch.cat([x, later[key]], dim=1) for key, x in earlier.items()}
    assert isinstance(earlier, Tensor)
    assert isinstance(later, Tensor)
    return torch.cat([earlier, later], dim=1)
