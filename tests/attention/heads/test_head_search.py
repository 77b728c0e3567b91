"""Search backends of output heads return the same neighbors as brute force."""

import sys

import pytest
import torch

from rlxf.attention.heads import base
from rlxf.attention.heads.base import Datastore, FaissSearch, TorchSearch

PAIRS, WIDTH, QUERIES = 90, 6, 12


def some_store(pairs: int = PAIRS, seed: int = 0) -> Datastore:
    """Return a datastore of pairs from episodes of 9 steps."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(pairs, WIDTH, generator=generator)
    return Datastore(keys, torch.arange(pairs), torch.arange(pairs) // 9)


def some_queries(seed: int = 1) -> torch.Tensor:
    return torch.randn(QUERIES, WIDTH, generator=torch.Generator().manual_seed(seed))


def brute_force(store: Datastore, query: torch.Tensor, k: int, without: int | None = None) -> list[int]:
    far = [float((key - query).square().sum()) for key in store.keys]
    allowed = [i for i in range(len(store)) if without is None or int(store.groups[i]) != without]
    return sorted(allowed, key=lambda i: far[i])[:k]


def neighbor_values(store: Datastore, entries: torch.Tensor, queries: torch.Tensor) -> list[list[int]]:
    return store.neighbors(queries, entries).values.tolist()


@pytest.mark.parametrize("k", [1, 7, PAIRS])
def test_neighbors_equal_brute_force_in_order(k):
    store, queries = some_store(), some_queries()
    entries = TorchSearch(store)(queries, k)
    assert neighbor_values(store, entries, queries) == [brute_force(store, query, k) for query in queries]


@pytest.mark.parametrize("scores", [1, QUERIES * 11, QUERIES * PAIRS])
def test_chunked_search_equals_brute_force(scores, monkeypatch):
    monkeypatch.setattr(base, "MAX_SCORES", scores)
    store, queries = some_store(), some_queries()
    entries = TorchSearch(store)(queries, 7)
    assert neighbor_values(store, entries, queries) == [brute_force(store, query, 7) for query in queries]


def test_chunks_bound_memory(monkeypatch):
    monkeypatch.setattr(base, "MAX_SCORES", QUERIES * 11)
    store, sizes, product = some_store(), [], torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *args, **options: _record_size(sizes, product(*args, **options))
    )
    TorchSearch(store)(some_queries(), 7)
    assert max(sizes) <= QUERIES * 11
    assert sum(sizes) == QUERIES * PAIRS


def _record_size(sizes: list[int], scores: torch.Tensor) -> torch.Tensor:
    sizes.append(scores.numel())
    return scores


def test_each_query_excludes_its_own_group(monkeypatch):
    monkeypatch.setattr(base, "MAX_SCORES", QUERIES * 11)
    store, queries = some_store(), some_queries()
    without = torch.arange(QUERIES) % 10
    entries = TorchSearch(store)(queries, 7, without)
    expected = [brute_force(store, q, 7, g) for q, g in zip(queries, without.tolist(), strict=True)]
    assert neighbor_values(store, entries, queries) == expected
    assert not (store.groups[entries] == without[:, None]).any()


def test_results_are_independent_of_query_batch_size():
    store, queries = some_store(), some_queries()
    base = TorchSearch(store)
    singly = torch.cat([base(query[None], 7) for query in queries])
    assert neighbor_values(store, base(queries, 7), queries) == neighbor_values(store, singly, queries)


def test_distances_are_squared_l2_and_ascending():
    store, queries = some_store(), some_queries()
    near = store.neighbors(queries, TorchSearch(store)(queries, 7))
    keys = store.keys[near.values]
    torch.testing.assert_close(near.squared, (keys - queries[:, None]).norm(dim=-1) ** 2)
    assert (near.squared.diff(dim=1) >= 0).all()


def test_key_has_distance_0_from_itself():
    keys = some_store().keys + 100
    store = Datastore(keys, torch.arange(PAIRS), torch.zeros(PAIRS, dtype=torch.long))
    near = store.neighbors(keys, TorchSearch(store)(keys, 1))
    assert (near.values[:, 0] == torch.arange(PAIRS)).all()
    assert (near.squared == 0).all()


@pytest.mark.parametrize("make", [TorchSearch, FaissSearch])
@pytest.mark.parametrize("chunk", [1, PAIRS])
def test_search_is_accurate_far_from_the_origin(make, chunk):
    if make is FaissSearch:
        pytest.importorskip("faiss")
    keys = some_store().keys / 10 + 300
    store = Datastore(keys, torch.arange(PAIRS), torch.zeros(PAIRS, dtype=torch.long))
    queries = keys + some_store(seed=1).keys / 1000
    original, base = keys.clone(), make(store)
    entries = torch.cat([base(some, 1) for some in queries.split(chunk)])[:, 0]
    assert entries.tolist() == [brute_force(store, query, 1)[0] for query in queries]
    assert torch.equal(store.keys, original)


def test_faiss_equals_torch():
    pytest.importorskip("faiss")
    store, queries = some_store(300), some_queries()
    from_torch, from_faiss = (
        neighbor_values(store, make(store)(queries, 9), queries) for make in (TorchSearch, FaissSearch)
    )
    assert from_torch == from_faiss


def test_missing_faiss_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ImportError, match=r"requires faiss: run pip install .*\[knn\]', or use index=.torch."
    ):
        FaissSearch(some_store())


def test_k_above_number_of_pairs_raises():
    with pytest.raises(ValueError, match="at most the number of pairs, 90, got k=91"):
        TorchSearch(some_store())(some_queries(), 91)
    with pytest.raises(ValueError, match="largest group of 9 pairs the datastore has 81"):
        TorchSearch(some_store())(some_queries(), 82, torch.zeros(QUERIES, dtype=torch.long))


@pytest.mark.parametrize(
    ("keys", "values", "groups"),
    [((0, 3), (0,), (0,)), ((4,), (4,), (4,)), ((4, 3), (5,), (4,)), ((4, 3), (4, 2), (3,))],
)
def test_inconsistent_datastore_shapes_raise(keys, values, groups):
    with pytest.raises(ValueError, match=r"needs keys \(N, C\), values \(N, \.\.\.\) and groups \(N,\)"):
        Datastore(torch.zeros(keys), torch.zeros(values), torch.zeros(groups, dtype=torch.long))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_non_finite_keys_raise(wrong):
    keys = some_store().keys.clone()
    keys[3, 2] = wrong
    with pytest.raises(ValueError, match="NaN or infinite"):
        Datastore(keys, torch.arange(PAIRS), torch.arange(PAIRS))
