"""Agents with a datastore of logged actions: attaching, detaching and checks."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from gymnasium import spaces

from rlxf.agents.common.actions import action_encoder
from rlxf.agents.common.retrieval import (
    DATASTORE_GROUP,
    ActionDatastore,
    RetrievalPolicy,
    build_action_datastore,
)
from rlxf.attention import KNNLM, TransformerSpec
from rlxf.attention.faiss_support import check_search_backend
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.datastore import Datastore
from rlxf.data import DatasetError, Trajectories, as_trajectories
from rlxf.data.dataset_source import Dataset
from rlxf.data.spaces import action_mismatch, observation_mismatch
from rlxf.training import Archive


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

    @abstractmethod
    def _retrieval_policy(self, datastore: ActionDatastore) -> RetrievalPolicy:
        """Return the action head of the agent with retrieval from a datastore."""

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
        with memory as while acting, normalizes observations with the current statistics of the
        ``VecNormalize`` around its environment, if there is one, and clips its Box actions to their bounds
        before they are mixed.

        N steps take ``4 N (C + A) + 8 N`` bytes, with C the width of the core and A the number of values in
        an action: 106 MB for 200,000 steps of Hopper at width 128. The datastore is saved with the agent. The
        gate of a `SPALM` is trained here on the same steps; retrieval for a step excludes its own episode.

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
                steps in other episodes. Also if the core has early exits, since their outputs come from
                different depths.
            ImportError: if the head needs faiss, which is not installed.
        """
        self.core.depth.check_no_early_exit("attach_datastore")
        data, head = as_trajectories(dataset, download), KNNLM() if head is None else head
        check_datastore_spaces(data, head, self.observation_space, self.action_space)
        self.datastore = self.build_datastore(self._encode_dataset(data, progress_bar), head)
        return self

    def build_datastore(self, store: Datastore, head: OutputHead) -> ActionDatastore:
        """Combine encoded trajectories with a head, and train the gate of the head."""
        return build_action_datastore(store, head, self._retrieval_policy, self.seed)

    def detach_datastore(self) -> Self:
        """Detach the datastore of `attach_datastore`."""
        self.datastore = None
        return self

    def _add_datastore(self, archive: Archive) -> Archive:
        """Return the checkpoint of an agent with its datastore, if there is one; tensors are not copied."""
        if self.datastore is None:
            return archive
        documents = archive.documents | {DATASTORE_GROUP: self.datastore.to_json()}
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


def check_datastore_spaces(
    data: Trajectories,
    head: OutputHead,
    observation_space: spaces.Space,
    action_space: spaces.Space,
) -> None:
    """Check that an agent with these spaces can use the data as its datastore, before reading them.

    Raises:
        DatasetError: if the spaces of the data differ from the agent's.
        ValueError: if head needs more neighbors than there are steps.
        ImportError: if head needs faiss, which is not installed.
    """
    check_search_backend(head.index)
    pairs = {
        "observation": observation_mismatch(observation_space, data.observation_space),
        "action": action_mismatch(action_space, data.action_space),
    }
    for kind, mismatch in pairs.items():
        if mismatch:
            raise DatasetError(
                f"{', '.join(data.dataset_ids)} cannot be a datastore of this agent: {kind} space: "
                f"{mismatch}; use trajectories with the spaces of the agent's training environment"
            )
    if head.k > data.steps:
        raise ValueError(
            f"{type(head).__name__} needs k={head.k} neighbours, but the data have only {data.steps} steps: "
            f"lower k"
        )


def check_no_datastore(datastore: ActionDatastore | None) -> None:
    """Raise ValueError if there is a datastore, because training would make its keys stale."""
    if datastore is not None:
        raise ValueError(
            "an agent with a datastore cannot be trained, because its stored outputs would become stale. "
            "Call detach_datastore() before training and attach_datastore(...) again afterwards"
        )


def check_teacher_without_datastore(datastore: ActionDatastore | None) -> None:
    """Raise ValueError if a teacher has a datastore, because distillation only uses its own head."""
    if datastore is not None:
        raise ValueError(
            "the teacher has a datastore, but a student learns only from the teacher's own head: call the "
            "teacher's detach_datastore() first"
        )
