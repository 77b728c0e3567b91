"""LearnedPerLayer adds the vectors of each layer to its input, also if passes share a layer."""

from dataclasses import replace

import pytest
import torch

from rlxf.attention import LearnedAbsolute, LearnedPerLayer, TokenIndex, Universal
from tests.attention.oracle import close
from tests.attention.specs import DEFAULT, new_model
from tests.attention.worlds import numbers

INDEX = TokenIndex.range(2, 6, start=3)


@pytest.mark.parametrize("layers", [1, 3])
def test_vectors_of_the_first_layer_alone_are_absolute_positions(layers):
    spec = replace(DEFAULT, layers=layers)
    one = new_model(replace(spec, position=LearnedPerLayer(16))).double()
    other = new_model(replace(spec, position=LearnedAbsolute(16))).double()
    with torch.no_grad():
        one.embedding.weight[1:] = 0
    weights = one.state_dict()
    other.load_state_dict(weights | {"embedding.weight": weights["embedding.weight"][0]})
    x = numbers(2, 6, spec.width)
    close(one(x, INDEX)[0], other(x, INDEX)[0])


def test_each_pass_adds_the_vectors_of_its_layer():
    module = LearnedPerLayer(16).build_shared(replace(DEFAULT, layers=3))
    for number in range(3):
        added = module.pass_embedding(torch.zeros(2, 6, 8), INDEX.position, number)
        close(added, module.weight[number, 3:9].expand(2, -1, -1))


def test_passes_of_one_layer_share_vectors():
    module = LearnedPerLayer(16).build_shared(replace(DEFAULT, layers=3, depth=Universal()))
    assert module.weight.shape == (1, 16, 8)
    close(*(module.pass_embedding(torch.zeros(2, 6, 8), INDEX.position, number) for number in (0, 2)))
