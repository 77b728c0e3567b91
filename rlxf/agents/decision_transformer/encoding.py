"""Steps of trajectories as a Decision Transformer thinks of them while it acts."""

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.attention.heads.datastore import Datastore
from rlxf.envs.trajectories import Windows

BATCH = 256
"""Windows that are read at a time."""


@torch.no_grad()
def encoded(
    model: DecisionTransformerModel, windows: Windows, device: torch.device, progress_bar: bool = False
) -> Datastore:
    """For each step of the data what the head would read there while acting, the action, the episode.

    While acting, it reads the output at the state token of the newest of K steps, or of as many as there are.
    So each step is encoded from the window that ends with it: about as many windows as there are steps. The
    first K steps of an episode come from one, as the model is causal.
    """
    data = windows.trajectories
    keys = torch.empty(data.steps, model.transformer.spec.width, device=device)
    with_first, later = starts(windows)
    for batch in track(_batches(with_first), "remember starts", disable=not progress_bar):
        steps, y = first_steps(model, windows, batch, device)
        keys[steps] = y
    for batch in track(_batches(later), "remember steps", disable=not progress_bar):
        read = windows.starting_at(batch).to(device)
        keys[torch.from_numpy(batch + windows.length - 1)] = model.newest(model.steps(read))
    episodes = np.repeat(np.arange(data.episodes), data.lengths)
    actions = torch.from_numpy(np.array(data.actions))
    return Datastore(keys, actions.to(device), torch.from_numpy(episodes).to(device))


def starts(windows: Windows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First steps of the windows that begin an episode, and of those that follow, which are whole."""
    offsets = windows.trajectories.offsets
    step = np.arange(windows.trajectories.steps)
    end = np.repeat(offsets[1:], windows.trajectories.lengths)
    return offsets[:-1].copy(), np.setdiff1d(step[step + windows.length <= end], offsets[:-1])


def first_steps(
    model: DecisionTransformerModel, windows: Windows, first: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The steps (N,) of the windows that begin episodes, and the outputs (N, C) there."""
    batch = windows.starting_at(first).to(device)
    y, mask = model.read(model.steps(batch)), batch.mask[:, model.remembered :]
    steps = torch.from_numpy(first).to(device)[:, None] + batch.time_steps[:, model.remembered :]
    return steps[mask], y[mask]


def _batches(starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [starts[i : i + BATCH] for i in range(0, len(starts), BATCH)]
