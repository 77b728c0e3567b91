"""Invalid input raises an error that names the value before any computation."""

import json
import math
import re
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.attention import (
    CALM,
    FIRE,
    GLA,
    GRU,
    KERPLE,
    KNN,
    LRU,
    LSH,
    LSTM,
    RATE,
    RFA,
    RMT,
    XL,
    Add,
    Compressive,
    Context,
    CoPE,
    Deberta,
    DeltaNet,
    Differential,
    DynamicSpan,
    EncoderDecoder,
    Floater,
    Full,
    GatedDeltaNet,
    GRUGate,
    HeadKernels,
    HighwayGate,
    LayerKernels,
    LayerPatterns,
    LearnedAbsolute,
    LearnedPerLayer,
    Longformer,
    Mamba2,
    MinGRU,
    Multiplicative,
    Performer,
    RetNet,
    Reversible,
    RoPE,
    Routing,
    ShawRelative,
    Sinusoidal,
    Softmax,
    StreamingXL,
    T5Bias,
    TokenIndex,
    TransformerSpec,
    Tupe,
    Window,
    XLRelative,
    XPos,
)
from rlxf.attention.inspection import attention_weights
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.positions.base import LayerPosition, PositionEmbedding
from rlxf.attention.registry import OPTIONAL, TECHNIQUES
from rlxf.attention.token_index import EMPTY
from tests.attention.specs import ALONE, CAUSAL, DEFAULT, SPECS, each, shared_model
from tests.attention.worlds import numbers, random_segment

X = numbers(2, 5, DEFAULT.width)
INDEX = TokenIndex.range(2, 5)


