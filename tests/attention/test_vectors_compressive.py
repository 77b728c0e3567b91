"""Compressive memory reproduces public code for its parts, and the paper's queues of memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlxf.attention import Compressive, Index
from rlxf.attention.memory.compression import attention_received, compression, content_attention, most_used
from rlxf.attention.memory.compressive import LayerCompression
from rlxf.attention.memory.reconstruction import MEASURES, Compressed
from tests.attention.oracle import close, load, put

VECTOR = load("compressive")
MEMORY, H = VECTOR["in_mem"], VECTOR["in_h"]
RATIO, HEADS = int(VECTOR["cfg_ratio"]), VECTOR["out_attn_old"].shape[1]


class Layer:
    """Queries, keys and values by the vector's weights, which want a gradient."""

    def __init__(self) -> None:
        self.q, self.k, self.v = (VECTOR[f"w_{name}"].clone().requires_grad_() for name in "qkv")

    def content_query(self, x: Tensor) -> Tensor:
        return by_head(x @ self.q)

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return by_head(x @ self.k), by_head(x @ self.v)


def by_head(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def learned(method: str, loss: str = "attention-reconstruction", measure: str = "mean-square"):
    """f in a layer, with the vector's weights."""
    spec = Compressive(1, 1, RATIO, method, loss, measure)
    module = LayerCompression(spec, MEMORY.shape[-1]).double()
    name = {"convolution": "conv"}.get(method, method)
    put(module.compression.convolution.weight, VECTOR[f"w_{name}"])
    put(module.compression.convolution.bias, VECTOR[f"w_{name}_b"])
    if loss == "auto-encoding":
        put(module.reconstruction.decoder.weight, VECTOR["w_decoder"])
        put(module.reconstruction.decoder.bias, VECTOR["w_decoder_b"])
    return module


def no_usage(x: Tensor) -> Tensor:
    raise AssertionError("nobody asks how much tokens are used")


@pytest.mark.parametrize("method", ["mean", "max"])
def test_pooling(method):
    close(compression(method, MEMORY.shape[-1], RATIO)(MEMORY, no_usage), VECTOR[f"out_{method}"])


@pytest.mark.parametrize(("method", "name"), [("convolution", "conv"), ("dilated", "dilated")])
def test_convolutions(method, name):
    close(learned(method).compression(MEMORY, no_usage), VECTOR[f"out_{name}"])


def test_the_most_used_tokens():
    close(most_used(MEMORY, VECTOR["in_usage"], MEMORY.shape[1] // RATIO), VECTOR["out_most_used"])
    module = compression("most-used", MEMORY.shape[-1], RATIO)
    close(module(MEMORY, lambda x: VECTOR["in_usage"]), VECTOR["out_most_used"])


def test_usage_is_the_mean_weight_that_a_token_gets():
    q, k = (numbers[None] for numbers in (VECTOR["out_attn_old"][0], VECTOR["out_attn_new"][0]))
    found = attention_received(q, k)
    for token in range(k.shape[2]):
        taken = [
            (q[0, h, i] @ k[0, h].T / q.shape[-1] ** 0.5).softmax(0)[token]
            for h in range(HEADS)
            for i in range(q.shape[2])
        ]
        close(found[0, token], torch.stack(taken).mean())


def test_attention_over_memory_and_over_what_is_left_of_it():
    layer = Layer()
    for tokens, name in ((MEMORY, "old"), (VECTOR["out_conv"], "new")):
        found = content_attention(layer.content_query(H), *layer.content(tokens))
        close(found.detach(), VECTOR[f"out_attn_{name}"])


def compressed(module: LayerCompression, layer: Layer, memory: Tensor = MEMORY, h: Tensor = H) -> Compressed:
    """The vector's memory as blocks that all of its queries see compressed."""
    blocks = memory.unflatten(1, (-1, RATIO))
    made = module(blocks.flatten(0, 1), layer).unflatten(0, blocks.shape[:2])
    seen = torch.ones(len(h), h.shape[1], blocks.shape[1], dtype=torch.bool)
    return Compressed(blocks, made, h, seen, layer)


@pytest.mark.parametrize(("measure", "name"), [("mean-square", "mse"), ("norm", "l2")])
def test_attention_reconstruction(measure, name):
    module = learned("convolution", measure=measure)
    close(module.penalty(compressed(module, Layer())).detach(), VECTOR[f"out_attn_recon_{name}"])


def test_its_gradient_reaches_the_compression_alone():
    module, layer = learned("convolution"), Layer()
    memory, h = MEMORY.clone().requires_grad_(), H.clone().requires_grad_()
    module.penalty(compressed(module, layer, memory, h)).backward()
    close(module.compression.convolution.weight.grad, VECTOR["out_grad_conv_w"])
    close(module.compression.convolution.bias.grad, VECTOR["out_grad_conv_b"])
    assert all(other.grad is None for other in (memory, h, layer.q, layer.k, layer.v))


def test_auto_encoding():
    module = learned("convolution", "auto-encoding")
    close(module.penalty(compressed(module, Layer())).detach(), VECTOR["out_autoencoding_loss_mean"])
    lost = module.reconstruction.lost(MEMORY, VECTOR["out_conv"]).detach()
    close(MEASURES["norm"](lost).square(), VECTOR["out_autoencoding_loss_sum"])


def test_queues_of_memory():
    """What the first token behind each segment sees, is what the paper's two queues hold there."""
    segments, slots = VECTOR["out_fifo"].shape
    recent = slots - 3
    memory = Compressive(recent, slots - recent, RATIO, "mean")
    layers = [SimpleNamespace(compression=LayerCompression(memory, 1))]
    values = torch.arange(1.0, 1.0 + segments * RATIO, dtype=torch.float64)
    for segment in range(segments):
        now = (segment + 1) * RATIO
        state = SimpleNamespace(hidden=values[None, None, :now, None], index=Index.range(1, now))
        recall = memory.recall(state, Index.range(1, 1, start=now), layers)
        keys = recall.key
        first = torch.arange(keys.shape[1]) < recall.ends.shape[1]
        place = torch.tensor(now)
        seen = torch.where(
            first, memory.shows_summary(place, keys.position[0]), memory.shows_token(place, keys.position[0])
        )
        found = recall.tokens(0, torch.zeros(1, 1, 1, dtype=torch.float64))[0, :, 0]
        expected = VECTOR["out_fifo"][segment]
        close(found[seen[:-1]], expected[expected >= 0])
