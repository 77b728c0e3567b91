"""Retrieval of logged actions by nearest neighbours of transformer outputs."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.datastore import Datastore, Neighbours
from rlxf.attention.heads.search import SEARCHES, TorchSearch
from rlxf.attention.techniques import technique_from_json, technique_to_json
from rlxf.training.fit import check_weights_fit

MEMORY = "memory"
"""Name of the document and of the tensor group of a datastore in a checkpoint."""
GATE_ENTRIES, GATE_STEPS, GATE_BATCH = 4096, 100, 256
"""Pairs that the gate is trained on, its optimizer steps, and pairs per batch of the neighbour search."""

Error = Callable[[Tensor, Neighbours, Tensor], Tensor]
"""Prediction error for actions (B, ...), given outputs (B, C) and their neighbours -> (B,)."""


class Memory:
    """Datastore of pairs (transformer output at a step, action taken there), and the head that reads it.

    Each action requires a search. Nothing is trained except the gate of a `SPALM`.

    Args:
        store: the pairs; their groups are episodes. It stays on its device.
        head: combines the agent's own actions with those of the neighbours.

    Raises:
        ValueError: if head needs more neighbours than there are pairs.
        ImportError: if head needs faiss, which is not installed.
    """

    def __init__(self, store: Datastore, head: OutputHead):
        store.check_reach(head.k)
        self.store, self.head = store, head
        self.reader = head.build(store.keys.shape[1]).to(store.keys)
        self._search = SEARCHES[head.index](store)

    def near(self, h: Tensor) -> Neighbours:
        """Return the k nearest pairs of outputs h (B, C)."""
        return self.store.neighbours(h, self._search(h, self.head.k))

    def mean(self, h: Tensor, near: Neighbours, own: Tensor) -> Tensor:
        """``(1 - share) own + share * (weighted mean of the neighbours' actions)``, (B, A) like ``own``."""
        neighbour_mean = torch.einsum("bk,bka->ba", self.head.weights(near), near.values)
        return torch.lerp(own, neighbour_mean, self.reader.share(h)[:, None])

    def sample(self, h: Tensor, near: Neighbours, own: Tensor) -> Tensor:
        """Replace each row of ``own`` (B, A) by a neighbour's action with probability ``share``."""
        chosen = self.head.weights(near).multinomial(1)
        neighbour_actions = near.values.take_along_dim(chosen[..., None], dim=1)[:, 0]
        share = self.reader.share(h)
        return torch.where((torch.rand_like(share) < share)[:, None], neighbour_actions, own)

    def learn_gate(self, error: Error, generator: torch.Generator) -> None:
        """Train the gate of the head, if it has one; nothing else changes.

        The gate minimises the mean error over at most `GATE_ENTRIES` pairs with L-BFGS. Neighbours from the
        pair's own episode are excluded, because they would predict its action too well.

        Args:
            error: prediction error of the agent with this datastore.
            generator: selects the pairs.

        Raises:
            ValueError: if fewer than k pairs are outside of the longest episode.
        """
        if not list(self.reader.parameters()):
            return
        chosen = torch.randperm(len(self.store), generator=generator)[:GATE_ENTRIES].to(
            self.store.keys.device
        )
        h, near, actions = self.store.keys[chosen], self._elsewhere(chosen), self.store.values[chosen]
        optimizer = torch.optim.LBFGS(
            self.reader.parameters(), max_iter=GATE_STEPS, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = error(h, near, actions).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    def _elsewhere(self, entries: Tensor) -> Neighbours:
        """Return the neighbours of the pairs ``entries`` (B,) from other episodes."""
        search = TorchSearch(self.store)
        parts = [
            search(self.store.keys[part], self.head.k, self.store.groups[part])
            for part in entries.split(GATE_BATCH)
        ]
        return self.store.neighbours(self.store.keys[entries], torch.cat(parts))

    def to_json(self) -> dict[str, Any] | None:
        """Return the specification of the head as JSON data."""
        return technique_to_json(self.head)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the datastore and of the head by name."""
        store = {name: getattr(self.store, name) for name in ("keys", "values", "groups")}
        return store | self.reader.state_dict()

    @classmethod
    def restored(cls, head: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Self:
        """Restore a memory from the results of `to_json` and `tensors`.

        Raises:
            ValueError, KeyError: if the data do not describe a memory.
            CheckpointError: if the weights do not fit the head.
            ImportError: if the head needs faiss, which is not installed.
        """
        rest = dict(tensors)
        store = Datastore(rest.pop("keys"), rest.pop("values"), rest.pop("groups")).to(device)
        memory = cls(store, technique_from_json("head", head))
        check_weights_fit(memory.reader, rest, "memory")
        memory.reader.load_state_dict(rest)
        return memory
