"""States of all processes are gathered as those of one, and sharded to any number of processes."""

import copy

import pytest
import torch

from rlxf.agents.gtrxl.resume import gather_state, shard_state
from rlxf.training import Archive
from rlxf.training.distributed.group import ProcessGroup

ENVS = 2


class OneOf(ProcessGroup):
    """Process of a group whose gathered archives are a given list."""

    def __init__(self, rank, archives):
        self.rank, self.world_size, self.archives = rank, len(archives), archives

    def gather_archives(self, own):
        return copy.deepcopy(self.archives)


def state_of(rank):
    """Document of environments that return their state; the clock is shared by all of them."""
    env = {"clock": 7, "cells": [10 * rank, 10 * rank + 1], "rows": {"goals": [[rank], [rank + 5]]}}
    return {"state": {"env": env, "filler": [False, rank == 1]}}, {}


def records_of(rank):
    """Document of environments that are replayed; a crashed environment shows its last observation."""
    own = {"restarts": {"seed": rank, "restarts": 2 * rank, "lost_steps": 4 - rank}}
    records = [{"seed": rank, "number": 3} | own, ({"absent": True} if rank else {"seed": 9}) | own]
    last = {"shown.1.": torch.full((1, 2), rank), "shown.1.a.2": torch.arange(rank)}
    other = last if rank else {"actions.1": torch.arange(5)}
    return {"records": records}, {"actions.0": torch.arange(rank + 1)} | other


def archive(rank, episodes):
    document, actions = episodes(rank)
    stand = {
        "position": torch.tensor([rank, rank]),
        "memory.hidden": torch.full((3, ENVS, 4), float(rank)),
    }
    wrappers = {"0.VecNormalize.0.returns": torch.tensor([rank, 0.5]), "0.VecNormalize.1.mean": torch.ones(5)}
    return Archive({"environment": document}, {"stand": stand, "wrappers": wrappers, "episodes": actions})


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for group in one:
        assert one[group].keys() == other[group].keys(), group
        assert all(torch.equal(one[group][name], other[group][name]) for name in one[group]), group


@pytest.mark.parametrize("episodes", [state_of, records_of])
def test_sharding_inverts_gathering(episodes):
    parts = [archive(rank, episodes) for rank in range(3)]
    own = copy.deepcopy(parts[0])
    whole = gather_state(OneOf(0, parts), own.documents["environment"], own.tensors)
    for rank, part in enumerate(parts):
        environment, groups = shard_state(OneOf(rank, parts), ENVS, *copy.deepcopy(whole))
        assert_equal(groups, part.tensors)
        assert environment == part.documents["environment"]


def test_single_process_is_unchanged():
    own = archive(0, records_of)
    document, groups = gather_state(ProcessGroup(), own.documents["environment"], own.tensors)
    assert document == own.documents["environment"]
    assert_equal(groups, own.tensors)
    assert_equal(shard_state(ProcessGroup(), ENVS, document, groups)[1], own.tensors)


def test_incompatible_states_are_lost():
    parts = [archive(rank, state_of) for rank in range(2)]
    parts[1].documents["environment"]["state"]["env"]["clock"] = 8
    own = copy.deepcopy(parts[0])
    document, _ = gather_state(OneOf(0, parts), own.documents["environment"], own.tensors)
    assert "of several processes" in document["lost"]
