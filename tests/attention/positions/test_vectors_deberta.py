"""DeBERTa's attention reproduces both versions of the code, and the paper's equation 4."""

import torch
from torch import Tensor

from rlxf.attention import Deberta, TokenIndex, TransformerSpec
from tests.attention.oracle import close, fill, load, put

VECTOR = load("deberta")
BATCH, LENGTH, WIDTH = VECTOR["in_x"].shape
HEADS = VECTOR["out_probs"].shape[1]
ZERO = torch.zeros(WIDTH, dtype=torch.float64)

# HF computes in float64 with biases in float32.
LIBRARY = 1e-6


def attended(form: str, projections: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the output before the last projection, and the weights.

    Args:
        form: option of `Deberta`.
        projections: q, k, v, keys of positions, queries of positions.
        biases: q, k, v, queries of positions.
    """
    position = Deberta(len(VECTOR["w_rel"]) // 2, form)
    spec = TransformerSpec(width=WIDTH, heads=HEADS, layers=1, position=position, causal=False)
    model = spec.build().double()
    attention = model.blocks[0].attention
    put(model.embedding.weight, VECTOR["w_rel"])
    q, k, v, of_keys, of_queries = (weight.T.double() for weight in projections)
    fill(attention.qkv, torch.cat([q, k, v]), torch.cat([bias.double() for bias in biases[:3]]))
    fill(attention.position.key_projection, of_keys)
    fill(attention.position.query_projection, of_queries, biases[3])
    fill(attention.out, torch.eye(WIDTH, dtype=torch.float64))
    mask = model.attention_mask(*indices())
    return attention(VECTOR["in_x"], None, mask), attention.weights(VECTOR["in_x"], None, mask)


def indices() -> tuple[TokenIndex, TokenIndex]:
    """Return queries and keys; the vector masks keys at the end of some rows."""
    index = TokenIndex.range(BATCH, LENGTH)
    hidden = ~VECTOR["in_mask"][:, 0].any(dim=1)
    return index, TokenIndex(index.position, index.episode.masked_fill(hidden, -1))


def code_v1(form: str) -> tuple[Tensor, Tensor]:
    names = ("q", "k", "v", "pos_key", "pos_query")
    biases = [VECTOR["w_qbias"], ZERO, VECTOR["w_vbias"], VECTOR["w_pos_query_bias"]]
    return attended(form, [VECTOR[f"w_{name}"] for name in names], biases)


def test_first_version_of_the_code():
    y, weights = code_v1("code")
    close(y, VECTOR["out"], LIBRARY)
    close(weights, VECTOR["out_probs"], LIBRARY)


def test_equation_4():
    close(code_v1("paper")[0], VECTOR["out_paper_eq4"], LIBRARY)


def test_second_version_of_the_code():
    """The second version projects distances as tokens; the bias of keys has no effect after softmax."""
    q, k, v = (VECTOR[f"w_v2_{name}"] for name in ("query", "key", "value"))
    biases = [VECTOR[f"w_v2_b{name}"] for name in ("query", "key", "value", "query")]
    y, weights = attended("code", [q, k, v, k, q], biases)
    close(y, VECTOR["out_v2"], LIBRARY)
    close(weights, VECTOR["out_v2_probs"], LIBRARY)
