"""YaRN and dynamic NTK reproduce HF transformers, with memory; dynamic NTK does so without its state."""

import pytest
import torch
from torch import Tensor

from rlxf.attention import XL, Full, RoPE, Softmax, TokenIndex, TransformerSpec
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.rope import rotate
from tests.attention.oracle import close, load
from tests.attention.passes import after_memory, over_heads

YARN, DYNAMIC = load("yarn"), load("dynamic_ntk")
VARIANTS = ("default", "fractional", "given", "mscale")
SIZE = DYNAMIC["in_x"].shape[-1]
PAIRS = torch.arange(SIZE).view(2, -1).T.flatten()
"""Order of features in which feature m and feature m + D/2 become adjacent."""


def yarn(name: str) -> RoPE:
    options = {key: VALUES[key](YARN[f"cfg_{name}_{key}"]) for key in VALUES if f"cfg_{name}_{key}" in YARN}
    if f"cfg_{name}_mscale" in YARN:
        whole, split = (
            0.1 * float(YARN[f"cfg_{name}_{key}"]) * torch.tensor(options["factor"]).double().log() + 1
            for key in ("mscale", "mscale_all_dim")
        )
        options["attention_factor"] = float(whole / split)
    length = int(YARN["cfg_original_length"])
    return RoPE(float(YARN["cfg_base"]), "yarn", original_length=length, **options)


VALUES = dict.fromkeys(("factor", "beta_fast", "beta_slow", "attention_factor"), float) | {"truncate": bool}


@pytest.mark.parametrize("name", VARIANTS)
def test_yarn(name):
    rope, (q, k, v) = yarn(name), (YARN[f"in_{key}"] for key in "qkv")
    close(rope.frequencies(q.shape[-1]), YARN[f"out_{name}_inv_freq"], 1e-12)
    close(torch.tensor(rope.magnitude, dtype=q.dtype), YARN[f"out_{name}_attention_factor"], 1e-12)
    mask, module = after_memory(q, k), over_heads(q, rope)
    keys = module.position.key(k[..., PAIRS], mask.key.position)
    close(keys[..., PAIRS.argsort()], YARN[f"out_{name}_k"])
    queries, _ = module.position.encode(q[..., PAIRS], keys, q.shape[-1], mask, None)
    close(queries[..., PAIRS.argsort()], YARN[f"out_{name}_q"])
    close(module.average(q[..., PAIRS], keys, v, mask, None), YARN[f"out_{name}"])


def dynamic() -> RoPE:
    length, factor = int(DYNAMIC["cfg_length"]), float(DYNAMIC["cfg_factor"])
    return RoPE(float(DYNAMIC["cfg_base"]), "dynamic", factor, length)


@pytest.mark.parametrize("length", sorted(set(DYNAMIC["cfg_lengths"].tolist())))
def test_dynamic_frequencies(length):
    speeds = dynamic().dynamic_frequencies(torch.tensor(length), SIZE)
    close(speeds, DYNAMIC[f"out_stateless_{length}_inv_freq"], 1e-12)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_scores_of_the_newest_query_are_those_of_a_call_of_its_length(number):
    """The base of these calls is that of their own length, since each is longer than those before it."""
    length, rotated = int(DYNAMIC["cfg_lengths"][number]), DYNAMIC[f"out_call{number}"]
    x = DYNAMIC["in_x"][:, :, :length, PAIRS]
    key = TokenIndex.range(len(x), length)
    mask = AttentionMask(key, key, Full(), True, x.dtype)
    q, bias = over_heads(x, dynamic()).position.encode(x, x, SIZE, mask, None)
    scores = q @ x.transpose(-1, -2) * SIZE**-0.5 + bias
    close(scores[:, :, -1], (rotated @ rotated.transpose(-1, -2) * SIZE**-0.5)[:, :, -1])


def test_each_query_has_its_own_base():
    rope, x = dynamic(), torch.randn(2, 2, 24, SIZE, dtype=torch.float64)
    key = TokenIndex.range(2, 24)
    mask = AttentionMask(key.last(20), key, Full(), True, x.dtype)
    q, bias = over_heads(x, rope).position.encode(x[:, :, 4:], x, SIZE, mask, None)
    scores = q @ x.transpose(-1, -2) * SIZE**-0.5 + bias
    expected = torch.stack([slow_row(rope, x, i) for i in range(4, 24)], dim=2)
    close(scores, expected)


def slow_row(rope: RoPE, x: Tensor, i: int) -> Tensor:
    """Return the scores of query i with all keys rotated again for its length."""
    speeds = rope.dynamic_frequencies(torch.tensor(i + 1), SIZE)
    rotated = rotate(x, torch.arange(x.shape[2]).expand(len(x), -1), speeds)
    return (rotated[:, :, i, None] @ rotated.transpose(-1, -2))[:, :, 0] * SIZE**-0.5


def test_dynamic_scaling_is_plain_below_the_original_length():
    with torch.random.fork_rng():
        outputs = []
        for position in (RoPE(), RoPE(scaling="dynamic", factor=4.0, original_length=9)):
            torch.manual_seed(0)
            spec = TransformerSpec(width=8, heads=2, position=position, kernel=Softmax(), memory=XL(3))
            model, x = spec.build().double(), torch.linspace(-1, 1, 96, dtype=torch.float64).view(1, 12, 8)
            outputs.append(model(x.sin(), TokenIndex.range(1, 12))[0])
    close(outputs[0][:, :9], outputs[1][:, :9], 1e-12)
    assert (outputs[0] - outputs[1])[:, 9:].abs().max() > 1e-6


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("length", [3, 64, 2000])
def test_yarn_never_slows_the_fastest_pair(length, truncate):
    """It turns less than ``beta_slow`` times in few tokens, but limits are at least pair 0."""
    rope = RoPE(scaling="yarn", factor=4.0, original_length=length, truncate=truncate)
    assert rope.frequencies(16)[0] == RoPE().frequencies(16)[0]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("length", [1, 3, 64, 2000])
def test_yarn_slows_the_slowest_pair_by_the_factor(length, truncate):
    rope = RoPE(scaling="yarn", factor=4.0, original_length=length, truncate=truncate)
    torch.testing.assert_close(rope.frequencies(16)[-1] * 4, RoPE().frequencies(16)[-1])