@pytest.mark.parametrize(
    "name", ["width", "layers", "heads", "kv_heads", "feed_forward", "feed_forward_chunk"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_at_least_1(name, value):
    with pytest.raises(ValueError, match=f"must be at least 1, got {value}"):
        TransformerSpec(**{name: value})


def test_heads_divide_the_width():
    with pytest.raises(ValueError, match="heads must divide width, got 3 heads and width 64"):
        TransformerSpec(heads=3)


def test_key_heads_divide_the_heads():
    with pytest.raises(ValueError, match="kv_heads must divide heads, got 3 kv_heads and 4 heads"):
        TransformerSpec(heads=4, kv_heads=3)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_is_a_probability_below_1(dropout):
    with pytest.raises(ValueError, match=f"dropout must be from 0 to below 1, got {dropout}"):
        TransformerSpec(dropout=dropout)


@pytest.mark.parametrize(
    ("field", "value"), [("norm", "middle"), ("norm_type", "rms"), ("qk_norm", "x"), ("attention_gate", "x")]
)
def test_unknown_option_words_raise(field, value):
    with pytest.raises(ValueError, match=f"{field} must be one of .* got '{value}'"):
        TransformerSpec(**{field: value})


@pytest.mark.parametrize("axis", TECHNIQUES)
@pytest.mark.parametrize("choice", [RoPE(), Window(3), Softmax(), XL(4), Add(), Softmax, "Full", 3])
def test_technique_is_accepted_only_on_its_own_axis(axis, choice):
    if type(choice) in TECHNIQUES[axis].values():
        assert getattr(TransformerSpec(**{axis: choice}), axis) is choice
        return
    with pytest.raises(TypeError, match=f"{axis} must be one of .*{re.escape(repr(choice))}"):
        TransformerSpec(**{axis: choice})


@pytest.mark.parametrize("axis", [axis for axis in TECHNIQUES if axis not in OPTIONAL])
def test_only_position_and_memory_may_be_none(axis):
    with pytest.raises(TypeError, match=f"{axis} must be one of .* got None"):
        TransformerSpec(**{axis: None})
    with pytest.raises(ValueError, match=f"{axis} must be an object"):
        TransformerSpec.from_dict({axis: None})


class NonPairwiseKernel(Kernel):
    """Kernel without weights of single query-key pairs."""

    def build(self, width, heads):
        raise NotImplementedError

    def __repr__(self):
        return "OfNoPair()"


@pytest.mark.parametrize("technique", TECHNIQUES["position"].values(), ids=TECHNIQUES["position"])
def test_pairwise_position_requires_pairwise_kernel(technique):
    sizes = {"pattern": Full(), "width": 8, "heads": 2, "score_heads": 2, "causal": True}
    technique().check(SimpleNamespace(kernel=Softmax(), **sizes))
    other = SimpleNamespace(kernel=NonPairwiseKernel(), **sizes)
    layer = technique().build(8, 2)
    shared = technique().build_embedding(8, 2)
    changes = type(layer).bias is not LayerPosition.bias or type(shared).bias is not PositionEmbedding.bias
    changes = changes and technique is not RoPE  # its bias is only for keys that a memory moves
    if not changes and type(layer).value_average is LayerPosition.value_average:
        technique().check(other)
        return
    with pytest.raises(ValueError, match=re.escape(f"{technique()} changes") + r".*OfNoPair\(\)"):
        technique().check(other)


def test_memory_requires_causal_attention():
    with pytest.raises(ValueError, match=r"memory XL\(length=4\) needs causal=True"):
        TransformerSpec(memory=XL(4), causal=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(0), "Window size must be at least 1, got 0"),
        (lambda: XL(0), "XL memory length must be at least 1, got 0"),
        (lambda: LearnedAbsolute(0), "LearnedAbsolute max_length must be at least 1, got 0"),
        (lambda: Sinusoidal(base=1.0), "Sinusoidal base must be above 1, got 1.0"),
        (lambda: XLRelative(base=float("nan")), "XLRelative base must be finite, got nan"),
        (lambda: XLRelative(recency_bias=-1.0), "XLRelative recency_bias must be at least 0, got -1.0"),
        (lambda: XLRelative(recency_bias=float("inf")), "XLRelative recency_bias must be finite, got inf"),
        (lambda: RoPE(base=-2.0), "RoPE base must be above 1, got -2.0"),
        (lambda: RoPE(factor=0.5), "RoPE factor must be at least 1, got 0.5"),
        (
            lambda: RoPE(scaling="su"),
            "RoPE scaling must be one of ('linear', 'ntk', 'yarn', 'dynamic'), got 'su'",
        ),
        (lambda: RoPE(scaling="yarn"), "RoPE scaling='yarn' needs original_length, the length in training"),
        (lambda: RoPE(scaling="dynamic", original_length=0), "original_length must be at least 1, got 0"),
        (
            lambda: RoPE(original_length=64),
            "RoPE original_length=64 has no effect with scaling='linear'; leave it out or choose "
            "scaling='yarn' or 'dynamic'",
        ),
        (
            lambda: RoPE(scaling="dynamic", original_length=64, truncate=False),
            "RoPE truncate=False has no effect with scaling='dynamic'; leave it out or choose scaling='yarn'",
        ),
        (
            lambda: RoPE(scaling="yarn", original_length=64, beta_fast=1.0),
            "RoPE beta_fast must exceed beta_slow 1.0, got 1.0",
        ),
        (
            lambda: RoPE(scaling="yarn", original_length=64, attention_factor=0.0),
            "RoPE attention_factor must be above 0, got 0.0",
        ),
        (lambda: CoPE(1), "CoPE positions must be at least 2, got 1"),
        (lambda: XPos(scale_base=0.0), "XPos scale_base must be above 0, got 0.0"),
        (lambda: XPos(base=1.0), "XPos base must be above 1, got 1.0"),
        (lambda: Multiplicative(0), "Multiplicative max_length must be at least 1, got 0"),
        (lambda: Floater(step=0.0), "Floater step must be above 0 and at most 100.0, got 0.0"),
        (lambda: Floater(substeps=0), "Floater substeps must be at least 1, got 0"),
        (lambda: ShawRelative(0), "ShawRelative max_distance must be at least 1, got 0"),
        (lambda: T5Bias(buckets=7), "T5Bias buckets must be even, got 7"),
        (lambda: T5Bias(buckets=2), "T5Bias buckets must be at least 4, got 2"),
        (lambda: T5Bias(max_distance=16), "T5Bias max_distance must exceed 16, got 16"),
        (lambda: KERPLE("linear"), r"KERPLE form must be one of ('log', 'power'), got 'linear'"),
        (lambda: FIRE(hidden=0), "FIRE hidden must be at least 1, got 0"),
        (lambda: FIRE(threshold=0.0), "FIRE threshold must be above 0, got 0.0"),
        (lambda: Tupe(0), "Tupe max_length must be at least 1, got 0"),
        (lambda: Tupe(buckets=0), "Tupe buckets must be at least 4, got 0"),
        (lambda: Deberta(0), "Deberta max_distance must be at least 1, got 0"),
        (lambda: Deberta(form="v3"), "Deberta form must be one of ('code', 'paper'), got 'v3'"),
    ],
)
def test_options_are_in_range(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (Sinusoidal(), "Sinusoidal needs an even width, got 9"),
        (XLRelative(), "XLRelative needs an even width, got 9"),
        (RoPE(), "RoPE needs an even width per head, got 9 / 3 = 3; use another position, or other numbers"),
    ],
)
def test_positions_require_even_widths(position, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(width=9, heads=3, position=position)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": LSH(), "kv_heads": 1}, r"LSH\(.*\) computes features of the keys .* kv_heads=1"),
        ({"kernel": Routing(), "kv_heads": 1}, r"Routing\(.*\) computes features of the keys .* kv_heads=1"),
        ({"kernel": RFA(gate=True), "kv_heads": 1}, r"RFA\(.*\) computes features of the keys .* kv_heads=1"),
        ({"kernel": LSH(), "qk_norm": "rms"}, r"LSH\(.*\) scales keys .* use qk_norm=None"),
        ({"kernel": RFA(), "qk_norm": "l2"}, r"RFA\(.*\) normalizes queries and keys, and qk_norm='l2'"),
        ({"memory": KNN(), "qk_norm": "rms"}, r"KNN\(.*\) normalizes queries .* use qk_norm=None"),
        (
            {"kernel": Differential(), "width": 12},
            r"Differential\(.*\) splits each head into two halves, and",
        ),
        ({"kernel": Differential(), "position": ShawRelative()}, r"Differential\(.* ShawRelative\(.* RoPE"),
        (
            {"kernel": Differential(), "pattern": Longformer()},
            r"Differential\(.* Longformer\(.* choose another",
        ),
        ({"kernel": Differential(), "memory": KNN()}, r"KNN\(.* Differential\(.* use kernel=Softmax"),
        ({"recurrence": GRU(), "qk_norm": "rms"}, r"qk_norm rms has no effect, because all layers"),
        ({"recurrence": GRU(), "kv_heads": 1}, r"kv_heads 1 has no effect, because all layers"),
    ],
)
def test_attention_options_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": DynamicSpan(8, 2, penalty=0.5)}, r"DynamicSpan\(.*; set its penalty to 0, or choose"),
        ({"kernel": Routing(2, commitment=0.5)}, r"Routing\(.*; set its commitment to 0, or choose"),
        (
            {"kernel": HeadKernels(Softmax(), Routing(2, commitment=0.5), 1)},
            r"HeadKernels\(.*; set its commitment to 0, or choose",
        ),
    ],
)
def test_reversible_layers_name_the_option_of_a_loss_that_depends_on_tokens(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(residual=Reversible(), **fields)


def test_recurrences_that_do_not_fit_the_heads_name_another():
    with pytest.raises(ValueError, match=r"RetNet .* got width 6 and 2 heads; choose .*, e.g. GLA\(\)"):
        TransformerSpec(width=6, heads=2, recurrence=RetNet())
    TransformerSpec(width=6, heads=2, recurrence=GLA())


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (KNN(4, layer=2), r"KNN\(.* in layer 2, which has the recurrence LRU\(.*; use layer=3, or list 1 in"),
        (KNN(4, layer=4), r"layer of KNN\(.* must be at most the number of layers, 3; use layer=None"),
        (Compressive(2, 2, 2), r"Compressive\(.* needs attention in every layer, .* use memory=XL\(M\)"),
        (RMT(4, 2), r"RMT\(.* needs attention in every layer, .* use memory=XL\(M\)"),
    ],
)
def test_memories_that_do_not_fit_the_layers_of_a_recurrence_are_refused(memory, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(layers=3, recurrence=LRU(), attention_layers=(0, 2), memory=memory)


def test_ntk_scaling_requires_more_than_two_features_per_head():
    with pytest.raises(ValueError, match=r"RoPE\(.*scaling='ntk'.*needs more than 2 features per head"):
        TransformerSpec(width=8, heads=4, position=RoPE(scaling="ntk", factor=2.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": Performer()}, r"RoPE\(.*'dynamic'.*weight of each pair.*Performer.*choose another"),
        ({"causal": False}, r"RoPE\(.*'dynamic'.*causal=False.*choose scaling='ntk' or causal=True"),
        ({"heads": 8}, r"RoPE\(.*'dynamic'.*more than 2 features per head"),
    ],
)
def test_dynamic_scaling_needs_pairs_and_a_causal_transformer(changes, message):
    position = RoPE(scaling="dynamic", factor=2.0, original_length=64)
    with pytest.raises(ValueError, match=message):
        TransformerSpec(**{"width": 16, "heads": 2, "position": position} | changes)


def test_xpos_and_cope_need_a_causal_transformer():
    with pytest.raises(ValueError, match=r"XPos\(.*later tokens.*causal=False.*choose RoPE\(\)"):
        TransformerSpec(position=XPos(), causal=False)
    with pytest.raises(ValueError, match=r"CoPE\(.*later query.*causal=False.*choose T5Bias\(\)"):
        TransformerSpec(position=CoPE(), causal=False)
    with pytest.raises(ValueError, match=r"XPos needs an even width per head, got 6 / 2 = 3"):
        TransformerSpec(width=6, heads=2, position=XPos())


@pytest.mark.parametrize(
    ("axis", "technique"),
    [(axis, technique) for axis, techniques in TECHNIQUES.items() for technique in techniques.values()],
)
@given(heads=st.integers(1, 5), size=st.integers(1, 6), layers=st.integers(1, 3), causal=st.booleans())
@settings(max_examples=12)
def test_every_valid_spec_can_be_built(axis, technique, heads, size, layers, causal):
    """Invalid sizes raise when the spec is created, never later."""
    sizes = {"width": heads * size, "heads": heads, "layers": layers, "feed_forward": 3}
    try:
        spec = TransformerSpec(**sizes, causal=causal, **{axis: technique()})
    except ValueError:
        return
    model = spec.build()
    x = numbers(2, 3, spec.width, dtype=torch.float32)
    assert model(x, TokenIndex.range(2, 3))[0].shape == x.shape


# Files.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"widht": 8}, "no field ['widht']"),
        ({"position": {"name": "Rotary"}}, "no position named 'Rotary'"),
        ({"position": {"name": "Window"}}, "no position named 'Window'"),
        ({"position": "RoPE"}, "position must be an object with a \"name\", got 'RoPE'"),
        ({"pattern": {"size": 3}}, "pattern must be an object with a \"name\", got {'size': 3}"),
        ({"pattern": {"name": "Window", "sise": 3}}, "'sise'"),
        ({"pattern": {"name": "Window", "size": 0}}, "Window size must be at least 1, got 0"),
        ({"memory": {"name": "XL", "length": -3}}, "XL memory length must be at least 1, got -3"),
        ({"width": 10, "heads": 4}, "heads must divide width"),
        ([], "got []"),
        (None, "got None"),
    ],
)
def test_invalid_json_specs_raise(data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformerSpec.from_json(json.dumps(data))


def test_truncated_json_raises():
    with pytest.raises(ValueError, match="Unterminated"):
        TransformerSpec.from_json(DEFAULT.to_json()[:-20])


# Calls.


@pytest.mark.parametrize("shape", [(5,), (2, 4), (2, 5, 1)])
def test_position_and_episode_must_have_the_same_shape(shape):
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        TokenIndex(INDEX.position, torch.zeros(shape, dtype=torch.long))


@each({name: spec for name, spec in SPECS.items() if not spec.causal})
def test_an_encoder_cannot_act(spec):
    with pytest.raises(ValueError, match="only a causal transformer can act"):
        shared_model(spec).cache(shared_model(spec).initial_state(2), 4)


@each(CAUSAL)
def test_cache_capacity_must_hold_the_state(spec):
    model, run = shared_model(spec), random_segment(spec, INDEX)
    least = max(1, model.initial_state(2).index.shape[1])
    model.cache(model.initial_state(2), least, run.context)
    with pytest.raises(ValueError, match=f"capacity must be at least .* got {least - 1}"):
        model.cache(model.initial_state(2), least - 1, run.context)


def test_decoder_requires_a_context():
    model = shared_model(replace(DEFAULT, cross_attention=True))
    with pytest.raises(ValueError, match="cross_attention is True, but no context was given"):
        model(X, INDEX)
    with pytest.raises(ValueError, match="cross_attention is True, but no context was given"):
        model.cache(model.initial_state(2), 4)


@pytest.mark.parametrize("memory", [XL(4), RMT(4, 2)], ids=repr)
def test_context_without_cross_attention_raises(memory):
    model, context = shared_model(replace(DEFAULT, memory=memory)), Context(X, INDEX)
    for method in (model, model.next_state, model.encode, model.outputs, model.exits):
        with pytest.raises(ValueError, match="cross_attention is False, but a context was given"):
            method(X, INDEX, context=context)
    for call in (
        lambda: attention_weights(model, X, INDEX, None, context),
        lambda: model.cache(model.initial_state(2), 4, context),
    ):
        with pytest.raises(ValueError, match="cross_attention is False, but a context was given"):
            call()


def test_encoder_and_decoder_must_be_compatible():
    encoder, decoder = replace(DEFAULT, causal=False), replace(DEFAULT, cross_attention=True)
    with pytest.raises(ValueError, match="the same width, got 8 and 16"):
        EncoderDecoder(encoder, replace(decoder, width=16))
    with pytest.raises(ValueError, match="requires cross_attention=True"):
        EncoderDecoder(encoder, DEFAULT)
    with pytest.raises(ValueError, match="encoder gets no context; set cross_attention=False"):
        EncoderDecoder(decoder, decoder)


def test_memory_of_an_encoder_must_have_an_effect():
    decoder, index = replace(DEFAULT, cross_attention=True), TokenIndex.range(2, 12)
    x = numbers(2, 12, 8, dtype=torch.float32)
    for memory in (RMT(4, 2), StreamingXL(2, 1), Compressive(2, 2, 2), KNN(2, 4, 2)):
        encoder = EncoderDecoder(replace(DEFAULT, memory=memory), decoder).encoder
        without = replace(DEFAULT, memory=None).build()
        without.load_state_dict(encoder.state_dict(), strict=False)
        assert not torch.allclose(encoder.outputs(x, index), without.outputs(x, index), atol=1e-4), memory
    with pytest.raises(ValueError, match=r"memory XL\(length=4\) has no effect; use memory=None"):
        EncoderDecoder(replace(DEFAULT, memory=XL(4)), decoder)


@pytest.mark.parametrize(
    "position",
    [LearnedAbsolute(5), LearnedPerLayer(5), Multiplicative(5), Tupe(5), Tupe(5, buckets=None)],
    ids=repr,
)
def test_positions_beyond_the_learned_table_raise(position):
    model = shared_model(replace(DEFAULT, position=position))
    model(X, INDEX)
    with pytest.raises(ValueError, match=re.escape(f"position 5 has no vector: {position}")):
        model(X, TokenIndex.range(2, 5, start=1))
    cache = model.cache(model.initial_state(2), 4)
    with pytest.raises(ValueError, match="position 7 has no vector"):
        model.step(X[:, 0], TokenIndex.range(2, 1, start=7), cache)


TABLES = [LearnedAbsolute(5), LearnedPerLayer(5), Multiplicative(5), Tupe(5), Tupe(5, None), Floater()]


@pytest.mark.parametrize("position", TABLES, ids=repr)
def test_negative_positions_raise(position):
    model = shared_model(replace(DEFAULT, position=position))
    with pytest.raises(ValueError, match="positions count the steps of an episode from 0, got -1"):
        model(X, TokenIndex(INDEX.position - 1, INDEX.episode))


@pytest.mark.parametrize("position", TABLES, ids=repr)
@pytest.mark.parametrize("of_empty_slot", [-3, 10**9])
def test_position_of_an_empty_slot_is_arbitrary(position, of_empty_slot):
    model, empty = shared_model(replace(DEFAULT, position=position)), torch.arange(5) == 3
    indices = [
        TokenIndex(INDEX.position.masked_fill(empty, slot), INDEX.episode.masked_fill(empty, EMPTY))
        for slot in (0, of_empty_slot)
    ]
    torch.testing.assert_close(*(model(X, index)[0] for index in indices))
    caches = [model.cache(model.initial_state(2), 4) for _ in indices]
    tokens = zip(indices, caches, strict=True)
    steps = [model.step(X[:, 3], index.at(slice(3, 4)), cache)[0] for index, cache in tokens]
    torch.testing.assert_close(*steps)


@pytest.mark.parametrize("of_empty_slot", [-3, 2**40])
@each({name: spec for name, spec in ALONE.items() if not spec.cross_attention})
def test_position_of_an_empty_slot_is_arbitrary_for_every_technique(spec, of_empty_slot):
    model, empty = shared_model(spec), torch.tensor([False, False, True])
    start, x = TokenIndex.range(2, 3), numbers(2, 6, spec.width)
    outputs = []
    for slot in (0, of_empty_slot):
        padded = TokenIndex(start.position.masked_fill(empty, slot), start.episode.masked_fill(empty, EMPTY))
        first, state = model(x[:, :3], padded)
        second, _ = model(x[:, 3:], TokenIndex.range(2, 3, start=2), state)
        outputs.append(torch.cat([first, second], dim=1))
    others = torch.arange(6) != 2
    torch.testing.assert_close(*(y[:, others] for y in outputs))


def test_specs_are_frozen():
    with pytest.raises(AttributeError):
        DEFAULT.width = 16
    with pytest.raises(AttributeError):
        GRUGate().bias = 1.0
    assert Full() == Full()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Window(2.5), "Window size must be a whole number, got 2.5"),
        (lambda: XL(True), "XL memory length must be a whole number, got True"),
        (lambda: LearnedAbsolute("8"), "max_length must be a whole number, got '8'"),
        (lambda: Tupe(buckets=2.5), "Tupe buckets must be a whole number, got 2.5"),
        (lambda: RoPE(factor="2"), "RoPE factor must be a number, got '2'"),
        (lambda: Floater(step=math.inf), "Floater step must be finite, got inf"),
        (lambda: GRUGate("x"), "bias must be a number, got 'x'"),
        (lambda: HighwayGate(math.nan), "bias must be finite, got nan"),
        (lambda: RoPE(math.inf), "base must be finite, got inf"),
        (lambda: TransformerSpec(width="8"), "width must be a whole number, got '8'"),
        (lambda: TransformerSpec(layers=2.0), "layers must be a whole number, got 2.0"),
        (lambda: TransformerSpec(causal="no"), "causal must be True or False, got 'no'"),
        (lambda: TransformerSpec.from_dict({"position": {"name": ["a"]}}), r"no position named \['a'\]"),
    ],
)
def test_values_of_wrong_type_raise(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


SEGMENT = TokenIndex.range(2, 3)
OTHER_STATES = {
    "GRU from LSTM": (GRU(), LSTM()),
    "minGRU from Gated DeltaNet": (MinGRU(), GatedDeltaNet()),
    "Gated DeltaNet from minGRU": (GatedDeltaNet(), MinGRU()),
    "attention from minGRU": (None, MinGRU()),
    "minGRU from attention": (MinGRU(), None),
    "Gated DeltaNet from DeltaNet": (GatedDeltaNet(), DeltaNet()),
}


@pytest.mark.parametrize(("own", "other"), OTHER_STATES.values(), ids=OTHER_STATES)
def test_recurrent_states_of_another_core_are_refused(own, other):
    transformer, source = (TransformerSpec(width=8, recurrence=each).build() for each in (own, other))
    names = ["no technique" if each is None else type(each).__name__ for each in (other, own)]
    message = "its recurrent states are those of {}, those of this core of {}; .*initial_state".format(*names)
    for use in (transformer.forward, transformer.outputs, transformer.exits):
        with pytest.raises(ValueError, match=message):
            use(torch.zeros(2, 3, 8), SEGMENT, source.initial_state(2))
    with pytest.raises(ValueError, match=message):
        transformer.cache(source.initial_state(2), 4)


MEMORIES = {"XL": XL(4), "RMT": RMT(4, 2), "RATE": RATE(4, 2), "StreamingXL": StreamingXL(4, 2)}


@pytest.mark.parametrize(("own", "other"), [*permutations(MEMORIES, 2)])
def test_states_of_another_memory_with_recurrent_states_are_refused(own, other):
    transformer, source = (TransformerSpec(width=8, memory=MEMORIES[name]).build() for name in (own, other))
    state, names = source.initial_state(2), ["no technique" if n == "XL" else n for n in (other, own)]
    message = "its recurrent states are those of {}, those of this core of {}; ".format(*names)
    for use in (transformer.forward, transformer.outputs, transformer.next_state):
        with pytest.raises(ValueError, match=message):
            use(torch.zeros(2, 3, 8), SEGMENT, state)
    with pytest.raises(ValueError, match=message):
        transformer.cache(state, 4)


def test_recurrent_states_of_other_options_are_refused():
    small, large = (TransformerSpec(width=8, recurrence=Mamba2(state=n)).build() for n in (2, 4))
    with pytest.raises(ValueError, match=r"of another core: its recurrent states are \{'0.state'"):
        small(torch.zeros(2, 3, 8), SEGMENT, large.initial_state(2))


NOT_FINITE = {
    "XL": (TransformerSpec(width=8, memory=XL(4)), "the input of layer 2 in the memory state"),
    "RMT": (TransformerSpec(width=8, memory=RMT(4, 2)), r"'tokens' of the memory RMT\("),
    "LRU": (TransformerSpec(width=8, recurrence=LRU()), r"'state' of layer 2, LRU\("),
    "LRU below attention": (
        TransformerSpec(width=8, layers=3, recurrence=LRU(), attention_layers=(2,), memory=XL(4)),
        r"'state' of layer 2, LRU\(",
    ),
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("spec", "place"), NOT_FINITE.values(), ids=NOT_FINITE)
def test_states_that_are_not_finite_are_refused(spec, place, value):
    transformer = spec.build()
    _, state = transformer(torch.zeros(2, 3, 8), SEGMENT)
    spoiled = state.hidden[1] if spec.recurrence is None else state.recurrent.passes[1]["state"]
    spoiled = state.recurrent.memory["tokens"] if spec.memory == RMT(4, 2) else spoiled
    spoiled[1].view(-1)[0] = value
    message = f"{place}.* contains {value} in row 1 of the batch; begin with `initial_state`"
    with pytest.raises(ValueError, match=message):
        transformer(torch.zeros(2, 3, 8), SEGMENT, state)
    with pytest.raises(ValueError, match=message):
        transformer.cache(state, 4)


@pytest.mark.parametrize("stateful", [spec for spec, _ in NOT_FINITE.values()], ids=NOT_FINITE)
def test_states_on_another_device_are_refused(stateful):
    transformer = stateful.build()
    with torch.device("meta"):
        state = stateful.build().initial_state(2)
    with pytest.raises(ValueError, match=r"the state is on meta, but this core is on cpu; .*initial_state"):
        transformer(torch.zeros(2, 3, 8), SEGMENT, state)
    with pytest.raises(ValueError, match=r"the state is on meta, but this core is on cpu; .*initial_state"):
        transformer.cache(state, 4)


@pytest.mark.parametrize("memory", [XL(4), RMT(4, 2)], ids=str)
@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({"layers": 3}, 2, "the state has 3 layers, 2 rows and width 8, .* 2 layers, 2 rows and width 8"),
        ({"width": 16}, 2, "the state has 2 layers, 2 rows and width 16, "),
        ({}, 1, "the state has 2 layers, 1 rows and width 8, "),
    ],
    ids=["layers", "width", "rows"],
)
def test_states_of_other_sizes_are_refused(memory, changes, rows, message):
    spec = TransformerSpec(width=8, memory=memory)
    state = replace(spec, **changes).build().initial_state(rows)
    with pytest.raises(ValueError, match=message):
        spec.build()(torch.zeros(2, 3, 8), SEGMENT, state)


