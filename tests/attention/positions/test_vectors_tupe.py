"""TUPE's position terms, TUPE-A and TUPE-R, and its attention reproduce the authors' code."""

from rlxf.attention import TokenIndex, Transformer, TransformerSpec, Tupe
from tests.attention.oracle import close, fill, load, number_after, put

VECTOR = load("tupe")
LENGTH, BATCH, WIDTH = VECTOR["in_x"].shape
BUCKETS, HEADS = VECTOR["w_rel_table"].shape[0] - 1, VECTOR["w_rel_table"].shape[1]
MAX_DISTANCE = number_after("max", "tupe")
INDEX = TokenIndex.range(BATCH, LENGTH)


def build_model(buckets: int | None) -> Transformer:
    position = Tupe(len(VECTOR["w_pos_table"]) - 1, buckets, MAX_DISTANCE)
    spec = TransformerSpec(width=WIDTH, heads=HEADS, layers=1, position=position, causal=False)
    model = spec.build().double()
    put(model.embedding.weight, VECTOR["w_pos_table"])
    fill(model.embedding.norm, VECTOR["w_pos_ln_g"], VECTOR["w_pos_ln_b"])
    fill(model.embedding.query_projection, VECTOR["w_UQ"].T, VECTOR["w_UQ_b"])
    fill(model.embedding.key_projection, VECTOR["w_UK"].T, VECTOR["w_UK_b"])
    if buckets is not None:
        put(model.embedding.buckets, VECTOR["w_rel_table"])
    return model


def test_absolute_terms():
    bias = build_model(None).attention_mask(INDEX, INDEX).bias
    close(bias, VECTOR["out_bias_A"].expand_as(bias))


def test_absolute_and_relative_terms():
    bias = build_model(BUCKETS).attention_mask(INDEX, INDEX).bias
    close(bias, VECTOR["out_bias_R"].expand_as(bias))


def test_attention():
    model = build_model(None)
    attention = model.blocks[0].attention
    fill(attention.qkv, VECTOR["w_in_proj"].T, VECTOR["w_in_proj_b"])
    fill(attention.out, VECTOR["w_out"].T, VECTOR["w_out_b"])
    y = attention(VECTOR["in_x"].transpose(0, 1), None, model.attention_mask(INDEX, INDEX))
    close(y, VECTOR["out_attn"])
