"""The core, between embeddings and a tied head, reproduces BERT and GPT-2."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention import LearnedAbsolute, TokenIndex, Transformer, TransformerSpec
from rlxf.attention.layers import Block
from tests.attention.oracle import Vector, close, count, fill, load, number_of, put

BERT, GPT2 = load("bert_mlm"), load("gpt2_lm")
EPSILON = 1e-12
"""Epsilon of BERT's layer norms; ours and GPT-2's have torch's default, 1e-5."""


def pair(vector: Vector, name: str) -> tuple[Tensor, Tensor]:
    """Return weight and bias."""
    return vector[f"w_{name}__weight"], vector[f"w_{name}__bias"]


def norm(x: Tensor, name: str) -> Tensor:
    """Apply a layer norm of BERT that is not in the core."""
    return F.layer_norm(x, x.shape[-1:], *pair(BERT, name), eps=EPSILON)


def bert() -> Transformer:
    layers = count(BERT, "bert.encoder.layer")
    inner, width = BERT["w_bert__encoder__layer__0__intermediate__dense__weight"].shape
    sizes = {"width": width, "layers": layers, "heads": number_of("heads", "bert_mlm"), "feed_forward": inner}
    spec = TransformerSpec(**sizes, norm="post", final_norm=False, causal=False, activation="gelu")
    core = spec.build().double()
    for module in core.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = EPSILON
    for number, block in enumerate(core.blocks):
        fill_bert(block, f"bert__encoder__layer__{number}")
    return core


def fill_bert(block: Block, layer: str) -> None:
    projections = [pair(BERT, f"{layer}__attention__self__{name}") for name in ("query", "key", "value")]
    weights, biases = zip(*projections, strict=True)
    fill(block.attention.qkv, torch.cat(weights), torch.cat(biases))
    fill(block.attention.out, *pair(BERT, f"{layer}__attention__output__dense"))
    fill(block.attention_norm.norm, *pair(BERT, f"{layer}__attention__output__LayerNorm"))
    fill(block.feed_forward.inner, *pair(BERT, f"{layer}__intermediate__dense"))
    fill(block.feed_forward.outer, *pair(BERT, f"{layer}__output__dense"))
    fill(block.feed_forward_norm.norm, *pair(BERT, f"{layer}__output__LayerNorm"))


def embedded(ids: Tensor) -> Tensor:
    """Embed words, positions and the first token type, followed by a layer norm."""
    words, positions, types = (
        BERT[f"w_bert__embeddings__{name}_embeddings__weight"] for name in ("word", "position", "token_type")
    )
    return norm(words[ids] + positions[: ids.shape[1]] + types[0], "bert__embeddings__LayerNorm")


def bert_logits(ids: Tensor, mask: Tensor) -> Tensor:
    index = TokenIndex.range(*ids.shape)
    y, _ = bert().encode(embedded(ids), TokenIndex(index.position, torch.where(mask, 0, -1)))
    hidden = F.gelu(F.linear(y, *pair(BERT, "cls__predictions__transform__dense")))
    hidden = norm(hidden, "cls__predictions__transform__LayerNorm")
    return F.linear(
        hidden, BERT["w_bert__embeddings__word_embeddings__weight"], BERT["w_cls__predictions__bias"]
    )


def test_bert_logits_and_loss_of_masked_tokens():
    mask = BERT["in_attention_mask"].bool()
    logits = bert_logits(BERT["in_ids"], mask)
    close(logits[mask], BERT["out_logits"][mask], 1e-6)
    loss = F.cross_entropy(logits.flatten(0, 1), BERT["in_labels"].flatten())  # labels of -100 are ignored
    close(loss, BERT["out_loss"], 1e-6)


def test_padding_has_no_effect():
    mask, ids = BERT["in_attention_mask"].bool(), BERT["in_ids"].clone()
    assert not mask.all(), "the vector must contain padding"
    before = bert_logits(ids, mask)[mask]
    ids[~mask] = 0
    close(bert_logits(ids, mask)[mask], before)


def gpt2() -> Transformer:
    layers = count(GPT2, "transformer.h")
    width, inner = GPT2["w_transformer__h__0__mlp__c_fc__weight"].shape
    positions = LearnedAbsolute(len(GPT2["w_transformer__wpe__weight"]))
    sizes = {"width": width, "layers": layers, "heads": number_of("heads", "gpt2_lm"), "feed_forward": inner}
    core = TransformerSpec(**sizes, position=positions, activation="gelu_tanh").build().double()
    put(core.embedding.weight, GPT2["w_transformer__wpe__weight"])
    for number, block in enumerate(core.blocks):
        fill_gpt2(block, f"transformer__h__{number}")
    fill(core.norm, *pair(GPT2, "transformer__ln_f"))
    return core


def fill_gpt2(block: Block, layer: str) -> None:
    fill(block.attention_norm.norm, *pair(GPT2, f"{layer}__ln_1"))
    fill(block.feed_forward_norm.norm, *pair(GPT2, f"{layer}__ln_2"))
    linears = {
        "attn__c_attn": block.attention.qkv,
        "attn__c_proj": block.attention.out,
        "mlp__c_fc": block.feed_forward.inner,
        "mlp__c_proj": block.feed_forward.outer,
    }
    for name, linear in linears.items():
        weight, bias = pair(GPT2, f"{layer}__{name}")
        fill(linear, weight.T, bias)


def test_gpt2_logits_and_next_token_loss():
    ids, words = GPT2["in_ids"], GPT2["w_transformer__wte__weight"]
    y, _ = gpt2().encode(words[ids], TokenIndex.range(*ids.shape))
    logits = y @ words.T
    close(logits, GPT2["out_logits"], 1e-6)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    close(loss, GPT2["out_loss"].double(), 1e-6)