@pytest.mark.parametrize("stateful", [spec for spec, _ in NOT_FINITE.values()], ids=NOT_FINITE)
def test_states_of_another_dtype_are_refused(stateful):
    transformer = stateful.build()
    _, state = transformer(torch.zeros(2, 3, 8), SEGMENT)
    transformer.double()
    for use in (
        lambda: transformer(torch.zeros(2, 3, 8).double(), SEGMENT, state),
        lambda: transformer.cache(state, 4),
    ):
        with pytest.raises(ValueError, match=r"in torch.float32, but those .* in torch.float64; begin with"):
            use()
    _, fresh = transformer(torch.zeros(2, 3, 8).double(), SEGMENT)
    transformer(torch.zeros(2, 3, 8).double(), SEGMENT, fresh)


@pytest.mark.parametrize("memory", [XL(4), RMT(4, 2)], ids=str)
def test_states_with_an_index_of_another_shape_are_refused(memory):
    transformer = TransformerSpec(width=8, memory=memory).build()
    state = transformer.initial_state(2)
    for shape in ((2, 5), (1, state.index.shape[1])):
        with pytest.raises(ValueError, match=rf"index of the state has shape {re.escape(str(shape))}, but"):
            transformer(torch.zeros(2, 3, 8), SEGMENT, replace(state, index=TokenIndex.range(*shape)))


