"""Datastore of a Decision Transformer: encoding of trajectories and the policy that reads it."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from rlxf.agents.common.retrieval import (
    ActionDatastore,
    BoxRetrievalPolicy,
    DiscreteRetrievalPolicy,
    RetrievalPolicy,
    build_action_datastore,
    check_datastore_spaces,
)
from rlxf.agents.decision_transformer.heads import (
    CategoricalHead,
    DeterministicHead,
    Head,
    SquashedGaussianHead,
)
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.datastore import Datastore
from rlxf.data import Trajectories, Windows

if TYPE_CHECKING:
    from rlxf.agents.decision_transformer.learner import DecisionTransformer


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
    for batch in track(_batches(with_first), "remember starts", disable=not progress_bar):
        steps, y = first_steps(model, windows, batch, device)
        keys[steps] = y
    for batch in track(_batches(later), "remember steps", disable=not progress_bar):
        window = windows.starting_at(batch).to(device)
        keys[torch.from_numpy(batch + windows.length - 1)] = model.newest(model.steps(window))
    episodes = np.repeat(np.arange(data.episodes), data.lengths)
    actions = torch.from_numpy(np.array(data.actions))
    return Datastore(keys, actions.to(device), torch.from_numpy(episodes).to(device))


def starts(windows: Windows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first steps of the windows that begin an episode, and those of the later, full windows."""
    offsets = windows.trajectories.offsets
    step = np.arange(windows.trajectories.steps)
    end = np.repeat(offsets[1:], windows.trajectories.lengths)
    return offsets[:-1].copy(), np.setdiff1d(step[step + windows.length <= end], offsets[:-1])


def first_steps(
    model: DecisionTransformerModel, windows: Windows, first: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the indices (N,) of the steps in windows that begin episodes, and the outputs (N, C) there."""
    batch = windows.starting_at(first).to(device)
    y, mask = model.outputs(model.steps(batch)), batch.mask[:, model.burn_in_steps :]
    steps = torch.from_numpy(first).to(device)[:, None] + batch.time_steps[:, model.burn_in_steps :]
    return steps[mask], y[mask]


def _batches(starts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [starts[i : i + BATCH] for i in range(0, len(starts), BATCH)]


def retrieval_head(head: Head, memory: ActionDatastore) -> RetrievalPolicy:
    """Return a head that mixes the given head with actions retrieved from the datastore."""
    if isinstance(head, CategoricalHead):
        return DiscreteRetrievalPolicy(head, memory)
    assert isinstance(head, DeterministicHead | SquashedGaussianHead)
    return BoxRetrievalPolicy(head, memory)


def build_retrieval_memory(
    agent: "DecisionTransformer", data: Trajectories, head: OutputHead, progress_bar: bool
) -> ActionDatastore:
    """Encode all steps of the data as a datastore; see `DecisionTransformer.attach_datastore`.

    Raises:
        DatasetError: if the spaces differ from those of the agent's dataset.
        ValueError: if the head needs more neighbours than there are steps.
        ImportError: if the head needs faiss, which is not installed.
    """
    check_datastore_spaces(data, head, agent.facts.observation_space, agent.facts.action_space)
    store = encode_dataset(agent.policy.eval(), agent.windows(data), agent.device, progress_bar)
    return memory_from_datastore(agent, store, head)


def memory_from_datastore(
    agent: "DecisionTransformer", store: Datastore, head: OutputHead
) -> ActionDatastore:
    """Combine a datastore with this head; train the gate of the head if it has one."""
    return build_action_datastore(store, head, partial(retrieval_head, agent.policy.loss.head), agent.seed)
