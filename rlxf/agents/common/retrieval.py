"""Datastores of logged actions, the action heads that read them (kNN-LM, SPALM), and agents that have one."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions, action_encoder, select_choices
from rlxf.agents.common.losses import cross_entropies, squared_error
from rlxf.attention import KNNLM, TransformerSpec
from rlxf.attention.heads.base import SEARCHES, Datastore, Neighbors, OutputHead, TorchSearch
from rlxf.attention.registry import technique_from_json, technique_to_json
from rlxf.data import DatasetError, Trajectories, as_trajectories
from rlxf.data.dataset_source import Dataset
from rlxf.data.spaces import space_mismatches
from rlxf.training import Archive
from rlxf.training.states import check_weights_fit
from rlxf.utils.extras import check_search_backend

DATASTORE_GROUP = "datastore"
"""Name of the document and of the tensor group of a datastore in a checkpoint."""
GATE_ENTRIES = 4096
"""Number of pairs that the gate is trained on."""
GATE_ITERATIONS = 100
"""Maximum number of L-BFGS iterations of the gate."""
GATE_BATCH = 256
"""Batch size of the search for the training of the gate."""

Error = Callable[[Tensor, Neighbors, Tensor], Tensor]
"""Prediction error for actions (B, ...), given outputs (B, C) and their neighbors -> (B,)."""


class ActionDatastore:
    """Datastore of pairs (transformer output at a step, action taken there), and the head that reads it.

    Each action requires a search. Nothing is trained except the gate of a `SPALM`.

    Args:
        store: the pairs; their groups are episodes. It stays on its device.
        head: combines the agent's own actions with those of the neighbors.

    Raises:
        ValueError: if head needs more neighbors than there are pairs.
        ImportError: if head needs faiss, which is not installed.
    """

    def __init__(self, store: Datastore, head: OutputHead):
        store.check_k(head.k)
        self.store, self.head = store, head
        self.reader = head.build(store.keys.shape[1]).to(store.keys)
        self._search = SEARCHES[head.index](store)

    def near(self, h: Tensor) -> Neighbors:
        """Return the k nearest pairs of outputs h (B, C)."""
        return self.store.neighbors(h, self._search(h, self.head.k))

    def mean(self, h: Tensor, near: Neighbors, own: Tensor) -> Tensor:
        """``(1 - w) own + w * (weighted mean of the neighbors' actions)``, (B, A) like ``own``."""
        neighbor_mean = torch.einsum("bk,bka->ba", self.head.weights(near), near.values)
        return torch.lerp(own, neighbor_mean, self.reader.neighbor_weight(h)[:, None])

    def sample(self, h: Tensor, near: Neighbors, own: Tensor) -> Tensor:
        """Replace each row of ``own`` (B, A) by a neighbor's action with probability w, as in `mean`."""
        chosen = self.head.weights(near).multinomial(1)
        neighbor_actions = near.values.take_along_dim(chosen[..., None], dim=1)[:, 0]
        weight = self.reader.neighbor_weight(h)
        return torch.where((torch.rand_like(weight) < weight)[:, None], neighbor_actions, own)

    def train_gate(self, error: Error, generator: torch.Generator) -> None:
        """Train the gate of the head, if it has one; nothing else changes.

        The gate minimizes the mean error over at most `GATE_ENTRIES` pairs with L-BFGS. Neighbors from the
        pair's own episode are excluded, because they would predict its action too well.

        Args:
            error: prediction error of the agent with this datastore.
            generator: selects the pairs.

        Raises:
            ValueError: if fewer than k pairs are outside of the longest episode.
        """
        parameters = list(self.reader.parameters())
        if not parameters:
            return
        chosen = torch.randperm(len(self.store), generator=generator)[:GATE_ENTRIES]
        chosen = chosen.to(self.store.keys.device)
        h = self.store.keys[chosen]
        near = self._elsewhere(chosen)
        actions = self.store.values[chosen]
        optimizer = torch.optim.LBFGS(parameters, max_iter=GATE_ITERATIONS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = error(h, near, actions).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    def _elsewhere(self, entries: Tensor) -> Neighbors:
        """Return the neighbors of the pairs ``entries`` (B,) from other episodes."""
        search = TorchSearch(self.store)
        keys = self.store.keys
        groups = self.store.groups
        found = [search(keys[part], self.head.k, groups[part]) for part in entries.split(GATE_BATCH)]
        return self.store.neighbors(keys[entries], torch.cat(found))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the datastore and of the head by name."""
        store = {name: getattr(self.store, name) for name in ("keys", "values", "groups")}
        return store | self.reader.state_dict()

    @classmethod
    def from_tensors(cls, head: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Self:
        """Restore a datastore from the result of `tensors` and its head, a result of `technique_to_json`.

        Raises:
            ValueError, KeyError: if the data do not describe a datastore.
            CheckpointError: if the weights do not fit the head.
            ImportError: if the head needs faiss, which is not installed.
        """
        rest = dict(tensors)
        store = Datastore(rest.pop("keys"), rest.pop("values"), rest.pop("groups")).to(device)
        datastore = cls(store, technique_from_json("head", head))
        check_weights_fit(datastore.reader, rest, DATASTORE_GROUP)
        datastore.reader.load_state_dict(rest)
        return datastore

    def check_fits(self, width: int, actions: BoxActions | DiscreteActions) -> None:
        """Raise ValueError unless keys have the width of the transformer and values are valid actions."""
        keys, values = self.store.keys, self.store.values
        if keys.shape[1] != width:
            raise ValueError(f"its datastore has width {keys.shape[1]}, the transformer has width {width}")
        if not actions.holds(values):
            raise ValueError(
                f"its datastore holds values of shape {tuple(values.shape)} and dtype {values.dtype}, which "
                f"are not valid actions of the agent"
            )


class BoxHead(Protocol):
    """Action head of an agent with Box actions, without retrieval."""

    actions: BoxActions

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return actions (E, A) for outputs y (E, C), in units of the environment."""


class DiscreteHead(Protocol):
    """Action head of an agent with Discrete, MultiDiscrete or MultiBinary actions, without retrieval."""

    actions: DiscreteActions

    @property
    def net(self) -> nn.Linear:
        """Linear layer whose output concatenates the logits of all choices."""


@dataclass(frozen=True, eq=False)
class BoxRetrievalPolicy:
    """Retrieval policy for Box actions: a mixture of the agent's own actions and those of the neighbors.

    Actions are mixed in units of the environment. A sample is always one whole action vector: components of
    different actions are never combined.

    Args:
        own: action head of the agent.
        datastore: datastore of logged actions.
    """

    own: BoxHead
    datastore: ActionDatastore

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return actions for y (E, C): a sample of the mixture, or its mean if ``deterministic``.

        The mean combines the neighbors' actions with the deterministic action of the agent's head. For a
        deterministic head this is the mean of the mixture. For a Gaussian head its mode replaces its mean.
        """
        near = self.datastore.near(y)
        own = self.own.choose(y, deterministic)
        return self.datastore.mean(y, near, own) if deterministic else self.datastore.sample(y, near, own)

    def error(self, y: Tensor, near: Neighbors, actions: Tensor) -> Tensor:
        """Return the squared error of the mean for actions scaled to [-1, 1]: (B, C), (B, A) -> (B,)."""
        with torch.no_grad():
            own = self.own.choose(y, deterministic=True)
        scaled = self.own.actions
        return squared_error(scaled(self.datastore.mean(y, near, own)), scaled(actions))


@dataclass(frozen=True, eq=False)
class DiscreteRetrievalPolicy:
    """Retrieval policy for discrete actions: mixes the distribution of each choice with the neighbors'.

    Args:
        own: action head of the agent.
        datastore: datastore of logged actions.
    """

    own: DiscreteHead
    datastore: ActionDatastore

    def choose(self, y: Tensor, deterministic: bool) -> Tensor:
        """Return actions for y (E, C): a sample, or the most likely ones if ``deterministic``."""
        return self.own.actions.from_choices(select_choices(self.logits(y), deterministic))

    def logits(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return log probabilities for y (E, C): a tensor (E, A) for each choice."""
        return self._log_probs(y, self.datastore.near(y))

    def error(self, y: Tensor, near: Neighbors, actions: Tensor) -> Tensor:
        """Return the cross-entropy of actions (B, ...) as (B,)."""
        return cross_entropies(self._log_probs(y, near), self.own.actions.to_choices(actions))

    def _log_probs(self, y: Tensor, near: Neighbors) -> tuple[Tensor, ...]:
        net = self.own.net
        sizes = self.own.actions.sizes
        layers = zip(net.weight.detach().split(sizes), net.bias.detach().split(sizes), strict=True)
        taken = self.own.actions.to_choices(near.values).unbind(-1)
        return tuple(
            self.datastore.reader.log_prob(y, near._replace(values=values), weight, bias)
            for values, (weight, bias) in zip(taken, layers, strict=True)
        )


RetrievalPolicy: TypeAlias = BoxRetrievalPolicy | DiscreteRetrievalPolicy


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
        own = self.observation_space, self.action_space
        return space_mismatches(own, (observation_space, action_space))

    @abstractmethod
    def _action_head(self) -> BoxHead | DiscreteHead:
        """Return the action head of the agent, without retrieval."""

    def _retrieval_policy(self, datastore: ActionDatastore) -> RetrievalPolicy:
        """Return the action head of the agent with retrieval from a datastore."""
        own = self._action_head()
        policy: type[Any] = own.actions.select(BoxRetrievalPolicy, DiscreteRetrievalPolicy)
        return policy(own, datastore)

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


def check_no_datastore(datastore: ActionDatastore | None) -> None:
    """Raise ValueError if there is a datastore, because training would make its keys stale."""
    if datastore is not None:
        raise ValueError(
            "an agent with a datastore cannot be trained, because its stored outputs would become stale. "
            "Call detach_datastore() before training and attach_datastore(...) again afterwards"
        )


def check_export_without_datastore(datastore: ActionDatastore | None) -> None:
    """Raise ValueError if an agent to export has a datastore, because an exported step cannot search it."""
    if datastore is not None:
        raise ValueError(
            "an agent with a datastore cannot be exported, because its actions depend on a search in the "
            "datastore: call detach_datastore() first"
        )


def check_teacher_without_datastore(datastore: ActionDatastore | None) -> None:
    """Raise ValueError if a teacher has a datastore, because distillation only uses its own head."""
    if datastore is not None:
        raise ValueError(
            "the teacher has a datastore, but a student learns only from the teacher's own head: call the "
            "teacher's detach_datastore() first"
        )
