"""Logged actions as an agent's memory: what it did where its transformer thought alike."""

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
"""A document and a group of tensors more, in files of agents that remember."""
GATE_ENTRIES, GATE_STEPS, GATE_BATCH = 4096, 100, 256
"""Pairs that a gate is learned on, steps of its optimiser, and pairs whose neighbours are found at a time."""

Error = Callable[[Tensor, Neighbours, Tensor], Tensor]
"""How badly outputs (B, C) with these neighbours foretell actions (B, ...) -> (B,)."""


class Memory:
    """Pairs of (output of the transformer at a step, action that was taken there), and how they are read.

    It is searched anew for each action: nothing is learned but the gate of a `SPALM`.

    Args:
        store: the pairs; their groups are episodes. It stays on its device.
        head: how they are mixed in.

    Raises:
        ValueError: if head asks for more neighbours than there are pairs.
        ImportError: if head asks for faiss, which is not installed.
    """

    def __init__(self, store: Datastore, head: OutputHead):
        store.check_reach(head.k)
        self.store, self.head = store, head
        self.reader = head.build(store.keys.shape[1]).to(store.keys)
        self._search = SEARCHES[head.index](store)

    def near(self, h: Tensor) -> Neighbours:
        """The k pairs nearest to outputs h (B, C)."""
        return self.store.neighbours(h, self._search(h, self.head.k))

    def mean(self, h: Tensor, near: Neighbours, own: Tensor) -> Tensor:
        """``(1 - share) own + share * (weighted mean of the neighbours' actions)``, (B, A) as ``own``."""
        theirs = torch.einsum("bk,bka->ba", self.head.weights(near), near.values)
        return torch.lerp(own, theirs, self.reader.share(h)[:, None])

    def sample(self, h: Tensor, near: Neighbours, own: Tensor) -> Tensor:
        """Rows of ``own`` (B, A), each with probability ``share`` replaced by a neighbour's action."""
        drawn = self.head.weights(near).multinomial(1)
        theirs = near.values.take_along_dim(drawn[..., None], dim=1)[:, 0]
        share = self.reader.share(h)
        return torch.where((torch.rand_like(share) < share)[:, None], theirs, own)

    def learn_gate(self, error: Error, generator: torch.Generator) -> None:
        """Learn the head's gate, all else as it is; a head without one is left alone.

        It is learned on `GATE_ENTRIES` of the pairs, or all, by L-BFGS on the mean error. Pairs of the same
        episode are no neighbours there: those would foretell an action far too well.

        Raises:
            ValueError: if fewer than k pairs are from other episodes than the longest one.
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
        """Neighbours of the pairs ``entries`` (B,), from other episodes."""
        search = TorchSearch(self.store)
        parts = [
            search(self.store.keys[part], self.head.k, self.store.groups[part])
            for part in entries.split(GATE_BATCH)
        ]
        return self.store.neighbours(self.store.keys[entries], torch.cat(parts))

    def to_json(self) -> dict[str, Any] | None:
        """The head as plain data."""
        return technique_to_json(self.head)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        store = {name: getattr(self.store, name) for name in ("keys", "values", "groups")}
        return store | self.reader.state_dict()

    @classmethod
    def restored(cls, head: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Self:
        """What `to_json` and `tensors` gave.

        Raises:
            ValueError, KeyError: if they describe no memory.
            CheckpointError: if the weights of its head are not those.
            ImportError: if its head asks for faiss, which is not installed.
        """
        rest = dict(tensors)
        store = Datastore(rest.pop("keys"), rest.pop("values"), rest.pop("groups")).to(device)
        memory = cls(store, technique_from_json("head", head))
        check_weights_fit(memory.reader, rest, "memory")
        memory.reader.load_state_dict(rest)
        return memory
