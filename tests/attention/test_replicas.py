"""Replicas of ``nn.DataParallel`` compute the same as their model."""

from dataclasses import replace

import pytest
import torch

from rlxf.agents.gtrxl.core import gtrxl
from rlxf.attention import ACT, GRU, RMT, Full, TokenIndex, Transformer
from rlxf.attention.functional_step import named_tensors
from tests.attention.passes import learn
from tests.attention.specs import new_model
from tests.attention.worlds import random_index, random_segment

CORE = replace(gtrxl(4, width=8, heads=2), feed_forward=12)
SPECS = {
    "XL": CORE,
    "recurrence": replace(CORE, recurrence=GRU(), memory=None, pattern=Full(), position=None),
    "memory tokens": replace(CORE, memory=RMT(segment=4, tokens=2), pattern=Full()),
    "adaptive depth": replace(CORE, depth=ACT()),
}


def replica_of(model: Transformer) -> Transformer:
    """Return a replica as ``nn.DataParallel`` makes it, with tensors as attributes in place of parameters."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.clone())
    return replicas[model]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_replicas_compute_the_same(spec):
    model = new_model(spec).eval()
    replica = replica_of(model)
    assert not list(replica.parameters())
    world = random_segment(spec, random_index(3, 12), torch.float32)
    (actual, after), (expected, state) = (learn(each, world, [5, 7]) for each in (replica, model))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(named_tensors(after), named_tensors(state))


def test_a_replica_of_a_model_that_has_acted_acts_with_its_own_tensors():
    model, x, index = new_model(CORE).eval(), torch.ones(2, 8), TokenIndex.range(2, 1)
    model.step(x, index, model.cache(model.initial_state(2), 5))
    replica = replica_of(model)
    replica.norm.weight *= 2
    (actual, _), (expected, _) = (
        each.step(x, index, each.cache(each.initial_state(2), 5)) for each in (replica, model)
    )
    bias = model.norm.bias
    torch.testing.assert_close(actual - bias, 2 * (expected - bias))
