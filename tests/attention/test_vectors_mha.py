"""Multi-head attention reproduces torch's, with its weights."""

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention import Full, Softmax, TokenIndex
from rlxf.attention.attention import Attention
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.token_index import EMPTY
from tests.attention.oracle import close, fill, load

VECTOR = load("mha")
X = VECTOR["in_x"]
HEADS = VECTOR["out_self_probs"].shape[1]


def attention(softmax1: bool = False) -> Attention:
    module = Attention(AttentionArguments(X.shape[-1], HEADS, None, Softmax(softmax1))).double()
    matrices = torch.cat([VECTOR[f"w_{name}"].T for name in "qkv"])
    biases = torch.cat([VECTOR[f"w_b{name}"] for name in "qkv"])
    fill(module.qkv, matrices, biases)
    fill(module.out, VECTOR["w_o"].T, VECTOR["w_bo"])
    return module


def padded(padding: Tensor) -> TokenIndex:
    """Return an index in which padding is an empty slot, with episode -1."""
    index = TokenIndex.range(*padding.shape)
    return TokenIndex(index.position, index.episode.masked_fill(padding, EMPTY))


def relation(query: TokenIndex, key: TokenIndex, causal: bool) -> AttentionMask:
    return AttentionMask(query, key, Full(), causal, torch.float64)


def self_relation(causal: bool) -> AttentionMask:
    index = TokenIndex.range(*X.shape[:2])
    return relation(index, index, causal)


def probabilities(module: Attention, context: Tensor, mask: AttentionMask) -> Tensor:
    """Return the weights (B, H, Tq, Tk).

    They are averages of values that form an identity matrix, D columns at a time.
    """
    keys = module.project(context)[0]
    batch, heads, length, size = keys.shape
    module = copy.deepcopy(module)
    fill(module.out, torch.eye(X.shape[-1], dtype=torch.float64))
    columns = F.pad(torch.eye(length, dtype=torch.float64), (0, -length % size)).split(size, dim=1)
    averages = [module.cross(X, (keys, part.expand(batch, heads, -1, -1)), mask) for part in columns]
    weights = torch.cat([y.unflatten(-1, (heads, size)) for y in averages], dim=-1)
    return weights.transpose(1, 2)[..., :length]


def test_self_attention():
    module = attention()
    close(module(X, None, self_relation(causal=False)), VECTOR["out_self"])
    close(probabilities(module, X, self_relation(causal=False)), VECTOR["out_self_probs"])


def test_causal_self_attention():
    module = attention()
    close(module(X, None, self_relation(causal=True)), VECTOR["out_causal"])
    close(probabilities(module, X, self_relation(causal=True)), VECTOR["out_causal_probs"])


def test_causal_self_attention_with_padding():
    index = padded(VECTOR["in_selfpad"])
    out = attention()(X, None, relation(index, index, causal=True))
    token = ~VECTOR["in_selfpad"]
    assert token.any()
    assert not token.all()
    close(out[token], VECTOR["out_causal_pad"][token])


def test_cross_attention_to_a_padded_context():
    module, context = attention(), VECTOR["in_c"]
    across = relation(TokenIndex.range(*X.shape[:2]), padded(VECTOR["in_pad"]), causal=False)
    close(module.cross(X, module.project(context), across), VECTOR["out_cross"])
    close(probabilities(module, context, across), VECTOR["out_cross_probs"])


def test_softmax1():
    module = attention(softmax1=True)
    close(module(X, None, self_relation(causal=True)), VECTOR["out_softmax1"])
    close(probabilities(module, X, self_relation(causal=True)), VECTOR["out_softmax1_probs"][..., :-1])
