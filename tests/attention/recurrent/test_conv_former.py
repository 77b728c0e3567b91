"""`ConvFormer` equals the authors' token mixer, in segments and step by step."""

import pytest
import torch

from rlxf.attention import ConvFormer
from rlxf.attention.recurrent.base import EpisodeRuns
from rlxf.attention.token_index import EMPTY, TokenIndex
from tests.attention.oracle import load, put
from tests.attention.recurrent.mixers import by_steps

KINDS = {"three": ("rtg", "obs", "act"), "two": ("rtg", "obs")}
NONE = torch.full((2,), EMPTY)


def mixer_of(vector, form):
    """Return the mixer with the weights of a reference vector."""
    names = [f"w_{form}_{kind}" for kind in KINDS[form]]
    weight = torch.stack([vector[name] for name in names])
    mixer = ConvFormer(weight.shape[-1], kinds=len(names)).build(weight.shape[1], 2).double()
    put(mixer.weight, weight)
    put(mixer.bias, torch.stack([vector[f"{name}_bias"] for name in names]))
    return mixer


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("length", [None, 1, 4])
def test_reference_vector(form, length):
    vector = load("convformer")
    mixer, x, expected = mixer_of(vector, form), vector[f"in_{form}"], vector[f"out_{form}"]
    index = TokenIndex.range(*x.shape[:2])
    state, episode, outputs, start = mixer.initial_state(2), NONE, [], 0
    while start < x.shape[1]:
        part = slice(start, start + (length or x.shape[1]))
        y, state = mixer(x[:, part], EpisodeRuns.of(index.at(part), episode), state)
        episode, start = index.episode[:, 0], part.stop
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=0, atol=1e-9)


def test_an_episode_starts_with_the_first_kind_and_an_empty_window():
    mixer, x = ConvFormer(4, kinds=3).build(8, 2).double(), torch.randn(1, 9, 8, dtype=torch.float64)
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    index = TokenIndex(position, (torch.arange(9) >= 4).long()[None])
    y, _ = by_steps(mixer, x, index, mixer.initial_state(1), NONE[:1])
    slow = torch.zeros_like(x)
    for t in range(9):
        kind = int(position[0, t]) % 3
        slow[:, t] = mixer.bias[kind]
        for i in range(min(4, int(position[0, t]) + 1)):
            slow[:, t] += mixer.weight[kind, :, 3 - i] * x[:, t - i]
    torch.testing.assert_close(y, slow, rtol=0, atol=1e-12)
