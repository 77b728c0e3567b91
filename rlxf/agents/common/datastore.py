"""Agents that can have a datastore of logged actions."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from gymnasium import spaces

from rlxf.agents.common.actions import action_encoder
from rlxf.agents.common.retrieval import (
    DATASTORE_GROUP,
    ActionDatastore,
    BoxHead,
    BoxRetrievalPolicy,
    DiscreteHead,
    DiscreteRetrievalPolicy,
    RetrievalPolicy,
)
from rlxf.attention import KNNLM, TransformerSpec
from rlxf.attention.heads.base import Datastore, OutputHead
from rlxf.attention.registry import technique_to_json
from rlxf.data import DatasetError, Trajectories, as_trajectories
from rlxf.data.dataset_source import Dataset
from rlxf.data.space_comparison import space_mismatches
from rlxf.training import Archive
from rlxf.utils.extras import check_search_backend

TRAINING_REASON = (
    "an agent with a datastore cannot be trained, because its stored outputs would become stale. Call "
    "detach_datastore() before training and attach_datastore(...) again afterwards"
)
EXPORT_REASON = (
    "an agent with a datastore cannot be exported, because its actions depend on a search in the datastore: "
    "call detach_datastore() first"
)
TEACHER_REASON = (
    "the teacher has a datastore, but a student learns only from the teacher's own head: call the teacher's "
    "detach_datastore() first"
)
"""Reasons for `check_no_datastore`."""


class DatastoreMixin:
    """Agent that can use logged trajectories as a datastore in `predict`, without training."""

    core: TransformerSpec
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    seed: int | None
    device: torch.device
    datastore: ActionDatastore | None = None
    """Datastore of `attach_datastore`; None if there is none."""

    @abstractmethod
    def _encode_dataset(self, data: Trajectories, progress_bar: bool) -> Datastore:
        """Return the input of the action head, the action and the episode of each step of the data."""

    def space_mismatches(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield the differences of these spaces from those of the agent, as `rlxf.data.spaces` does."""
        expected = self.observation_space, self.action_space
        return space_mismatches(expected, (observation_space, action_space))

    @abstractmethod
    def _action_head(self) -> BoxHead | DiscreteHead:
        """Return the action head of the agent, without retrieval."""

    def _retrieval_policy(self, datastore: ActionDatastore) -> RetrievalPolicy:
        """Return the action head of the agent with retrieval from a datastore."""
        head = self._action_head()
        policy: type[Any] = head.actions.select(BoxRetrievalPolicy, DiscreteRetrievalPolicy)
        return policy(head, datastore)

    def attach_datastore(
        self,
        dataset: Dataset | Sequence[Dataset] | Trajectories,
        head: OutputHead | None = None,
        download: bool = False,
        progress_bar: bool = False,
    ) -> Self:
        """Attach a kNN datastore of these trajectories, without training; it replaces an earlier one.

        The key of a step is the input of the action head, which is an output of the transformer. Its value is
        the logged action. For each action the agent retrieves the nearest keys and mixes their actions into
        its prediction. Keys depend on what the transformer reads. For a `DecisionTransformer` this includes
        the return-to-go, so steps with a return near the target are nearer. Keys of a `GTrXLPPO` do not
        depend on rewards, so its trajectories should show good behavior. A `GTrXLPPO` encodes each episode
        with the memory that it has while acting, normalizes observations with the current statistics of the
        ``VecNormalize`` around its environment, if there is one, and clips its Box actions to their bounds
        before they are mixed.

        N steps take ``4 N (C + A) + 8 N`` bytes with Box actions and ``4 N C + 8 N (A + 1)`` with discrete
        ones, with C the width of the core and A the number of values in an action: 106 MB for 200,000 steps
        of Hopper at width 128. The datastore is saved with the agent. The gate of a `SPALM` is trained here
        on the same steps; retrieval for a step excludes its own episode.

        An agent with a datastore cannot be trained, since its outputs would no longer match the stored keys.
        Call `detach_datastore`, train, and call `attach_datastore` again.

        Args:
            dataset: a Minari id, a ``MinariDataset``, a sequence of these, or `Trajectories`, with the spaces
                of the agent.
            head: `KNNLM` or `SPALM`; None for ``KNNLM()``.
            download: True to download a dataset that is not on this machine.
            progress_bar: show a progress bar.

        Raises:
            DatasetError: if the dataset is unknown, empty or damaged, or its spaces differ.
            ValueError: if the head needs more neighbors than there are steps or, with a gate, than there are
                steps in other episodes; if the core has early exits, since their outputs come from different
                depths; for a `GTrXLPPO` with ``persist_memory_across_episodes=True``, since the episodes of a
                dataset are encoded separately.
            ImportError: if the head needs faiss, which is not installed.
        """
        self.core.depth.check_no_early_exit("attach_datastore")
        data = as_trajectories(dataset, download)
        head = KNNLM() if head is None else head
        self._check_datastore(data, head)
        self.datastore = self.build_datastore(self._encode_dataset(data, progress_bar), head)
        return self

    def _check_datastore(self, data: Trajectories, head: OutputHead) -> None:
        """Check spaces and number of steps of the data before encoding; errors as in `attach_datastore`."""
        check_search_backend(head.index)
        for kind, mismatch in self.space_mismatches(data.observation_space, data.action_space):
            raise DatasetError(
                f"{', '.join(data.dataset_ids)} cannot be a datastore of this agent: {kind} space: "
                f"{mismatch}; use trajectories with the spaces of the agent's training environment"
            )
        if head.k > data.steps:
            raise ValueError(
                f"{type(head).__name__} needs k={head.k} neighbors, but the data have only {data.steps} "
                f"steps: lower k"
            )

    def build_datastore(self, store: Datastore, head: OutputHead) -> ActionDatastore:
        """Combine encoded trajectories with a head, and train the gate of the head.

        The seed of the agent, or 0, selects the pairs that the gate is trained on.
        """
        datastore = ActionDatastore(store, head)
        generator = torch.Generator().manual_seed(self.seed or 0)
        datastore.train_gate(self._retrieval_policy(datastore).error, generator)
        return datastore

    def detach_datastore(self) -> Self:
        """Detach the datastore of `attach_datastore`."""
        self.datastore = None
        return self

    def _add_datastore(self, archive: Archive) -> Archive:
        """Return the checkpoint of an agent with its datastore, if there is one; tensors are not copied."""
        if self.datastore is None:
            return archive
        documents = archive.documents | {DATASTORE_GROUP: technique_to_json(self.datastore.head)}
        return Archive(documents, archive.tensors | {DATASTORE_GROUP: self.datastore.tensors()})

    def _restore_datastore(self, archive: Archive) -> None:
        """Attach the datastore in a checkpoint, if there is one.

        Raises:
            ValueError, KeyError, CheckpointError: if it does not fit the agent.
            ImportError: if its head needs faiss, which is not installed.
        """
        if DATASTORE_GROUP not in archive.tensors:
            return
        document, tensors = archive.documents[DATASTORE_GROUP], archive.tensors[DATASTORE_GROUP]
        datastore = ActionDatastore.from_tensors(document, tensors, self.device)
        datastore.check_fits(self.core.width, action_encoder(self.action_space))
        self.datastore = datastore


def check_no_datastore(datastore: ActionDatastore | None, reason: str) -> None:
    """Raise ValueError if there is a datastore.

    Args:
        datastore: datastore of the agent.
        reason: message of the error: `TRAINING_REASON`, `EXPORT_REASON` or `TEACHER_REASON`.
    """
    if datastore is not None:
        raise ValueError(reason)
