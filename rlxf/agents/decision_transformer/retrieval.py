"""Encoding of trajectories as the datastore of a Decision Transformer."""

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.attention.heads.datastore import Datastore
from rlxf.data import Windows

BATCH = 256
"""Number of windows in one forward pass."""


@torch.no_grad()
def encode_dataset(
    model: DecisionTransformerModel, windows: Windows, device: torch.device, progress_bar: bool = False
) -> Datastore:
    """Return a datastore with the key, the action and the episode of each step of the data.

    The key is the input of the head while acting: the output at the state token of the newest of K steps.
    Each step is therefore encoded from the window that ends with it, which takes about one window per step.
    The first K steps of an episode come from one window, since the model is causal.
    """
    data = windows.trajectories
    keys = torch.empty(data.steps, model.transformer.spec.width, device=device)
    with_first, later = starts(windows)
    for batch in track(_batches(with_first), "encode starts", disable=not progress_bar):
        steps, y = first_steps(model, windows, batch, device)
        keys[steps] = y
    for batch in track(_batches(later), "encode steps", disable=not progress_bar):
        window = windows.starting_at(batch).to(device)
        keys[torch.from_numpy(batch + windows.length - 1)] = model.newest_output(model.steps(window))
    episodes = np.repeat(np.arange(data.episodes), data.lengths)
    actions = torch.from_numpy(np.array(data.actions))
    return Datastore(keys, actions.to(device), torch.from_numpy(episodes).to(device))


def starts(windows: Windows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first step of the window at each episode start, and those of all later full windows."""
    offsets = windows.trajectories.offsets
    step = np.arange(windows.trajectories.steps)
    end = np.repeat(offsets[1:], windows.trajectories.lengths)
    return offsets[:-1].copy(), np.setdiff1d(step[step + windows.length <= end], offsets[:-1])


def first_steps(
    model: DecisionTransformerModel, windows: Windows, first: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Encode the windows at episode starts: return the indices (N,) of their steps and the outputs (N, C)."""
    batch = windows.starting_at(first).to(device)
    y, mask = model.outputs(model.steps(batch)), batch.mask[:, model.burn_in_steps :]
    steps = torch.from_numpy(first).to(device)[:, None] + batch.time_steps[:, model.burn_in_steps :]
    return steps[mask], y[mask]


def _batches(starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [starts[i : i + BATCH] for i in range(0, len(starts), BATCH)]
