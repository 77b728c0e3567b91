"""Datastores of logged actions, and the action heads that read them (kNN-LM, SPALM)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions, select_choices
from rlxf.agents.common.losses import cross_entropies, squared_error
from rlxf.attention.heads.base import SEARCHES, Datastore, Neighbors, OutputHead, TorchSearch
from rlxf.attention.registry import technique_from_json
from rlxf.training.states import check_weights_fit

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
