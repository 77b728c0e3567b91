"""Retrieval for GTrXLPPO: encoding of trajectories as a datastore, and action heads without retrieval."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from rich.progress import track
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions, action_encoder
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.attention import TokenIndex
from rlxf.attention.heads.base import Datastore
from rlxf.attention.token_index import EMPTY
from rlxf.data import Trajectories

EPISODES_PER_BATCH, SEGMENT_LENGTH = 64, 64
"""Batch size in episodes, and length of a segment in steps."""
ObservationLoader = Callable[[NDArray[np.int64]], PyTorchObs]
"""Maps step indices (N,) in the data to observations for the policy."""


def encode_dataset(
    policy: GTrXLPolicy, data: Trajectories, normalization: VecNormalize | None, progress_bar: bool = False
) -> Datastore:
    """Build a datastore with the transformer output, the action and the episode of each step of the data.

    Each episode is read from its first step, segment by segment, with the memory carried over. Every step is
    processed once and attends to the same steps as while acting.

    Args:
        policy: policy in evaluation mode.
        data: trajectories with the spaces of the policy.
        normalization: statistics that normalize observations as in training; None for raw observations.
        progress_bar: show a progress bar.
    """
    load = observation_loader(policy, data, normalization)
    keys = torch.empty(data.steps, policy.core.width, device=policy.device)
    by_length = np.argsort(data.lengths, kind="stable")  # similar lengths in a batch need little padding
    batches = [by_length[i : i + EPISODES_PER_BATCH] for i in range(0, data.episodes, EPISODES_PER_BATCH)]
    for episodes in track(batches, "datastore", disable=not progress_bar):
        for steps, y in encode_episodes(policy, data, load, episodes):
            keys[torch.from_numpy(steps)] = y
    groups = torch.from_numpy(np.repeat(np.arange(data.episodes), data.lengths))
    return Datastore(keys, torch.from_numpy(np.array(data.actions)).to(keys.device), groups.to(keys.device))


@torch.no_grad()
def encode_episodes(
    policy: GTrXLPolicy, data: Trajectories, load: ObservationLoader, episodes: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Yield the indices (N,) of the steps of these episodes and their outputs (N, C), segment by segment."""
    first, lengths = data.offsets[episodes][:, None], data.lengths[episodes][:, None]
    state = policy.transformer.initial_state(len(episodes))
    for start in range(0, int(lengths.max()), SEGMENT_LENGTH):
        position = np.arange(start, start + SEGMENT_LENGTH)
        real = position < lengths
        position = np.minimum(position, lengths - 1)
        steps = first + position
        tokens = policy.tokens(load(steps.ravel()), _previous(policy, data, steps, position))
        parts = position, np.where(real, 0, EMPTY)  # tokens after the end of an episode are empty slots
        index = TokenIndex(*(torch.from_numpy(part).to(policy.device) for part in parts))
        y, state = policy.transformer(tokens.unflatten(0, steps.shape), index, state)
        yield steps[real], y[torch.from_numpy(real)]


def observation_loader(
    policy: GTrXLPolicy, data: Trajectories, normalization: VecNormalize | None
) -> ObservationLoader:
    """Return a function that loads observations of the data in the format of the policy's environments."""
    encoder = data.encoder

    def load(steps: NDArray[np.int64]) -> PyTorchObs:
        raw = encoder.decode(data.observations[steps])
        return policy.obs_to_tensor(raw if normalization is None else normalization.normalize_obs(raw))[0]

    return load


def _previous(
    policy: GTrXLPolicy, data: Trajectories, steps: NDArray[np.int64], position: NDArray[np.int64]
) -> Tensor:
    """Return the encoded previous actions of steps (B, T) as (B T, A).

    They are 0 at the first step of an episode.
    """
    before = torch.from_numpy(data.actions[np.maximum(steps.ravel() - 1, 0)])
    begins = torch.from_numpy(position.ravel() == 0)
    encoded = policy.encode_actions(before.to(policy.device))
    return encoded.masked_fill(begins.to(encoded.device)[:, None], 0.0)


@dataclass(eq=False)
class PolicyBoxHead:
    """Action head of a policy with Box actions, without retrieval; actions are clipped to the bounds.

    Logged actions are within the bounds, too. Without clipping, a Gaussian with a mean far outside would
    dominate the mixture.
    """

    policy: GTrXLPolicy
    actions: BoxActions

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return actions (E, A) for outputs y (E, C)."""
        own: Tensor = self.policy.heads(y)[0].get_actions(deterministic=deterministic)
        space = self.policy.action_space
        assert isinstance(space, spaces.Box)
        low, high = (torch.as_tensor(bound).flatten().to(own) for bound in (space.low, space.high))
        return own.clamp(low, high)


@dataclass(eq=False)
class PolicyDiscreteHead:
    """Action head of a policy with Discrete, MultiDiscrete or MultiBinary actions, without retrieval."""

    policy: GTrXLPolicy
    actions: DiscreteActions

    @property
    def net(self) -> nn.Linear:
        """Linear layer whose output concatenates the logits of all choices."""
        net = self.policy.action_net
        assert isinstance(net, nn.Linear)
        return binary_choice_layer(net) if isinstance(self.policy.action_space, spaces.MultiBinary) else net


def binary_choice_layer(net: nn.Linear) -> nn.Linear:
    """Convert a layer for logits x of bits to one for logits (0, x) of binary choices; without gradient."""
    pairs = nn.Linear(net.in_features, 2 * net.out_features).requires_grad_(False).to(net.weight)
    for source, target in ((net.weight, pairs.weight), (net.bias, pairs.bias)):
        target[0::2] = 0.0
        target[1::2] = source.detach()
    return pairs


def action_head(policy: GTrXLPolicy) -> PolicyBoxHead | PolicyDiscreteHead:
    """Return the action head of a policy, without retrieval."""
    actions = action_encoder(policy.action_space).to(policy.device)
    if isinstance(actions, BoxActions):
        return PolicyBoxHead(policy, actions)
    return PolicyDiscreteHead(policy, actions)
