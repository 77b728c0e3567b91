"""Datastore of GTrXLPPO: encoding of trajectories and the policy that reads it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from rich.progress import track
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions, action_encoder
from rlxf.agents.common.datastore import check_datastore_spaces
from rlxf.agents.common.retrieval import (
    ActionDatastore,
    BoxRetrievalPolicy,
    DiscreteRetrievalPolicy,
    RetrievalPolicy,
    build_action_datastore,
)
from rlxf.agents.gtrxl.policy import GTrXLPolicy
from rlxf.attention import KNNLM, TokenIndex
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.datastore import Datastore
from rlxf.attention.token_index import EMPTY
from rlxf.data import Trajectories, as_trajectories
from rlxf.data.dataset_source import Dataset

EPISODES, SEGMENT = 64, 64
"""Batch size in episodes, and length of a segment in steps."""
ObservationLoader = Callable[[NDArray[np.int64]], PyTorchObs]
"""Maps numbers of steps (N,) in the data to observations for the policy."""


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
    batches = [by_length[i : i + EPISODES] for i in range(0, data.episodes, EPISODES)]
    for episodes in track(batches, "datastore", disable=not progress_bar):
        for steps, y in encode_episodes(policy, data, load, episodes):
            keys[torch.from_numpy(steps)] = y
    groups = torch.from_numpy(np.repeat(np.arange(data.episodes), data.lengths))
    return Datastore(keys, torch.from_numpy(np.array(data.actions)).to(keys.device), groups.to(keys.device))


@torch.no_grad()
def encode_episodes(
    policy: GTrXLPolicy, data: Trajectories, load: ObservationLoader, episodes: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
    """Yield the numbers (N,) of the steps of these episodes and their outputs (N, C), segment by segment."""
    first, lengths = data.offsets[episodes][:, None], data.lengths[episodes][:, None]
    state = policy.transformer.initial_state(len(episodes))
    for start in range(0, int(lengths.max()), SEGMENT):
        position = np.arange(start, start + SEGMENT)
        real = position < lengths
        position = np.minimum(position, lengths - 1)
        steps = first + position
        tokens = policy.tokens(load(steps.ravel()), _previous(policy, data, steps, position))
        index = _index(position, real, policy.device)
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


def _index(position: NDArray[np.int64], real: NDArray[np.bool_], device: torch.device) -> TokenIndex:
    """Return the index of tokens (B, T) with an episode per row; tokens that are not real are empty slots."""
    episode = np.where(real, 0, EMPTY)
    return TokenIndex(torch.from_numpy(position).to(device), torch.from_numpy(episode).to(device))


def _previous(
    policy: GTrXLPolicy, data: Trajectories, steps: NDArray[np.int64], position: NDArray[np.int64]
) -> Tensor:
    """Return the encoded previous actions of steps (B, T), (B T, A); 0 at the first step of an episode."""
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
        target[0::2], target[1::2] = 0.0, source.detach()
    return pairs


def retrieval_policy(policy: GTrXLPolicy, memory: ActionDatastore) -> RetrievalPolicy:
    """Return the retrieval policy that combines a policy with a memory."""
    actions = action_encoder(policy.action_space).to(policy.device)
    if isinstance(actions, BoxActions):
        return BoxRetrievalPolicy(PolicyBoxHead(policy, actions), memory)
    return DiscreteRetrievalPolicy(PolicyDiscreteHead(policy, actions), memory)


class DatastoreMixin(BaseAlgorithm):
    """Methods of an agent that attach a datastore of logged actions to its policy."""

    policy: GTrXLPolicy

    def attach_datastore(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories,
        head: OutputHead | None = None,
        download: bool = False,
        progress_bar: bool = False,
    ) -> Self:
        """Use trajectories as a datastore for retrieval in `predict`, without training.

        For each step of the trajectories, the datastore holds the transformer's output, which is the input of
        the action head, and the action taken. An earlier datastore is replaced. For every action, `predict`
        searches the nearest stored outputs and mixes their actions with the agent's own. Outputs depend on
        observations and actions, not on rewards, so the trajectories should show good behavior.

        Each episode is encoded once, with memory as while acting. Observations are normalized with the
        current statistics of the ``VecNormalize`` around the agent's environment, if there is one. N steps
        need ``4 N (C + A) + 8 N`` bytes, with C the width of the core and A the size of an action. The
        datastore is saved with the agent. If ``head`` is a `SPALM`, its gate is trained here on these steps,
        with neighbors from other episodes. Box actions are clipped to their bounds before they are mixed.

        An agent with a datastore cannot be trained, since its stored outputs would become stale. Call
        `detach_datastore`, train, and call `attach_datastore` again.

        Args:
            dataset: a Minari id, a ``MinariDataset``, a sequence of these, or `Trajectories`, with the spaces
                of the agent.
            head: `KNNLM` or `SPALM`; None for ``KNNLM()``.
            download: whether to download a dataset that is not on this machine.
            progress_bar: show a progress bar.

        Raises:
            DatasetError: if the dataset is unknown, empty, damaged, or has other spaces.
            ValueError: if head needs more neighbors than there are steps, or, with a gate, than there are
                steps in other episodes; or if the core has early exits, since stored outputs must come from
                the same depth.
            ImportError: if head needs faiss, which is not installed.
        """
        self.policy.core.depth.check_no_early_exit("attach_datastore")
        data, head = as_trajectories(dataset, download), KNNLM() if head is None else head
        check_datastore_spaces(data, head, self.observation_space, self.action_space)
        self.policy.set_training_mode(False)
        store = encode_dataset(self.policy, data, self.get_vec_normalize_env(), progress_bar)
        build = partial(retrieval_policy, self.policy)
        self.policy.retrieval = build(build_action_datastore(store, head, build, self.seed))
        return self

    def detach_datastore(self) -> Self:
        """Remove the datastore of `attach_datastore`."""
        self.policy.retrieval = None
        return self

    @property
    def datastore(self) -> ActionDatastore | None:
        """Datastore of `attach_datastore`; None if there is none."""
        return None if self.policy.retrieval is None else self.policy.retrieval.datastore
