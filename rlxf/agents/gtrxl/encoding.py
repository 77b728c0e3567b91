"""Encoding of logged trajectories with the transformer of a GTrXL, for its datastore."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from rlxf.attention import Index
from rlxf.attention.heads.datastore import Datastore
from rlxf.attention.index import EMPTY
from rlxf.envs.trajectories import Trajectories

if TYPE_CHECKING:
    from rlxf.agents.gtrxl.policy import GTrXLPolicy

EPISODES, SEGMENT = 64, 64
"""Batch size in episodes, and length of a segment in steps."""
Show = Callable[[NDArray[np.int64]], PyTorchObs]
"""Maps numbers of steps (N,) in the data to observations for the policy."""


def encoded(
    policy: "GTrXLPolicy", data: Trajectories, normalization: VecNormalize | None, progress_bar: bool = False
) -> Datastore:
    """Build a datastore with the transformer output, the action and the episode of each step of the data.

    Each episode is read from its first step, segment by segment, with the memory carried over. Every step is
    processed once and attends to the same steps as while acting.

    Args:
        policy: policy in evaluation mode.
        data: trajectories with the spaces of the policy.
        normalization: statistics that normalise observations as in training; None for raw observations.
        progress_bar: show a progress bar.
    """
    show = shown(policy, data, normalization)
    keys = torch.empty(data.steps, policy.core.width, device=policy.device)
    by_length = np.argsort(data.lengths, kind="stable")  # similar lengths in a batch need little padding
    batches = [by_length[i : i + EPISODES] for i in range(0, data.episodes, EPISODES)]
    for episodes in track(batches, "remember", disable=not progress_bar):
        for steps, y in read(policy, data, show, episodes):
            keys[torch.from_numpy(steps)] = y
    groups = torch.from_numpy(np.repeat(np.arange(data.episodes), data.lengths))
    return Datastore(keys, torch.from_numpy(np.array(data.actions)).to(keys.device), groups.to(keys.device))


@torch.no_grad()
def read(
    policy: "GTrXLPolicy", data: Trajectories, show: Show, episodes: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Yield the numbers (N,) of the steps of these episodes and their outputs (N, C), segment by segment."""
    first, lengths = data.offsets[episodes][:, None], data.lengths[episodes][:, None]
    state = policy.transformer.initial_state(len(episodes))
    for start in range(0, int(lengths.max()), SEGMENT):
        position = np.arange(start, start + SEGMENT)
        real = position < lengths
        position = np.minimum(position, lengths - 1)
        steps = first + position
        tokens = policy.tokens(show(steps.ravel()), _previous(policy, data, steps, position))
        index = _index(position, real, policy.device)
        y, state = policy.transformer(tokens.unflatten(0, steps.shape), index, state)
        yield steps[real], y[torch.from_numpy(real)]


def shown(policy: "GTrXLPolicy", data: Trajectories, normalization: VecNormalize | None) -> Show:
    """Return a function that loads observations of the data in the format of the policy's environments."""
    encoder = data.encoder

    def show(steps: NDArray[np.int64]) -> PyTorchObs:
        raw = encoder.back(data.observations[steps])
        return policy.obs_to_tensor(raw if normalization is None else normalization.normalize_obs(raw))[0]

    return show


def _index(position: NDArray[np.int64], real: NDArray[np.bool_], device: torch.device) -> Index:
    """Return the index of tokens (B, T) with an episode per row; tokens that are not real are empty slots."""
    episode = np.where(real, 0, EMPTY)
    return Index(torch.from_numpy(position).to(device), torch.from_numpy(episode).to(device))


def _previous(
    policy: "GTrXLPolicy", data: Trajectories, steps: NDArray[np.int64], position: NDArray[np.int64]
) -> Tensor:
    """Return the encoded previous actions of steps (B, T), (B T, A); 0 at the first step of an episode."""
    before = torch.from_numpy(data.actions[np.maximum(steps.ravel() - 1, 0)])
    begins = torch.from_numpy(position.ravel() == 0)
    encoded = policy.encode_actions(before.to(policy.device))
    return encoded.masked_fill(begins.to(encoded.device)[:, None], 0.0)
