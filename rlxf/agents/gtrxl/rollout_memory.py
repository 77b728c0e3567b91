"""Memory of rollouts: stored hidden states, and recent observations to recompute them with new weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor
from torch.nn.functional import pad

from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.attention import State, TokenIndex, TransformerSpec
from rlxf.attention.token_index import EMPTY


class StateBuffer:
    """Inputs of layers at the steps of a rollout and at the N steps before it, (L, E, N + steps, C).

    Every step is stored once. The N steps before step s of the rollout are the slice [s, s + N), a view.

    Args:
        layers: layers L whose inputs are stored.
        length: steps N of the memory.
        width: features C.
        n_envs: environments E.
        n_steps: steps of a rollout.
        device: device of the buffer.
    """

    def __init__(self, layers: int, length: int, width: int, n_envs: int, n_steps: int, device: torch.device):
        self.length = length
        self.hidden = torch.zeros(layers, n_envs, length + n_steps, width, device=device)
        self.index = TokenIndex.empty(n_envs, length + n_steps, device)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.hidden.nbytes + self.index.position.nbytes + self.index.episode.nbytes

    def clear(self) -> None:
        """Clear all steps."""
        self.index.position.zero_()
        self.index.episode.fill_(EMPTY)

    def before(self, step: int) -> State:
        """Return the N steps before a step of the rollout, as views."""
        memory = slice(step, step + self.length)
        return State(self.hidden[:, :, memory], self.index.at(memory))

    def start_rollout(self, steps: int) -> State:
        """Start a rollout after one of ``steps`` steps, and return the memory at its start."""
        last = self.before(steps)
        self.replace_memory(State(last.hidden.clone(), last.index))
        return self.before(0)

    def replace_memory(self, state: State) -> None:
        """Replace the N steps before the rollout."""
        memory = slice(self.length)
        self.hidden[:, :, memory] = state.hidden
        self.index.position[:, memory] = state.index.position.clone()
        self.index.episode[:, memory] = state.index.episode.clone()

    def add(self, step: int, hidden: Tensor, index: TokenIndex) -> None:
        """Store a step of the rollout: hidden (L, E, C), index (E, 1)."""
        slot = self.length + step
        self.hidden[:, :, slot] = hidden
        self.index.position[:, slot], self.index.episode[:, slot] = index.position[:, 0], index.episode[:, 0]

    def before_segments(self, environment: Tensor, number: Tensor, segment_length: int) -> State:
        """Return the N steps before segment ``number`` (B,) of ``environment`` (B,), in order of time."""
        window = self.length, segment_length
        hidden = _windows(self.hidden, 2, *window)[:, environment, number]
        parts = self.index.position, self.index.episode
        return State(hidden, TokenIndex(*(_windows(x, 1, *window)[environment, number] for x in parts)))


def _windows(x: Tensor, axis: int, length: int, stride: int) -> Tensor:
    """Return windows of ``length`` along ``axis``, ``stride`` apart, in a new axis before it, as a view."""
    return x.unfold(axis, length, stride).movedim(-1, axis + 1)


@dataclass(frozen=True, eq=False)
class RecentSteps:
    """Inputs of the last P steps of E environments, from which memory can be recomputed with new weights.

    The hidden states of a rollout depend on the weights that acted in it. With P = `memory_receptive_field`,
    `recompute_memory` returns the same memory as a forward pass over the whole episode.

    Args:
        obs: observations (E, P, ...).
        previous: (E, P, A), the encoded previous actions.
        index: (E, P), positions and episodes of the steps; only filler rows are empty slots.
    """

    obs: PyTorchObs
    previous: Tensor
    index: TokenIndex

    def followed_by(self, later: "RecentSteps", most: int) -> "RecentSteps":
        """Append later steps, and return the last ``most`` steps."""
        last = slice(-most, None)
        obs = map_obs(lambda x, y: torch.cat([x, y], dim=1)[:, last], self.obs, later.obs)
        previous = torch.cat([self.previous, later.previous], dim=1)
        return RecentSteps(obs, previous[:, last], self.index.concatenate(later.index).at(last))

    @torch.no_grad()
    def recompute_memory(self, policy: GTrXLPolicy, segment_length: int) -> State:
        """Recompute the memory with the current weights; that of past episodes may be incomplete.

        Args:
            policy: the policy with the current weights.
            segment_length: steps that are read at a time.
        """
        state = policy.transformer.initial_state(len(self.previous))
        for start in range(self._first, self.index.shape[1], segment_length):
            part = slice(start, start + segment_length)
            index, previous = self.index.at(part), self.previous[:, part].flatten(0, 1)
            obs = map_obs(lambda x, part=part: x[:, part].flatten(0, 1), self.obs)
            tokens = policy.tokens(obs, previous).unflatten(0, tuple(index.shape))
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

    A memory with a longer reach in one pass adds these steps.
    """
    assert core.memory is not None
    return (core.layers - 1) * core.memory.length + core.memory.holds


def map_obs(function: Callable[..., Tensor], obs: PyTorchObs, *others: Any) -> PyTorchObs:
    """Apply a function to observations, or to each entry of Dict observations."""
    if isinstance(obs, dict):
        return {key: function(x, *(other[key] for other in others)) for key, x in obs.items()}
    return function(obs, *others)
