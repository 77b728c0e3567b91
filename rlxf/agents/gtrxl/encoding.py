"""Steps of trajectories as a GTrXL thinks of them while it acts."""

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
"""Episodes that are read side by side, and steps of each that are read at a time."""
Show = Callable[[NDArray[np.int64]], PyTorchObs]
"""Steps (N,) of the data -> what the policy saw there."""


def encoded(
    policy: "GTrXLPolicy", data: Trajectories, normalization: VecNormalize | None, progress_bar: bool = False
) -> Datastore:
    """For each step of the data what the heads would read there while acting, the action, the episode.

    Each episode is read from its first step on, segment by segment, its memory handed on from one to the
    next: so each step is read once, and sees what it would have seen while acting.

    Args:
        policy: in evaluation mode.
        data: of the spaces that it learned to act in.
        normalization: brings observations to those of training; None if they are.
        progress_bar: show one.
    """
    show = shown(policy, data, normalization)
    keys = torch.empty(data.steps, policy.core.width, device=policy.device)
    by_length = np.argsort(data.lengths, kind="stable")  # side by side, none waits long for another
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
    """Steps (N,) of these episodes and the outputs (N, C) there, segment by segment."""
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
    """What gives the policy the observations of the data, as those of its environments."""
    encoder = data.encoder

    def show(steps: NDArray[np.int64]) -> PyTorchObs:
        raw = encoder.back(data.observations[steps])
        return policy.obs_to_tensor(raw if normalization is None else normalization.normalize_obs(raw))[0]

    return show


def _index(position: NDArray[np.int64], real: NDArray[np.bool_], device: torch.device) -> Index:
    """Where the tokens of one episode a row stand, (B, T); those that are not real are empty slots."""
    episode = np.where(real, 0, EMPTY)
    return Index(torch.from_numpy(position).to(device), torch.from_numpy(episode).to(device))


def _previous(
    policy: "GTrXLPolicy", data: Trajectories, steps: NDArray[np.int64], position: NDArray[np.int64]
) -> Tensor:
    """The encoded actions before steps (B, T), one after the other: 0 where there is none."""
    before = torch.from_numpy(data.actions[np.maximum(steps.ravel() - 1, 0)])
    begins = torch.from_numpy(position.ravel() == 0)
    encoded = policy.encode_actions(before.to(policy.device))
    return encoded.masked_fill(begins.to(encoded.device)[:, None], 0.0)
