"""Encoder, decoder and encoder-decoder reproduce torch's `nn.Transformer`, with its weights."""

import pytest
import torch

from rlxf.attention import Context, EncoderDecoder, TokenIndex, TransformerSpec
from rlxf.attention.layers import Block
from rlxf.attention.token_index import EMPTY
from tests.attention.oracle import Vector, close, count, fill, load, named, number_of


def load_block(block: Block, vector: Vector, layer: str) -> None:
    fill(block.attention.qkv, *named(vector, f"{layer}.self_attn.in_proj_"))
    fill(block.attention.out, *named(vector, f"{layer}.self_attn.out_proj."))
    fill(block.attention_norm.norm, *named(vector, f"{layer}.norm1."))
    fill(block.feed_forward.inner, *named(vector, f"{layer}.linear1."))
    fill(block.feed_forward.outer, *named(vector, f"{layer}.linear2."))
    last = "norm2" if block.cross is None else "norm3"
    fill(block.feed_forward_norm.norm, *named(vector, f"{layer}.{last}."))


def load_cross(block: Block, vector: Vector, layer: str) -> None:
    fill(block.cross.attention.qkv, *named(vector, f"{layer}.multihead_attn.in_proj_"))
    fill(block.cross.attention.out, *named(vector, f"{layer}.multihead_attn.out_proj."))
    fill(block.cross.join.norm, *named(vector, f"{layer}.norm2."))


def build(name: str, vector: Vector) -> EncoderDecoder:
    inner, width = vector["w_encoder__layers__0__linear1__weight_T_out_in"].shape
    shape = {"width": width, "feed_forward": inner, "heads": number_of("heads", name)}
    shape |= {"norm": name.removeprefix("transformer_").removesuffix("norm"), "final_norm": True}
    encoder = TransformerSpec(layers=count(vector, "encoder.layers"), causal=False, **shape)
    decoder = TransformerSpec(layers=count(vector, "decoder.layers"), cross_attention=True, **shape)
    return EncoderDecoder(encoder, decoder).double()


@pytest.fixture(params=["transformer_prenorm", "transformer_postnorm"])
def oracle(request) -> tuple[EncoderDecoder, Vector]:
    vector = load(request.param)
    model = build(request.param, vector)
    for part in ("encoder", "decoder"):
        stack = getattr(model, part)
        fill(stack.norm, *named(vector, f"{part}.norm."))
        for number, block in enumerate(stack.blocks):
            load_block(block, vector, f"{part}.layers.{number}")
    for number, block in enumerate(model.decoder.blocks):
        load_cross(block, vector, f"decoder.layers.{number}")
    return model, vector


def source_index(vector: Vector) -> TokenIndex:
    index = TokenIndex.range(*vector["in_src_pad"].shape)
    return TokenIndex(index.position, index.episode.masked_fill(vector["in_src_pad"], EMPTY))


def test_encoder(oracle):
    model, vector = oracle
    out, state = model.encoder(vector["in_src"], source_index(vector))
    token = ~vector["in_src_pad"]
    assert not token.all()
    assert state is None
    close(out[token], vector["out_memory"][token])


def test_decoder_alone(oracle):
    model, vector = oracle
    context = Context(vector["out_memory"], source_index(vector))
    target = vector["in_tgt"]
    out, _ = model.decoder(target, TokenIndex.range(*target.shape[:2]), context=context)
    close(out, vector["out_decoder"])


def test_encoder_and_decoder(oracle):
    model, vector = oracle
    target = vector["in_tgt"]
    out = model(vector["in_src"], source_index(vector), target, TokenIndex.range(*target.shape[:2]))
    close(out, vector["out_decoder"])


def test_decoder_token_by_token(oracle):
    model, vector = oracle
    target = vector["in_tgt"]
    context = Context(vector["out_memory"], source_index(vector))
    batch, length = target.shape[:2]
    cache = model.decoder.cache(model.decoder.initial_state(batch), length, context)
    steps = [
        model.decoder.step(target[:, t], TokenIndex.range(batch, 1, start=t), cache)[0] for t in range(length)
    ]
    close(torch.stack(steps, dim=1), vector["out_decoder"])