@pytest.mark.parametrize("core", [{"recurrence": GRU()}, {"memory": RMT(4, 2)}], ids=str)
def test_recurrent_states_of_other_rows_are_refused(core):
    transformer = TransformerSpec(width=8, **core).build()
    state = replace(transformer.initial_state(2), recurrent=transformer.initial_state(1).recurrent)
    with pytest.raises(ValueError, match="the recurrent state has 1 rows, but the inputs of layers have 2"):
        transformer(torch.zeros(2, 3, 8), SEGMENT, state)


@pytest.mark.parametrize(
    ("x", "index"),
    [((2, 7), (2, 1)), ((3, 8), (3, 1)), ((1, 8), (1, 1)), ((2, 8), (2, 2)), ((2, 1, 8), (2, 1))],
    ids=str,
)
@pytest.mark.parametrize(
    "core",
    [
        {},
        {"memory": RMT(4, 2)},
        {"recurrence": GRU()},
        {"position": XLRelative(), "pattern": Window(4), "memory": XL(3)},
    ],
    ids=str,
)
def test_steps_of_other_shapes_are_refused(core, x, index):
    transformer = TransformerSpec(width=8, **core).build()
    cache = transformer.cache(transformer.initial_state(2), 4)
    message = rf"needs tokens of shape \(2, 8\) .* got {re.escape(str(x))} and {re.escape(str(index))}"
    for step in (transformer.step, transformer.early_step):
        with pytest.raises(ValueError, match=message):
            step(torch.zeros(x), TokenIndex.range(*index), cache)
    assert (cache.index.episode == EMPTY).sum() == 2 * (cache.index.shape[1] - cache.fixed_slots)


