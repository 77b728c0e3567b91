"""Compressive memory reproduces public code for its parts, and the paper's memory queues."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlxf.attention import Compressive, TokenIndex
from rlxf.attention.memory.compression import (
    COMPRESSIONS,
    MEASURES,
    LayerCompression,
    ReconstructionInput,
    attention_received,
    content_attention,
    most_used,
)
from tests.attention.oracle import close, load, put

VECTOR = load("compressive")
MEMORY, H = VECTOR["in_mem"], VECTOR["in_h"]
RATIO, HEADS = int(VECTOR["cfg_ratio"]), VECTOR["out_attn_old"].shape[1]


class Layer:
    """Projections of queries, keys and values with the vector's weights, which require gradients."""

    def __init__(self) -> None:
        self.q, self.k, self.v = (VECTOR[f"w_{name}"].clone().requires_grad_() for name in "qkv")

    def content_query(self, x: Tensor) -> Tensor:
        return by_head(x @ self.q)

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return by_head(x @ self.k), by_head(x @ self.v)


def by_head(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def learned(method: str, loss: str = "attention-reconstruction", measure: str = "mean-square"):
    """Return the compression of a layer with the vector's weights."""
    module = Compressive(1, 1, RATIO, method, loss, measure).build(MEMORY.shape[-1]).double()
    name = {"convolution": "conv"}.get(method, method)
    put(module.compression.convolution.weight, VECTOR[f"w_{name}"])
    put(module.compression.convolution.bias, VECTOR[f"w_{name}_b"])
    if loss == "auto-encoding":
        put(module.reconstruction.decoder.weight, VECTOR["w_decoder"])
        put(module.reconstruction.decoder.bias, VECTOR["w_decoder_b"])
    return module


def no_usage(x: Tensor) -> Tensor:
    raise AssertionError("the usage of tokens is not needed")


@pytest.mark.parametrize("method", ["mean", "max"])
def test_pooling(method):
    close(COMPRESSIONS[method](MEMORY.shape[-1], RATIO)(MEMORY, no_usage), VECTOR[f"out_{method}"])


@pytest.mark.parametrize(("method", "name"), [("convolution", "conv"), ("dilated", "dilated")])
def test_convolutions(method, name):
    close(learned(method).compression(MEMORY, no_usage), VECTOR[f"out_{name}"])


def test_most_used_tokens():
    close(most_used(MEMORY, VECTOR["in_usage"], MEMORY.shape[1] // RATIO), VECTOR["out_most_used"])
    module = COMPRESSIONS["most-used"](MEMORY.shape[-1], RATIO)
    close(module(MEMORY, lambda x: VECTOR["in_usage"]), VECTOR["out_most_used"])


def test_usage_is_the_mean_attention_weight_of_a_token():
    q, k = (numbers[None] for numbers in (VECTOR["out_attn_old"][0], VECTOR["out_attn_new"][0]))
    usage = attention_received(q, k)
    for token in range(k.shape[2]):
        weights = [
            (q[0, h, i] @ k[0, h].T / q.shape[-1] ** 0.5).softmax(0)[token]
            for h in range(HEADS)
            for i in range(q.shape[2])
        ]
        close(usage[0, token], torch.stack(weights).mean())


def test_attention_over_memory_and_compressed_memory():
    layer = Layer()
    for tokens, name in ((MEMORY, "old"), (VECTOR["out_conv"], "new")):
        output = content_attention(layer.content_query(H), *layer.content(tokens))
        close(output.detach(), VECTOR[f"out_attn_{name}"])


def compressed(
    module: LayerCompression, layer: Layer, memory: Tensor = MEMORY, h: Tensor = H
) -> ReconstructionInput:
    """Return the vector's memory as blocks that all queries see compressed."""
    blocks = memory.unflatten(1, (-1, RATIO))
    summaries = module(blocks, layer)
    seen = torch.ones(len(h), h.shape[1], blocks.shape[1], dtype=torch.bool)
    return ReconstructionInput(blocks, summaries, h, seen, layer)


@pytest.mark.parametrize(("measure", "name"), [("mean-square", "mse"), ("norm", "l2")])
def test_attention_reconstruction(measure, name):
    module = learned("convolution", measure=measure)
    close(module.penalty(compressed(module, Layer())).detach(), VECTOR[f"out_attn_recon_{name}"])


def test_gradient_of_reconstruction_reaches_only_the_compression():
    module, layer = learned("convolution"), Layer()
    memory, h = MEMORY.clone().requires_grad_(), H.clone().requires_grad_()
    module.penalty(compressed(module, layer, memory, h)).backward()
    close(module.compression.convolution.weight.grad, VECTOR["out_grad_conv_w"])
    close(module.compression.convolution.bias.grad, VECTOR["out_grad_conv_b"])
    assert all(other.grad is None for other in (memory, h, layer.q, layer.k, layer.v))


def test_auto_encoding():
    module = learned("convolution", "auto-encoding")
    close(module.penalty(compressed(module, Layer())).detach(), VECTOR["out_autoencoding_loss_mean"])
    lost = module.reconstruction.errors(MEMORY, VECTOR["out_conv"]).detach()
    close(MEASURES["norm"](lost).square(), VECTOR["out_autoencoding_loss_sum"])


def test_memory_queues():
    """The keys visible after each segment are the contents of the paper's two queues."""
    segments, slots = VECTOR["out_fifo"].shape
    recent = slots - 3
    memory = Compressive(recent, slots - recent, RATIO, "mean")
    layers = [SimpleNamespace(compression=memory.build(1))]
    values = torch.arange(1.0, 1.0 + segments * RATIO, dtype=torch.float64)
    for segment in range(segments):
        length = (segment + 1) * RATIO
        state = SimpleNamespace(hidden=values[None, None, :length, None], index=TokenIndex.range(1, length))
        recall = memory.view(state, TokenIndex.range(1, 1, start=length), layers)
        keys = recall.key
        first = torch.arange(keys.shape[1]) < recall.ends.shape[1]
        position = torch.tensor(length)
        seen = torch.where(
            first,
            memory.is_compressed_visible(position, keys.position[0]),
            memory.is_raw_visible(position, keys.position[0]),
        )
        contents = recall.tokens(0, torch.zeros(1, 1, 1, dtype=torch.float64))[0, :, 0]
        expected = VECTOR["out_fifo"][segment]
        close(contents[seen[:-1]], expected[expected >= 0])
