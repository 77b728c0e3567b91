"""What was seen in the last steps, to think of it anew."""

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
    """The last P steps of E environments, of which any weights make a memory.

    The hidden states that a rollout leaves behind are of the weights that acted in it. With as many steps as
    `steps_that_count`, `read` gives what reading the whole episode anew would give.

    Args:
        obs: (E, P, ...).
        previous: (E, P, A), the encoded actions before them.
        index: (E, P), where the steps stand; no empty slots but filler rows.
    """

    obs: PyTorchObs
    previous: Tensor
    index: Index

    @classmethod
    def before(cls, buffer: "SegmentBuffer") -> Self:
        """No step yet: P = 0."""
        return cls(_steps(buffer.obs, slice(0)), buffer.previous[:, :0], buffer.index.at(slice(0)))

    def followed_by(self, buffer: "SegmentBuffer", most: int) -> "Past":
        """The last ``most`` of these steps and those of a rollout."""
        rollout, last = slice(buffer.step), slice(-most, None)
        obs = _joined(self.obs, _steps(buffer.obs, rollout))
        previous = torch.cat([self.previous, buffer.previous[:, rollout]], dim=1)
        index = self.index.concatenate(buffer.steps_index.at(rollout))
        return Past(_steps(obs, last), previous[:, last], index.at(last))

    @torch.no_grad()
    def read(self, policy: "GTrXLPolicy", segment_length: int) -> State:
        """What there is to remember of them by the present weights; of episodes that are over, maybe not all.

        Args:
            policy: has the weights.
            segment_length: steps that are read at a time.
        """
        state = policy.transformer.initial_state(len(self.previous))
        for start in range(self._begun, self.index.shape[1], segment_length):
            part = slice(start, start + segment_length)
            index, previous = self.index.at(part), self.previous[:, part].flatten(0, 1)
            tokens = policy.tokens(_flat(_steps(self.obs, part)), previous).unflatten(0, tuple(index.shape))
            state = policy.transformer.remember(tokens, index, state)
        return state

    @property
    def _begun(self) -> int:
        """Steps before the first one that belongs to the last episode of its environment."""
        episode = self.index.episode
        last = pad(episode, (1, 0), value=EMPTY).amax(dim=1, keepdim=True)
        at_hand = ((episode == last) & (episode != EMPTY)).any(dim=0)
        return int((at_hand.cumsum(dim=0) == 0).sum())


def steps_that_count(core: TransformerSpec) -> int:
    """``L M``: on so many steps depends what is remembered of the last M, as each of L passes looks M back.

    A memory that reaches farther in one pass, such as `KNN`, takes as many steps more.
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
