"""Recent observations, kept to recompute the memory with the current weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor
from torch.nn.functional import pad

from rlxf.attention import KNN, State, TokenIndex, TransformerSpec
from rlxf.attention.token_index import EMPTY

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy
    from rlxf.agents.gtrxl.rollout_buffer import SegmentBuffer


class LongRangeBuffer:
    """Inputs of the kNN layer at steps before the last M, (1, E, N + steps, C), in the order of time.

    The N older steps of a segment that begins at step s are the slice [s, s + N), a view.

    Args:
        core: transformer with `KNN` memory.
        n_envs: environments E.
        n_steps: steps of a rollout.
        device: device of the buffer.
    """

    def __init__(self, core: TransformerSpec, n_envs: int, n_steps: int, device: torch.device):
        assert isinstance(core.memory, KNN)
        self.number, self.length = core.memory.number(core.layers), core.memory.far
        self.hidden = torch.zeros(1, n_envs, self.length + n_steps, core.width, device=device)
        self.index = TokenIndex.empty(n_envs, self.length + n_steps, device)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All stored tensors."""
        return self.hidden, self.index.position, self.index.episode

    def clear(self) -> None:
        """Clear the memory."""
        self.index.episode.fill_(EMPTY)

    def start_rollout(self, steps: int) -> State:
        """Start a rollout after one of ``steps`` steps, and return the memory at its start."""
        last = self.at(steps)
        self.replace(State(last.hidden.clone(), last.index))
        return self.at(0)

    def replace(self, state: State) -> None:
        """Replace the memory before the rollout, N steps."""
        memory = slice(self.length)
        self.hidden[:, :, memory] = state.hidden
        self.index.position[:, memory] = state.index.position.clone()
        self.index.episode[:, memory] = state.index.episode.clone()

    def add(self, step: int, hidden: Tensor, index: TokenIndex) -> None:
        """Store the step that leaves the last M when ``step`` is added: hidden (L, E, C), index (E, 1)."""
        slot = self.length + step
        self.hidden[0, :, slot] = hidden[self.number]
        self.index.position[:, slot], self.index.episode[:, slot] = index.position[:, 0], index.episode[:, 0]

    def before(self, environment: Tensor, step: Tensor) -> State:
        """Return the older steps of segments that begin at ``step`` (B,) of ``environment`` (B,)."""
        slots = step[:, None] + torch.arange(self.length, device=step.device)
        rows = environment[:, None]
        index = TokenIndex(self.index.position[rows, slots], self.index.episode[rows, slots])
        return State(self.hidden[:, rows, slots], index)

    def at(self, step: int) -> State:
        """Return the N older steps after ``step`` steps of the rollout, as views."""
        memory = slice(step, step + self.length)
        return State(self.hidden[:, :, memory], self.index.at(memory))


@dataclass(frozen=True, eq=False)
class RecentSteps:
    """Inputs of the last P steps of E environments, from which memory can be recomputed with new weights.

    The hidden states of a rollout depend on the weights that acted in it. With P = `memory_receptive_field`,
    `read` returns the same memory as a forward pass over the whole episode.

    Args:
        obs: observations (E, P, ...).
        previous: (E, P, A), the encoded previous actions.
        index: (E, P), positions and episodes of the steps; only filler rows are empty slots.
    """

    obs: PyTorchObs
    previous: Tensor
    index: TokenIndex

    @classmethod
    def before(cls, buffer: "SegmentBuffer") -> Self:
        """Return an empty past, P = 0, for the environments of a buffer."""
        return cls(_steps(buffer.obs, slice(0)), buffer.previous[:, :0], buffer.index.at(slice(0)))

    def followed_by(self, buffer: "SegmentBuffer", most: int) -> "RecentSteps":
        """Append the steps of a rollout, and return the last ``most`` steps."""
        rollout, last = slice(buffer.step), slice(-most, None)
        obs = _joined(self.obs, _steps(buffer.obs, rollout))
        previous = torch.cat([self.previous, buffer.previous[:, rollout]], dim=1)
        index = self.index.concatenate(buffer.steps_index.at(rollout))
        return RecentSteps(_steps(obs, last), previous[:, last], index.at(last))

    @torch.no_grad()
    def recompute_memory(self, policy: "GTrXLPolicy", segment_length: int) -> State:
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
            state = policy.transformer.next_state(tokens, index, state)
        return state

    @property
    def _first(self) -> int:
        """Number of steps before the first one that belongs to the current episode of any environment."""
        episode = self.index.episode
        last = pad(episode, (1, 0), value=EMPTY).amax(dim=1, keepdim=True)
        current = ((episode == last) & (episode != EMPTY)).any(dim=0)
        return int((current.cumsum(dim=0) == 0).sum())


def memory_receptive_field(core: TransformerSpec) -> int:
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
