"""Keys of a datastore of a Decision Transformer: the data, encoded as while acting."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from rlxf.attention.heads.base import Datastore
from rlxf.data import Windows

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.model import DecisionTransformerModel

ENCODING_BATCH = 256
"""Number of windows in one forward pass of `encode_windows`."""


def encode_dataset(
    model: "DecisionTransformerModel", windows: Windows, device: torch.device, progress_bar: bool = False
) -> Datastore:
    """Return a datastore with the key, the action and the episode of each step of the data.

    The key is the input of the head while acting, see `DecisionTransformerModel.encode_steps`.
    """
    data = windows.trajectories
    keys = model.encode_steps(windows, device, progress_bar)
    episodes = np.repeat(np.arange(data.episodes), data.lengths)
    actions = torch.from_numpy(np.array(data.actions))
    return Datastore(keys, actions.to(device), torch.from_numpy(episodes).to(device))


def encode_windows(
    model: "DecisionTransformerModel", windows: Windows, device: torch.device, progress_bar: bool
) -> Tensor:
    """Return the input of the head while acting for each step of the data, (N, C).

    It is the output at the decision token of the newest of K steps. Each step is therefore encoded from the
    window that ends with it, which takes about one window per step. The first K steps of an episode come from
    one window, since the model is causal.
    """
    outputs = torch.empty(windows.trajectories.steps, model.transformer.spec.width, device=device)
    with_first, later = _window_starts(windows)
    for first in track(_batches(with_first), "encode starts", disable=not progress_bar):
        batch = windows.starting_at(first).to(device)
        y, start = model.outputs(model.steps(batch)), model.window_start(batch)
        mask = batch.mask[:, start:]
        steps = torch.from_numpy(first).to(device)[:, None] + batch.time_steps[:, start:]
        outputs[steps[mask]] = y[mask]
    for first in track(_batches(later), "encode steps", disable=not progress_bar):
        batch = windows.starting_at(first).to(device)
        outputs[torch.from_numpy(first + windows.length - 1)] = model.newest_output(model.steps(batch))
    return outputs


def _window_starts(windows: Windows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first steps of the windows that begin an episode, and those of the later, full windows."""
    offsets = windows.trajectories.offsets
    step = np.arange(windows.trajectories.steps)
    end = np.repeat(offsets[1:], windows.trajectories.lengths)
    return offsets[:-1].copy(), np.setdiff1d(step[step + windows.length <= end], offsets[:-1])


def _batches(starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [starts[i : i + ENCODING_BATCH] for i in range(0, len(starts), ENCODING_BATCH)]
