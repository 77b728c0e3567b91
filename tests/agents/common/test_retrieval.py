"""Mixing of retrieved actions, and training of the gate on neighbors from other episodes."""

import pytest
import torch

from rlxf.agents.common.retrieval import ActionDatastore
from rlxf.attention import KNNLM, SPALM
from rlxf.attention.heads.base import Datastore
from rlxf.attention.registry import technique_to_json
from rlxf.training import CheckpointError

PAIRS, WIDTH, NUMBERS, EPISODE = 120, 5, 2, 10
CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_store(values: torch.Tensor | None = None) -> Datastore:
    values = drawn(PAIRS, NUMBERS, seed=1) if values is None else values
    return Datastore(drawn(PAIRS, WIDTH), values, torch.arange(PAIRS) // EPISODE)


QUERIES, OWN = drawn(7, WIDTH, seed=2), drawn(7, NUMBERS, seed=3)


def test_mean_equals_mean_of_mixture():
    memory = ActionDatastore(some_store(), KNNLM(k=4, weight=0.3, temperature=2.0))
    mixed = memory.mean(QUERIES, memory.near(QUERIES), OWN)
    for query, own, mean in zip(QUERIES, OWN, mixed, strict=True):
        squared = (memory.store.keys - query).square().sum(dim=1)
        nearest = squared.argsort()[:4]
        weights = torch.exp(-squared[nearest] / 2.0)
        retrieved = (weights[:, None] * memory.store.values[nearest]).sum(0) / weights.sum()
        torch.testing.assert_close(mean, 0.3 * retrieved + 0.7 * own)


def test_sample_follows_mixture():
    memory = ActionDatastore(some_store(), KNNLM(k=3, weight=0.3, temperature=5.0))
    rows = 20_000
    query, own = QUERIES[:1].expand(rows, -1), OWN[:1].expand(rows, -1)
    near = memory.near(query)
    torch.manual_seed(0)
    taken = memory.sample(query, near, own)
    shares = [(taken == value).all(dim=1).float().mean() for value in (OWN[0], *near.values[0])]
    expected = [0.7, *(0.3 * memory.head.weights(near)[0]).tolist()]
    torch.testing.assert_close(torch.stack(shares), torch.tensor(expected), atol=0.015, rtol=0)


def learned(error, head=None, seed=0) -> ActionDatastore:
    memory = ActionDatastore(some_store(), head or SPALM(k=6))
    memory.train_gate(error, torch.Generator().manual_seed(seed))
    return memory


def test_gate_training_excludes_own_episode():
    seen = []

    def error(h, near, actions):
        seen.append((near, actions))
        return memory.reader.neighbor_weight(h)

    memory = ActionDatastore(some_store(torch.arange(PAIRS).float()[:, None]), SPALM(k=6))
    memory.train_gate(error, torch.Generator().manual_seed(0))
    near, actions = seen[0]
    assert sorted(actions[:, 0].tolist()) == list(range(PAIRS))
    assert not (near.values[..., 0] // EPISODE == actions // EPISODE).any()


@pytest.mark.parametrize("right", ["neighbors", "agent"])
def test_gate_learns_the_better_predictor(right):
    store = some_store()
    memory = ActionDatastore(store, SPALM(k=6))
    useful = store.keys[:, 0] > 0

    def error(h, near, actions):
        share = memory.reader.neighbor_weight(h)
        trusted = h[:, 0] > 0 if right == "neighbors" else h[:, 0] < 0
        return torch.where(trusted, 1 - share, share)

    memory.train_gate(error, torch.Generator().manual_seed(0))
    share = memory.reader.neighbor_weight(store.keys)
    trusted = useful if right == "neighbors" else ~useful
    assert (share[trusted] > 0.5).float().mean() > 0.95
    assert (share[~trusted] < 0.5).float().mean() > 0.95


def test_head_without_gate_is_unchanged():
    def error(h, near, actions):
        raise AssertionError("there is nothing to learn")

    assert not list(learned(error, KNNLM(k=6)).reader.parameters())


def test_equal_seeds_give_equal_gates():
    def error(h, near, actions):
        return (h @ weights).sigmoid() * 0 + memory.reader.neighbor_weight(h) * actions[:, 0]

    weights, gates = drawn(WIDTH), []
    for _ in range(2):
        memory = ActionDatastore(some_store(), SPALM(k=6))
        memory.train_gate(error, torch.Generator().manual_seed(5))
        gates.append(memory.reader.gate.detach())
    assert torch.equal(*gates)
    assert gates[0].abs().sum() > 0


def test_a_gate_needs_other_episodes():
    store = Datastore(drawn(9, WIDTH), drawn(9, NUMBERS), torch.zeros(9, dtype=torch.long))
    memory = ActionDatastore(store, SPALM(k=1))
    with pytest.raises(ValueError, match="without its largest group of 9 pairs the datastore has 0"):
        memory.train_gate(lambda h, near, actions: memory.reader.neighbor_weight(h), torch.Generator())


def test_more_neighbors_than_pairs_are_refused():
    with pytest.raises(ValueError, match=f"at most the number of pairs, {PAIRS}, got k={PAIRS + 1}"):
        ActionDatastore(some_store(), KNNLM(k=PAIRS + 1))


@pytest.mark.parametrize("head", [KNNLM(k=4, temperature=2.0), SPALM(k=4)], ids=repr)
def test_memory_roundtrip(head):
    memory = ActionDatastore(some_store(), head)
    for parameter in memory.reader.parameters():
        torch.nn.init.normal_(parameter)
    back = ActionDatastore.from_tensors(technique_to_json(memory.head), memory.tensors(), CPU)
    assert back.head == head
    near, again = memory.near(QUERIES), back.near(QUERIES)
    assert torch.equal(memory.mean(QUERIES, near, OWN), back.mean(QUERIES, again, OWN))


@pytest.mark.parametrize(
    ("lacking", "error"), [("keys", KeyError), ("groups", KeyError), ("gate", CheckpointError)]
)
def test_missing_tensor_is_rejected(lacking, error):
    memory = ActionDatastore(some_store(), SPALM(k=4))
    tensors = {name: tensor for name, tensor in memory.tensors().items() if name != lacking}
    with pytest.raises(error, match=lacking):
        ActionDatastore.from_tensors(technique_to_json(memory.head), tensors, CPU)
