"""The nearest pairs are found: those that comparing all of them one by one finds."""

import sys

import pytest
import torch

from rlxf.attention.heads import search
from rlxf.attention.heads.datastore import Datastore
from rlxf.attention.heads.search import FaissSearch, TorchSearch

PAIRS, WIDTH, QUERIES = 90, 6, 12


def some_store(pairs: int = PAIRS, seed: int = 0) -> Datastore:
    """Pairs from episodes of 9 steps."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(pairs, WIDTH, generator=generator)
    return Datastore(keys, torch.arange(pairs), torch.arange(pairs) // 9)


def some_queries(seed: int = 1) -> torch.Tensor:
    return torch.randn(QUERIES, WIDTH, generator=torch.Generator().manual_seed(seed))


def one_by_one(store: Datastore, query: torch.Tensor, k: int, without: int | None = None) -> list[int]:
    far = [float((key - query).square().sum()) for key in store.keys]
    allowed = [i for i in range(len(store)) if without is None or int(store.groups[i]) != without]
    return sorted(allowed, key=lambda i: far[i])[:k]


def found(store: Datastore, entries: torch.Tensor, queries: torch.Tensor) -> list[list[int]]:
    return store.neighbours(queries, entries).values.tolist()


@pytest.mark.parametrize("k", [1, 7, PAIRS])
def test_the_nearest_are_found_in_order(k):
    store, queries = some_store(), some_queries()
    entries = TorchSearch(store)(queries, k)
    assert found(store, entries, queries) == [one_by_one(store, query, k) for query in queries]


@pytest.mark.parametrize("scores", [1, QUERIES * 11, QUERIES * PAIRS])
def test_so_they_are_stretch_by_stretch(scores, monkeypatch):
    monkeypatch.setattr(search, "SCORES", scores)
    store, queries = some_store(), some_queries()
    entries = TorchSearch(store)(queries, 7)
    assert found(store, entries, queries) == [one_by_one(store, query, 7) for query in queries]


def test_stretches_bound_what_is_held(monkeypatch):
    monkeypatch.setattr(search, "SCORES", QUERIES * 11)
    store, sizes, product = some_store(), [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: _noted(sizes, product(*args, **options)))
    TorchSearch(store)(some_queries(), 7)
    assert max(sizes) <= QUERIES * 11
    assert sum(sizes) == QUERIES * PAIRS


def _noted(sizes: list[int], scores: torch.Tensor) -> torch.Tensor:
    sizes.append(scores.numel())
    return scores


def test_a_group_is_left_out_for_each_query_by_itself(monkeypatch):
    monkeypatch.setattr(search, "SCORES", QUERIES * 11)
    store, queries = some_store(), some_queries()
    without = torch.arange(QUERIES) % 10
    entries = TorchSearch(store)(queries, 7, without)
    expected = [one_by_one(store, q, 7, g) for q, g in zip(queries, without.tolist(), strict=True)]
    assert found(store, entries, queries) == expected
    assert not (store.groups[entries] == without[:, None]).any()


def test_how_many_queries_are_asked_at_a_time_changes_nothing():
    store, queries = some_store(), some_queries()
    search = TorchSearch(store)
    singly = torch.cat([search(query[None], 7) for query in queries])
    assert found(store, search(queries, 7), queries) == found(store, singly, queries)


def test_distances_are_those_of_the_keys():
    store, queries = some_store(), some_queries()
    near = store.neighbours(queries, TorchSearch(store)(queries, 7))
    keys = store.keys[near.values]
    torch.testing.assert_close(near.squared, (keys - queries[:, None]).norm(dim=-1) ** 2)
    assert (near.squared.diff(dim=1) >= 0).all()


def test_a_key_is_at_distance_0_from_itself_however_long_it_is():
    keys = some_store().keys + 100
    store = Datastore(keys, torch.arange(PAIRS), torch.zeros(PAIRS, dtype=torch.long))
    near = store.neighbours(keys, TorchSearch(store)(keys, 1))
    assert (near.values[:, 0] == torch.arange(PAIRS)).all()
    assert (near.squared == 0).all()


@pytest.mark.parametrize("make", [TorchSearch, FaissSearch])
@pytest.mark.parametrize("asked", [1, PAIRS])
def test_the_nearest_are_found_far_from_the_origin(make, asked):
    if make is FaissSearch:
        pytest.importorskip("faiss")
    keys = some_store().keys / 10 + 300
    store = Datastore(keys, torch.arange(PAIRS), torch.zeros(PAIRS, dtype=torch.long))
    queries = keys + some_store(seed=1).keys / 1000
    given, search = keys.clone(), make(store)
    entries = torch.cat([search(some, 1) for some in queries.split(asked)])[:, 0]
    assert entries.tolist() == [one_by_one(store, query, 1)[0] for query in queries]
    assert torch.equal(store.keys, given)


def test_faiss_finds_the_same():
    pytest.importorskip("faiss")
    store, queries = some_store(300), some_queries()
    ours, theirs = (found(store, make(store)(queries, 9), queries) for make in (TorchSearch, FaissSearch))
    assert ours == theirs


def test_faiss_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"needs faiss: pip install .*\[knn\]', or take index=.torch."):
        FaissSearch(some_store())


def test_more_neighbours_than_there_are_pairs_are_refused():
    with pytest.raises(ValueError, match="k=91 neighbours were asked for, there are 90 pairs"):
        TorchSearch(some_store())(some_queries(), 91)
    with pytest.raises(ValueError, match="largest group, of 9 pairs, the datastore has 81"):
        TorchSearch(some_store())(some_queries(), 82, torch.zeros(QUERIES, dtype=torch.long))


@pytest.mark.parametrize(
    ("keys", "values", "groups"),
    [((0, 3), (0,), (0,)), ((4,), (4,), (4,)), ((4, 3), (5,), (4,)), ((4, 3), (4, 2), (3,))],
)
def test_what_is_no_datastore_is_refused(keys, values, groups):
    with pytest.raises(ValueError, match=r"needs keys \(N, C\), values \(N, \.\.\.\) and groups \(N,\)"):
        Datastore(torch.zeros(keys), torch.zeros(values), torch.zeros(groups, dtype=torch.long))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_keys_that_are_no_numbers_are_refused(wrong):
    keys = some_store().keys.clone()
    keys[3, 2] = wrong
    with pytest.raises(ValueError, match="NaN or infinite"):
        Datastore(keys, torch.arange(PAIRS), torch.arange(PAIRS))
