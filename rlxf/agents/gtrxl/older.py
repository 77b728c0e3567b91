"""Rollout buffer for the long-range memory of a core with `KNN` memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlxf.attention import KNN, Index, State, TransformerSpec
from rlxf.attention.index import EMPTY


class OlderSteps:
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
        self.index = Index.empty(n_envs, self.length + n_steps, device)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All stored tensors."""
        return self.hidden, self.index.position, self.index.episode

    def forget(self) -> None:
        """Clear the memory."""
        self.index.episode.fill_(EMPTY)

    def begin(self, steps: int) -> State:
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

    def add(self, step: int, hidden: Tensor, index: Index) -> None:
        """Store the step that leaves the last M when ``step`` is added: hidden (L, E, C), index (E, 1)."""
        slot = self.length + step
        self.hidden[0, :, slot] = hidden[self.number]
        self.index.position[:, slot], self.index.episode[:, slot] = index.position[:, 0], index.episode[:, 0]

    def before(self, environment: Tensor, step: Tensor) -> State:
        """Return the older steps of segments that begin at ``step`` (B,) of ``environment`` (B,)."""
        slots = step[:, None] + torch.arange(self.length, device=step.device)
        rows = environment[:, None]
        index = Index(self.index.position[rows, slots], self.index.episode[rows, slots])
        return State(self.hidden[:, rows, slots], index)

    def at(self, step: int) -> State:
        """Return the N older steps after ``step`` steps of the rollout, as views."""
        memory = slice(step, step + self.length)
        return State(self.hidden[:, :, memory], self.index.at(memory))
