"""`RecurrentRFA` and `RecurrentPerformer` equal their kernels with a memory of the whole episode."""

from dataclasses import asdict, replace

import pytest
import torch

from rlxf.attention import XL, Performer, RecurrentPerformer, RecurrentRFA, TransformerSpec
from rlxf.attention.recurrent import linear_attention
from tests.attention.specs import new_model
from tests.attention.worlds import ANYWHERE, random_index

BASE = TransformerSpec(width=8, heads=2, layers=2, feed_forward=12)
RECURRENCES = {
    "RFA": RecurrentRFA(16, sigma=2.0),
    "RFA, fixed": RecurrentRFA(16, sigma=2.0, fixed=True),
    "RFA, gated": RecurrentRFA(16, sigma=2.0, gate=True, gate_bias=1.0),
    "Performer": RecurrentPerformer(6),
    "Performer, relu": RecurrentPerformer(6, "relu", seed=3),
}
LENGTH = 40
each = pytest.mark.parametrize("name", RECURRENCES)


def pair(name):
    """Return transformers of the same weights: the kernel with XL memory, and the recurrence."""
    recurrence = RECURRENCES[name]
    attention = new_model(replace(BASE, kernel=recurrence.kernel, memory=XL(LENGTH))).double()
    recurrent = replace(BASE, recurrence=recurrence).build().double()
    names = {
        ".attention.out.": ".mixer.output.",
        ".attention.": ".mixer.",
        ".attention_norm.": ".mixer_norm.",
    }
    weights = attention.state_dict()
    for old, new in names.items():
        weights = {key.replace(old, new): x for key, x in weights.items()}
    recurrent.load_state_dict(weights)
    return attention, recurrent


@each
@pytest.mark.parametrize("chunk", [3, 128])
@pytest.mark.parametrize("lengths", [(LENGTH,), (7, 13, 1, 19)], ids=["one segment", "segments"])
def test_recurrence_equals_kernel_with_memory_of_the_episode(name, chunk, lengths, monkeypatch):
    monkeypatch.setattr(linear_attention, "CAUSAL_CHUNK", chunk)
    attention, recurrent = pair(name)
    for seed in range(5):
        index = random_index(2, LENGTH, seed, ANYWHERE)
        x = torch.randn(2, LENGTH, 8, dtype=torch.float64)
        states, start = [model.initial_state(2) for model in (attention, recurrent)], 0
        for length in lengths:
            part, start = slice(start, start + length), start + length
            expected, states[0] = attention(x[:, part], index.at(part), states[0])
            actual, states[1] = recurrent(x[:, part], index.at(part), states[1])
            filled = index.at(part).episode >= 0
            torch.testing.assert_close(actual[filled], expected[filled], rtol=0, atol=1e-9)


@each
def test_gradients_equal_those_of_the_kernel(name):
    """Within one segment, the kernel's memory cuts no gradient."""
    attention, recurrent = pair(name)
    index, x = random_index(2, LENGTH, 1, ANYWHERE), torch.randn(2, LENGTH, 8, dtype=torch.float64)
    gradients = []
    for model in (attention, recurrent):
        y, _ = model(x, index, model.initial_state(2))
        y[index.episode >= 0].square().sum().backward()
        gradients.append(
            {key.split(".")[-2:][0]: p.grad for key, p in model.named_parameters() if "qkv" in key}
        )
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, rtol=1e-8, atol=1e-8)


@each
def test_layers_have_features_of_their_own(name):
    model = replace(BASE, recurrence=RECURRENCES[name]).build()
    buffers = [dict(block.mixer.kernel.named_buffers()) for block in model.blocks]
    drawn = "projection" if "Performer" in name else "waves"
    assert not torch.equal(buffers[0][drawn], buffers[1][drawn])


def test_state_has_constant_size_and_attention_kernels_of_a_mixed_stack_are_updated_alone():
    spec = replace(
        BASE, recurrence=RecurrentPerformer(6), attention_layers=(1,), kernel=Performer(6), memory=XL(4)
    )
    model = spec.build()
    model.after_update()
    updates = {name: int(x) for name, x in model.state_dict().items() if name.endswith("updates")}
    assert updates == {"blocks.0.mixer.kernel.updates": 0, "blocks.1.attention.kernel.updates": 1}


@each
def test_options_are_those_of_the_kernel(name):
    recurrence = RECURRENCES[name]
    options = asdict(recurrence.kernel)
    assert asdict(recurrence).items() <= options.items()
    with pytest.raises(ValueError, match="features must be at least 1, got 0"):
        replace(recurrence, features=0)