def test_a_step_of_no_rows_is_refused():
    transformer = DEFAULT.build()
    cache = transformer.cache(transformer.initial_state(2), 4).rows(torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match="at least one row"):
        transformer.step(torch.zeros(0, 8), TokenIndex.range(0, 1), cache)


def test_an_index_begins_at_position_0_or_later():
    with pytest.raises(ValueError, match="positions count from 0, got start=-3"):
        TokenIndex.range(2, 6, start=-3)


@pytest.mark.parametrize(
    ("layers", "error"),
    [(1, TypeError), ("12", TypeError), (None, TypeError), ([-1], ValueError), ([0, 0], ValueError)],
    ids=str,
)
def test_attention_layers_that_are_no_layer_numbers_are_refused(layers, error):
    with pytest.raises(error, match="attention_layers must be"):
        TransformerSpec(attention_layers=layers)
    with pytest.raises(ValueError, match="attention_layers must be"):
        TransformerSpec.from_dict({"attention_layers": layers})


@pytest.mark.parametrize(
    ("field", "value"),
    [("width", 64.0), ("layers", None), ("causal", 1), ("dropout", "0.1"), ("attention_layers", "ab")],
    ids=str,
)
def test_values_of_another_type_in_json_raise_value_errors(field, value):
    with pytest.raises(ValueError, match=f"TransformerSpec: {field} must be .* got {value!r}"):
        TransformerSpec.from_json(json.dumps({field: value}))


def test_unknown_keys_of_any_type_raise_value_errors():
    with pytest.raises(ValueError, match=r"has no field \[1, 'x'\]; it has \["):
        TransformerSpec.from_dict({1: 2, "x": 3})


def test_attention_layers_in_a_list_equal_those_in_a_tuple():
    spec = TransformerSpec(layers=3, recurrence=MinGRU(), attention_layers=[2, 0])
    assert spec.attention_layers == (0, 2)
    assert spec == TransformerSpec.from_json(spec.to_json())
    assert hash(spec) == hash(replace(spec, attention_layers=(0, 2)))


@pytest.mark.parametrize(
    "core",
    [
        TransformerSpec(width=8),
        TransformerSpec(width=8, recurrence=GRU()),
        TransformerSpec(width=8, memory=RMT(4, 2)),
    ],
    ids=["attention", "recurrence", "memory tokens"],
)
@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8), (2, 4, 8), (3, 3, 8), (2, 3, 4), (2, 8)], ids=str)
def test_tokens_of_other_shapes_are_refused(core, shape):
    index = TokenIndex.range(*shape[:2]) if 0 in shape else SEGMENT
    message = rf"shape \(B, T, 8\) .* got {re.escape(str(shape))} and \(\d, \d\)"
    transformer = core.build()
    for use in (transformer.forward, transformer.outputs, transformer.exits):
        with pytest.raises(ValueError, match=message):
            use(torch.zeros(shape), index)


@pytest.mark.parametrize(
    ("axis", "choice"),
    [
        ("kernel", LayerKernels(Softmax(), Performer(), (0,))),
        ("pattern", LayerPatterns(Full(), Window(3), (0, 2))),
    ],
    ids=["kernel", "pattern"],
)
def test_choices_for_recurrent_layers_only_are_refused(axis, choice):
    message = rf"one of the choices of {re.escape(str(choice))} has no effect with attention_layers=\(1,\)"
    with pytest.raises(ValueError, match=message):
        TransformerSpec(layers=3, recurrence=GRU(), attention_layers=(1,), **{axis: choice})
    TransformerSpec(layers=3, recurrence=GRU(), attention_layers=(0, 1), **{axis: choice})


def test_a_projection_of_queries_and_keys_cannot_be_replaced():
    """Keys of the memory are computed from a part of its weight, without a call of the module."""
    attention = TransformerSpec(width=16, heads=2, layers=1).build().blocks[0].attention
    with pytest.raises(TypeError, match="qkv cannot be replaced by a Sequential"):
        attention.qkv = torch.nn.Sequential(attention.qkv)


def test_an_exit_by_the_confidence_of_outputs_needs_a_function():
    model = TransformerSpec(width=8, heads=2, layers=3, depth=CALM("softmax", threshold=0.5)).build().eval()
    with pytest.raises(ValueError, match="needs confidence_fn, a function"):
        model.early_outputs(torch.randn(1, 3, 8), TokenIndex.range(1, 3))
