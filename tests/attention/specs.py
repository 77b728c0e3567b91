"""Specs that the contract tests cover. Every technique in the registry is included automatically."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from rlxf.attention import (
    ACT,
    CALM,
    ETC,
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
    AdaptiveSpan,
    AddReLU,
    AGaLiTe,
    AttentionSinks,
    BigBird,
    BigBirdETC,
    Blockwise,
    Compressive,
    ConvFormer,
    CoPE,
    Deberta,
    DepthAdaptive,
    Differential,
    Dilated,
    DynamicSpan,
    ETCLabels,
    FixedColumns,
    Full,
    GatedDeltaNet,
    GRUGate,
    HeadKernels,
    HeadPatterns,
    InfiniAttention,
    LayerKernels,
    LayerPatterns,
    LearnedAbsolute,
    LearnedPerLayer,
    Linformer,
    Local1D,
    Local2D,
    Longformer,
    Mamba2,
    MinGRU,
    Multiplicative,
    Performer,
    RecurrentPerformer,
    RecurrentRFA,
    RetNet,
    Reversible,
    RoPE,
    Routing,
    ShawRelative,
    SinkSoftmax,
    Softmax,
    StreamingXL,
    Strided,
    T5Bias,
    Transformer,
    TransformerSpec,
    Tupe,
    Universal,
    UniversalSinusoid,
    Window,
    XLRelative,
    XPos,
)
from rlxf.attention.registry import TECHNIQUES

MEMORY = 4
"""Memory length: shorter than the test segments, so that old tokens are dropped."""

DEFAULT = TransformerSpec(width=8, heads=2, layers=2, feed_forward=12)
OF_ATTENTION = ("position", "pattern", "kernel", "memory", "kv_heads", "qk_norm", "attention_gate")
"""Fields without effect on a core whose layers are all recurrent; absolute positions are an exception."""

SHORT: dict[str, Any] = {
    "Window": Window(3),
    "AttentionSinks": AttentionSinks(2, 2),
    "Dilated": Dilated(2, 2),
    "Local1D": Local1D(2, 1),
    "Local2D": Local2D(4, 2, 2, 1, 1),
    "Strided": Strided(2),
    "FixedColumns": FixedColumns(3, 1),
    "Blockwise": Blockwise(2, 3),
    "ETC": ETC(1, 2, MEMORY),
    "Longformer": Longformer(2, global_tokens=2, farthest=MEMORY),
    "BigBird": BigBird(1, 1, 2, 1),
    "BigBirdETC": BigBirdETC(1, 1, 2, 2, farthest=MEMORY),
    "AdaptiveSpan": AdaptiveSpan(limit=4, ramp=3),
    "LSH": LSH(rounds=2, buckets=4),
    "Routing": Routing(clusters=2),
    "Linformer": Linformer(2, 1, sharing="none"),
    "DynamicSpan": DynamicSpan(limit=6, ramp=2),
    "RFA": RFA(32, sigma=2.0),
    "Performer": Performer(6),
    "XL": XL(MEMORY),
    "RMT": RMT(3, 2),
    "RATE": RATE(3, 2),
    "StreamingXL": StreamingXL(2, 2),
    "Compressive": Compressive(2, 2, 2),
    "KNN": KNN(2, 5, 2),
    "LearnedAbsolute": LearnedAbsolute(64),
    "LearnedPerLayer": LearnedPerLayer(64),
    "Multiplicative": Multiplicative(64),
    "ShawRelative": ShawRelative(2),
    "ETCLabels": ETCLabels(2, 2, segment=2),
    "T5Bias": T5Bias(buckets=4, max_distance=5),
    "Tupe": Tupe(64, buckets=4, max_distance=5),
    "Deberta": Deberta(2),
    "FIRE": FIRE(hidden=8, threshold=8.0),
    "XPos": XPos(scale_base=4.0),
    "CoPE": CoPE(4),
    "CALM": CALM("classifier", 0.5),
    "Mamba2": Mamba2(state=4),
    "ConvFormer": ConvFormer(3, kinds=2),
    "RecurrentRFA": RecurrentRFA(16, sigma=2.0),
    "RecurrentPerformer": RecurrentPerformer(6),
    "InfiniAttention": InfiniAttention(3),
}
"""Short settings of techniques whose default has no effect in a short test."""

LINFORMER = Linformer(64, 3)
"""Kernel for encoders: it covers all positions of a test, as LearnedAbsolute(64) does."""

GATED_RFA = RFA(32, sigma=2.0, gate=True, gate_bias=1.0)

ALONE = {
    f"{axis} {name}": replace(DEFAULT, **{axis: SHORT.get(name) or technique()})
    for axis, techniques in TECHNIQUES.items()
    for name, technique in techniques.items()
}

GTRXL = replace(
    DEFAULT,
    position=XLRelative(),
    pattern=Window(MEMORY + 1),
    memory=XL(MEMORY),
    residual=GRUGate(),
    norm="pre",
)

RECIPES = {
    "Dilated, some heads": replace(DEFAULT, pattern=Dilated(2, 2, plain_heads=1)),
    "Strided, merged": replace(DEFAULT, pattern=Strided(3, combination="merged", form="text")),
    "Strided, by head": replace(DEFAULT, pattern=Strided(2, combination="by-head")),
    "FixedColumns, by layer": replace(DEFAULT, pattern=FixedColumns(2, 1, combination="by-layer")),
    "FixedColumns, by head": replace(DEFAULT, pattern=FixedColumns(2, 1, combination="by-head")),
    "FixedColumns, a summary for each head": replace(DEFAULT, pattern=FixedColumns(3, 1, summaries=2)),
    "ETC, any distance": replace(DEFAULT, pattern=ETC(1, 2)),
    "encoder, ETC, any distance": replace(DEFAULT, pattern=ETC(1, 2), causal=False),
    "ETC, labels": replace(DEFAULT, pattern=ETC(1, 2), position=ETCLabels(2, 2, segment=2)),
    "encoder, ETC, labels": replace(
        DEFAULT, pattern=ETC(1, 2), position=ETCLabels(2, 2, segment=2), causal=False
    ),
    "encoder, ETC, global input, own segments": replace(
        DEFAULT,
        pattern=ETC(1, 2, global_input="given", segments=(3, 2)),
        position=ETCLabels(2, 2, segment=(3, 2), outside=6),
        causal=False,
    ),
    "encoder, ETC, own segments of one length": replace(DEFAULT, pattern=ETC(2, 2, segments=2), causal=False),
    "encoder, BigBirdETC, global input": replace(
        DEFAULT, pattern=BigBirdETC(1, 1, 2, 2, global_input="given"), causal=False, position=RoPE()
    ),
    "ETC, labels of sentences": replace(
        DEFAULT, pattern=ETC(1, 2), position=ETCLabels(2, 2, segment=(2, 3), outside=5)
    ),
    "ETC, positions of global tokens, labels": replace(
        DEFAULT, pattern=ETC(1, (1, 4)), position=ETCLabels(2, (1, 4), segment=(2, 3), outside=5)
    ),
    "ETC, positions of global tokens, memory": replace(GTRXL, pattern=ETC(1, (0, 3, 5), MEMORY)),
    "encoder, ETC, positions of global tokens": replace(
        DEFAULT, pattern=ETC(1, (1, 4), global_input="given", segments=2), causal=False
    ),
    "BigBird, numbers of global blocks": replace(DEFAULT, pattern=BigBird(1, 1, 2, (1, 4)), position=RoPE()),
    "BigBirdETC, positions of global tokens": replace(DEFAULT, pattern=BigBirdETC(1, 1, 2, (0, 3))),
    "BigBirdETC, any distance": replace(DEFAULT, pattern=BigBirdETC(1, 1, 2, 2)),
    "BigBird, draws for each layer": replace(
        DEFAULT, layers=3, pattern=BigBird(1, 1, 2, 1, draw_sharing="layer"), position=RoPE()
    ),
    "BigBird, given blocks": replace(
        DEFAULT,
        pattern=BigBird(
            2, 1, 1, 1, given_blocks=(((), (3,), (4,), (1,), (2,), ()), ((), (), (), (), (1,), ()))
        ),
        kernel=AdaptiveSpan(limit=4, ramp=3),
    ),
    "BigBirdETC, draws for each layer": replace(
        DEFAULT, pattern=BigBirdETC(1, 1, 2, 2, draw_sharing="layer")
    ),
    "Longformer, any distance": replace(DEFAULT, pattern=Longformer(2, global_tokens=2)),
    "Longformer, dilated": replace(DEFAULT, pattern=Longformer(2, 2, plain_heads=1, global_tokens=2)),
    "Longformer by layer, positions of global tokens": replace(
        DEFAULT, layers=3, pattern=Longformer((2, 4, 4), (1, 1, 2), 1, (0, 3, 5)), position=XLRelative()
    ),
    "Longformer, positions of global tokens, memory": replace(
        GTRXL, pattern=Longformer((2, 4), global_tokens=(1, 5), farthest=MEMORY)
    ),
    "encoder, Longformer, positions of global tokens": replace(
        DEFAULT, pattern=Longformer((2, 4), global_tokens=(0, 3)), causal=False
    ),
    "growing windows": replace(GTRXL, layers=3, pattern=Window((2, 3, 5))),
    "growing windows, spans": replace(
        DEFAULT, pattern=Window((2, 4)) | Dilated(2, 5), kernel=AdaptiveSpan(limit=4, ramp=3), position=RoPE()
    ),
    "Longformer and distances": replace(
        DEFAULT, pattern=Longformer(2, global_tokens=3), position=XLRelative()
    ),
    "two patterns": replace(DEFAULT, pattern=Window(3) | Strided(3) & Window(7)),
    "spans and values by distance": replace(
        DEFAULT, kernel=AdaptiveSpan(limit=3, ramp=2), position=ShawRelative(2)
    ),
    "spans of tokens, global tokens and distances": replace(
        DEFAULT,
        kernel=DynamicSpan(limit=4, ramp=2),
        pattern=Longformer(2, global_tokens=3),
        position=XLRelative(),
    ),
    "spans without the token itself": replace(
        DEFAULT, kernel=AdaptiveSpan(limit=4, ramp=3, include_self=False), position=XLRelative()
    ),
    "spans of tokens without the token itself": replace(
        DEFAULT, kernel=DynamicSpan(limit=6, ramp=2, include_self=False)
    ),
    "routing heads next to local heads": replace(
        DEFAULT,
        kernel=HeadKernels(Softmax(), Routing(2), 1),
        pattern=HeadPatterns(Window(3), Full(), 1),
        position=RoPE(),
    ),
    "routing heads in the last layer, distances": replace(
        DEFAULT,
        layers=3,
        kernel=LayerKernels(Softmax(), HeadKernels(Softmax(), Routing(2), 1), (2,)),
        pattern=LayerPatterns(Window(4), HeadPatterns(Window(3), Full(), 1), (2,)),
        position=XLRelative(),
    ),
    "routing in the last layer, gates and memory": replace(
        GTRXL, layers=3, kernel=LayerKernels(Softmax(), Routing(2), (2,))
    ),
    "spans of heads and of tokens, global tokens": replace(
        DEFAULT,
        kernel=HeadKernels(AdaptiveSpan(limit=4, ramp=3), DynamicSpan(limit=4, ramp=2), 1),
        pattern=Longformer(2, global_tokens=3),
        position=T5Bias(4, 5),
    ),
    "routing and spans of tokens, values by distance": replace(
        DEFAULT,
        kernel=HeadKernels(Routing(2), DynamicSpan(limit=4, ramp=2), 1),
        position=ShawRelative(2),
        memory=XL(MEMORY),
    ),
    "encoder, routing heads next to local heads": replace(
        DEFAULT,
        kernel=HeadKernels(Softmax(softmax1=True), Routing(2), 1),
        pattern=HeadPatterns(Window(3), Full(), 1),
        causal=False,
    ),
    "spans in some heads, compressed memory": replace(
        DEFAULT,
        kernel=HeadKernels(Softmax(), AdaptiveSpan(limit=4, ramp=3), 1),
        memory=Compressive(2, 2, 2, "most-used"),
    ),
    "linear attention in one layer, hashing in another": replace(
        DEFAULT, layers=3, kernel=LayerKernels(LSH(2, 4), Performer(6), (1,)), position=RoPE()
    ),
    "gated RFA and Linformer": replace(DEFAULT, kernel=LayerKernels(Linformer(2, 1), GATED_RFA, (0,))),
    "dilations by head": replace(DEFAULT, pattern=HeadPatterns(Dilated(2, 1), Dilated(2, 3), 1)),
    "Linformer, shared projection": replace(
        DEFAULT, kernel=Linformer(2, 2, sharing="layer", bias=True), position=RoPE(), memory=XL(MEMORY)
    ),
    "Linformer, convolution, joined patterns": replace(
        DEFAULT, kernel=Linformer(2, (1, 2), "convolution", "head"), pattern=Window(4) | Strided(3)
    ),
    "Linformer, max by head": replace(
        DEFAULT, kernel=Linformer(2, 1, "max"), pattern=Dilated(2, 2, plain_heads=1)
    ),
    "Linformer and global tokens": replace(
        DEFAULT, kernel=Linformer(2, 1, sharing="key-value"), pattern=Longformer(4, global_tokens=3)
    ),
    "RFA, gated": replace(DEFAULT, kernel=GATED_RFA),
    "RFA, gated, with memory and RoPE": replace(
        DEFAULT, kernel=GATED_RFA, position=RoPE(), memory=XL(MEMORY), residual=GRUGate()
    ),
    "RFA, gated, dilated pattern": replace(DEFAULT, kernel=GATED_RFA, pattern=Dilated(2, 2)),
    "RFA, gated, global tokens": replace(DEFAULT, kernel=GATED_RFA, pattern=Longformer(2, global_tokens=3)),
    "RFA, fixed sigma": replace(DEFAULT, kernel=RFA(32, sigma=2.0, fixed=True)),
    "RFA in a decoder": replace(DEFAULT, kernel=RFA(32, sigma=2.0), cross_attention=True),
    "Compressive, mean, RoPE": replace(
        DEFAULT, memory=Compressive(1, 3, 3, "mean"), position=RoPE(), residual=GRUGate()
    ),
    "Compressive, dilated, by distance": replace(
        DEFAULT, memory=Compressive(3, 1, 3, "dilated", "auto-encoding"), position=XLRelative(), norm="post"
    ),
    "Compressive, most used, values by distance": replace(
        DEFAULT, memory=Compressive(2, 2, 2, "most-used"), position=ShawRelative(2)
    ),
    "Compressive, max, spans": replace(
        DEFAULT,
        memory=Compressive(1, 2, 2, "max"),
        kernel=AdaptiveSpan(limit=4, ramp=3),
        position=T5Bias(4, 5),
    ),
    "Compressive, ratio 1, ACT": replace(
        DEFAULT, layers=3, memory=Compressive(2, 2, 1), depth=ACT(bias=-1.0)
    ),
    "Compressive, reversible": replace(
        DEFAULT, layers=3, memory=Compressive(2, 2, 2, measure="norm"), residual=Reversible()
    ),
    "KNN, gates and distances": replace(GTRXL, memory=KNN(MEMORY, 6, 3, layer=1)),
    "KNN, values by distance, top 1": replace(
        DEFAULT, memory=KNN(2, 3, 1), position=ShawRelative(2), pattern=Window(3)
    ),
    "KNN, reversible, RoPE": replace(
        DEFAULT, layers=3, memory=KNN(2, 8, 8), position=RoPE(), pattern=Window(2), residual=Reversible()
    ),
    "KNN in a decoder with early exit": replace(
        DEFAULT, memory=KNN(3, 4, 2), depth=CALM(), cross_attention=True, norm="post"
    ),
    "Performer, redrawn": replace(DEFAULT, kernel=Performer(redraw=1)),
    "Performer, gates and memory": replace(GTRXL, kernel=Performer(6), position=RoPE()),
    "Performer in a decoder": replace(DEFAULT, kernel=Performer(6), cross_attention=True),
    "Performer, heads differ": replace(
        DEFAULT, kernel=Performer(6), pattern=Dilated(2, 2, plain_heads=1), position=RoPE()
    ),
    "LSH, one round, distances": replace(
        DEFAULT, kernel=LSH(rounds=1, buckets=2), position=XLRelative(), pattern=Window(5)
    ),
    "LSH, RoPE": replace(DEFAULT, kernel=LSH(2, 4), position=RoPE(), pattern=Dilated(2, 2, plain_heads=1)),
    "LSH in chunks, distances": replace(
        DEFAULT, kernel=LSH(2, 4, chunk=2), position=XLRelative(), causal=False
    ),
    "Routing, global tokens": replace(
        DEFAULT, kernel=Routing(2), pattern=Longformer(2, global_tokens=3), position=XLRelative()
    ),
    "RecurrentRFA, gated, CALM": replace(
        DEFAULT,
        layers=3,
        recurrence=RecurrentRFA(16, sigma=2.0, gate=True, gate_bias=1.0),
        depth=CALM("classifier", 0.5),
    ),
    "RecurrentPerformer, relu, below attention": replace(
        GTRXL, recurrence=RecurrentPerformer(6, "relu"), attention_layers=(1,)
    ),
    "ConvFormer, three kinds": replace(DEFAULT, recurrence=ConvFormer(4, kinds=3), activation="gelu"),
    "ConvFormer below attention": replace(GTRXL, recurrence=ConvFormer(3), attention_layers=(1,)),
    "InfiniAttention, delta, gates, learned positions": replace(
        DEFAULT,
        recurrence=InfiniAttention(2, "delta"),
        residual=GRUGate(),
        position=LearnedAbsolute(64),
    ),
    "InfiniAttention above attention, CALM": replace(
        GTRXL, layers=3, recurrence=InfiniAttention(4), attention_layers=(0,), depth=CALM()
    ),
    "InfiniAttention, delta, ACT": replace(
        DEFAULT, layers=3, recurrence=InfiniAttention(3, "delta"), depth=ACT(bias=-1.0), norm="post"
    ),
    "TrXL-I": replace(GTRXL, residual=AddReLU()),
    "TrXL-I, adaptive depth, most-used memory": replace(
        DEFAULT, layers=3, residual=AddReLU(), depth=ACT(bias=-1.0), memory=Compressive(2, 2, 2, "most-used")
    ),
    "GatedDeltaNet, gates": replace(DEFAULT, recurrence=GatedDeltaNet(), residual=GRUGate()),
    "LRU, ACT": replace(DEFAULT, layers=3, recurrence=LRU(), depth=ACT(bias=-1.0)),
    "MinGRU, CALM": replace(DEFAULT, layers=3, recurrence=MinGRU(), depth=CALM("classifier", 0.5)),
    "RetNet, universal, post-norm": replace(
        DEFAULT, layers=3, recurrence=RetNet(), depth=Universal(), position=UniversalSinusoid(), norm="post"
    ),
    "LSTM, learned positions": replace(DEFAULT, recurrence=LSTM(), position=LearnedAbsolute(64)),
    "Mamba-2 below attention": replace(GTRXL, recurrence=Mamba2(4), attention_layers=(1,)),
    "attention below GLA": replace(
        DEFAULT, layers=3, recurrence=GLA(), attention_layers=(0,), position=RoPE(), pattern=Dilated(2, 2)
    ),
    "ETC above GatedDeltaNet": replace(
        DEFAULT, recurrence=GatedDeltaNet(), attention_layers=(1,), pattern=ETC(1, 2)
    ),
    "Longformer below MinGRU, memory": replace(
        GTRXL,
        recurrence=MinGRU(),
        attention_layers=(0,),
        pattern=Longformer(2, global_tokens=(1, 5), farthest=MEMORY),
    ),
    "BigBirdETC between LRU, CALM": replace(
        DEFAULT,
        layers=3,
        recurrence=LRU(),
        attention_layers=(1,),
        pattern=BigBirdETC(1, 1, 2, 2),
        depth=CALM(),
    ),
    "kNN memory below GatedDeltaNet": replace(
        GTRXL, recurrence=GatedDeltaNet(), attention_layers=(0,), memory=KNN(2, 5, 2, 1), pattern=Window(3)
    ),
    "kNN memory between LRU": replace(
        DEFAULT, layers=3, recurrence=LRU(), attention_layers=(1,), memory=KNN(2, 5, 2, 2), position=RoPE()
    ),
    "kNN memory and attention around MinGRU": replace(
        GTRXL,
        layers=3,
        recurrence=MinGRU(),
        attention_layers=(0, 2),
        memory=KNN(2, 5, 2),
        pattern=Window(3),
    ),
    "GRU, linear attention, CALM": replace(
        DEFAULT, layers=3, recurrence=GRU(), attention_layers=(1,), kernel=Performer(6), depth=CALM()
    ),
    "AGaLiTe and biased attention": replace(
        DEFAULT, layers=3, recurrence=AGaLiTe(), attention_layers=(0,), position=T5Bias(4, 5)
    ),
    "differential, rotated, grouped, gated": replace(
        DEFAULT,
        heads=2,
        kv_heads=1,
        kernel=Differential(),
        position=RoPE(),
        pattern=Window(4),
        qk_norm="rms",
        attention_gate="headwise",
    ),
    "differential, distances, memory": replace(GTRXL, kernel=Differential(0.8)),
    "differential decoder, dilated by head": replace(
        DEFAULT, kernel=Differential(), pattern=Dilated(2, 2, plain_heads=1), cross_attention=True
    ),
    "memory tokens, gates": replace(GTRXL, pattern=Full(), memory=RMT(4, 2)),
    "memory tokens, mutual, universal": replace(
        DEFAULT, layers=3, memory=RMT(2, 3, "mutual"), position=LearnedAbsolute(64), depth=Universal()
    ),
    "memory tokens, valve, distances": replace(
        DEFAULT, memory=RATE(3, 2, valve_heads=2), position=XLRelative(), norm="post", final_norm=False
    ),
    "memory tokens, causal valve, learned logits": replace(
        DEFAULT, memory=RATE(4, 2, "causal"), position=RoPE(), kernel=SinkSoftmax(), residual=GRUGate()
    ),
    "sinks, distances, gates": replace(GTRXL, pattern=Full(), memory=StreamingXL(3, 2)),
    "sinks, values by distance, learned logits": replace(
        DEFAULT, memory=StreamingXL(2, 3), position=ShawRelative(4), kernel=SinkSoftmax()
    ),
    "sinks, RoPE, reversible": replace(
        DEFAULT, layers=3, memory=StreamingXL(3, 1), position=RoPE(), residual=Reversible()
    ),
    "sinks, XPos": replace(DEFAULT, memory=StreamingXL(3, 2), position=XPos(scale_base=3.0)),
    "sinks, RoPE, dynamic, learned logits": replace(
        DEFAULT,
        memory=StreamingXL(2, 1),
        position=RoPE(scaling="dynamic", factor=8.0, original_length=3),
        kernel=SinkSoftmax(),
    ),
    "sinks below a recurrence, CALM": replace(
        DEFAULT,
        layers=3,
        memory=StreamingXL(2, 2),
        recurrence=MinGRU(),
        attention_layers=(0, 2),
        depth=CALM(),
    ),
    "sinks and columns": replace(DEFAULT, pattern=AttentionSinks(2, 1) | Strided(3), position=T5Bias(4, 5)),
    "learned logits, heads differ": replace(
        DEFAULT, kernel=SinkSoftmax(-1.0), pattern=Dilated(2, 2, plain_heads=1), position=XLRelative()
    ),
    "softmax1": replace(DEFAULT, kernel=Softmax(softmax1=True)),
    "softmax1 and values by distance": replace(
        DEFAULT, kernel=Softmax(softmax1=True), position=ShawRelative(2)
    ),
    "TUPE-A": replace(DEFAULT, position=Tupe(64, buckets=None)),
    "Deberta, paper's form": replace(DEFAULT, position=Deberta(2, form="paper")),
    "RoPE, linear": replace(DEFAULT, position=RoPE(factor=4.0)),
    "RoPE, ntk": replace(DEFAULT, position=RoPE(scaling="ntk", factor=4.0)),
    "RoPE, yarn, gates and memory": replace(
        GTRXL, position=RoPE(scaling="yarn", factor=4.0, original_length=64, beta_fast=4.0)
    ),
    "RoPE, yarn, linear attention": replace(
        DEFAULT, position=RoPE(scaling="yarn", factor=4.0, original_length=64), kernel=Performer(6)
    ),
    "RoPE, dynamic, gates and memory": replace(
        GTRXL, position=RoPE(scaling="dynamic", factor=8.0, original_length=4)
    ),
    "RoPE, dynamic, compressed, spans": replace(
        DEFAULT,
        position=RoPE(scaling="dynamic", factor=8.0, original_length=3),
        kernel=AdaptiveSpan(limit=4, ramp=3),
        memory=Compressive(2, 2, 2),
    ),
    "RoPE, dynamic, LSH, dilated": replace(
        DEFAULT,
        position=RoPE(scaling="dynamic", factor=8.0, original_length=3),
        kernel=LSH(2, 4),
        pattern=Dilated(2, 2, plain_heads=1),
    ),
    "KERPLE, power, gates and memory": replace(GTRXL, position=KERPLE("power")),
    "KERPLE, spans, compressed memory": replace(
        DEFAULT, position=KERPLE(), kernel=AdaptiveSpan(limit=4, ramp=3), memory=Compressive(2, 2, 2)
    ),
    "FIRE, gates and memory": replace(GTRXL, position=FIRE(8, 30.0)),
    "FIRE, routing, global tokens": replace(
        DEFAULT, position=FIRE(8, 8.0), kernel=Routing(2), pattern=Longformer(2, global_tokens=3)
    ),
    "XPos, gates and memory": replace(GTRXL, position=XPos(scale_base=3.0)),
    "XPos, nearest neighbors, dilated": replace(
        DEFAULT, position=XPos(scale_base=3.0), memory=KNN(2, 5, 2), pattern=Dilated(2, 2, plain_heads=1)
    ),
    "XPos, LSH, window": replace(DEFAULT, position=XPos(scale_base=3.0), kernel=LSH(2, 4), pattern=Window(5)),
    "CoPE, gates and memory": replace(GTRXL, position=CoPE(3)),
    "CoPE, global tokens, routing": replace(
        DEFAULT, position=CoPE(3), kernel=Routing(2), pattern=Longformer(2, global_tokens=3)
    ),
    "CoPE, spans, compressed memory": replace(
        DEFAULT, position=CoPE(3), kernel=AdaptiveSpan(limit=4, ramp=3), memory=Compressive(2, 2, 2)
    ),
    "CoPE, LSH, window": replace(DEFAULT, position=CoPE(3), kernel=LSH(2, 2), pattern=Window(5)),
    "LearnedPerLayer, gates and memory": replace(GTRXL, position=LearnedPerLayer(64)),
    "LearnedPerLayer, ACT, linear attention": replace(
        DEFAULT, layers=3, position=LearnedPerLayer(64), depth=ACT(bias=-1.0), kernel=Performer(6)
    ),
    "post-norm": replace(DEFAULT, norm="post"),
    "two of four key heads, distances, gates": replace(GTRXL, heads=4, kv_heads=2),
    "multi-query, rotated, spans": replace(
        DEFAULT, kv_heads=1, position=RoPE(), kernel=AdaptiveSpan(limit=4, ramp=3), qk_norm="rms"
    ),
    "multi-query, kNN memory, gated": replace(
        DEFAULT, kv_heads=1, memory=KNN(2, 5, 2), pattern=Window(3), attention_gate="headwise"
    ),
    "multi-query, most used, values by distance": replace(
        DEFAULT, kv_heads=1, memory=Compressive(2, 2, 2, "most-used"), position=ShawRelative(2), qk_norm="rms"
    ),
    "multi-query, global tokens": replace(
        DEFAULT,
        kv_heads=1,
        pattern=Longformer(2, global_tokens=3),
        qk_norm="l2",
        attention_gate="elementwise",
    ),
    "multi-query, ETC": replace(
        DEFAULT, kv_heads=1, pattern=ETC(1, 2), qk_norm="rms_all_heads", attention_gate="headwise"
    ),
    "encoder, multi-query, ETC": replace(DEFAULT, kv_heads=1, pattern=ETC(1, 2), qk_norm="l2", causal=False),
    "multi-query, Performer": replace(DEFAULT, kv_heads=1, kernel=Performer(6), qk_norm="rms_all_heads"),
    "multi-query, Linformer": replace(
        DEFAULT, kv_heads=1, kernel=Linformer(2, 1, sharing="layer"), memory=XL(MEMORY), qk_norm="l2"
    ),
    "multi-query decoder, gated": replace(
        DEFAULT, kv_heads=1, cross_attention=True, qk_norm="rms", attention_gate="elementwise"
    ),
    "multi-query, reversible": replace(
        DEFAULT,
        kv_heads=1,
        residual=Reversible(),
        qk_norm="rms",
        attention_gate="headwise",
        position=Tupe(64),
    ),
    "shared queries and keys, gated": replace(DEFAULT, kernel=LSH(2, 4), attention_gate="elementwise"),
    "clusters of normalized keys": replace(DEFAULT, kernel=Routing(2), qk_norm="l2"),
    "attention below GLA, with all options": replace(
        DEFAULT, recurrence=GLA(), attention_layers=(0,), kv_heads=1, qk_norm="rms", attention_gate="headwise"
    ),
    "RMSNorm and SwiGLU": replace(GTRXL, norm_type="rms_norm", activation="swiglu"),
    "RMSNorm after each sublayer, SwiGLU in chunks": replace(
        DEFAULT, norm="post", norm_type="rms_norm", activation="swiglu", feed_forward_chunk=2
    ),
    "reversible, RMSNorm": replace(DEFAULT, residual=Reversible(), norm_type="rms_norm", position=RoPE()),
    "no final norm": replace(DEFAULT, norm="post", final_norm=False),
    "one head": replace(DEFAULT, heads=1),
    "Transformer-XL": replace(DEFAULT, position=XLRelative(), memory=XL(MEMORY), norm="post"),
    "Gated Transformer-XL": GTRXL,
    "Decision Transformer": replace(DEFAULT, activation="gelu"),
    "Universal Transformer": replace(
        DEFAULT, layers=3, position=UniversalSinusoid(), depth=ACT(bias=-1.0), norm="post"
    ),
    "Universal, gates and memory": replace(GTRXL, layers=3, depth=Universal()),
    "ACT, gates and memory": replace(GTRXL, layers=3, depth=ACT(bias=-1.0)),
    "ACT, global tokens": replace(
        DEFAULT, layers=3, depth=ACT(bias=-1.0), pattern=Longformer(2, global_tokens=3)
    ),
    "ACT, linear attention": replace(DEFAULT, layers=3, depth=ACT(bias=-1.0), kernel=Performer(6)),
    "ACT in a decoder": replace(DEFAULT, layers=3, depth=ACT(bias=-1.0), cross_attention=True),
    "encoder, ETC, universal": replace(DEFAULT, depth=Universal(), pattern=ETC(1, 2), causal=False),
    "Reversible, memory and distances": replace(GTRXL, layers=3, residual=Reversible()),
    "Reversible, ACT": replace(DEFAULT, layers=3, depth=ACT(bias=-1.0), residual=Reversible()),
    "Reversible, global tokens": replace(
        DEFAULT, residual=Reversible(), pattern=Longformer(2, global_tokens=3)
    ),
    "Reversible, ETC, encoder": replace(DEFAULT, residual=Reversible(), pattern=ETC(1, 2), causal=False),
    "adaptive by sequence": replace(DEFAULT, depth=DepthAdaptive("sequence"), position=RoPE()),
    "adaptive, geometric, memory": replace(GTRXL, depth=DepthAdaptive("geometric", "correctness")),
    "CALM, learned, memory": replace(GTRXL, layers=3, depth=CALM("classifier")),
    "CALM in a decoder": replace(DEFAULT, depth=CALM("softmax"), cross_attention=True),
    "CALM, reversible": replace(DEFAULT, depth=CALM(), residual=Reversible()),
    "decoder": replace(DEFAULT, cross_attention=True),
    "gated decoder with memory": replace(GTRXL, cross_attention=True),
    "encoder": replace(DEFAULT, causal=False),
}
CAUSAL_ONLY = ("position XPos", "position CoPE")
"""Techniques without a bidirectional form."""

ENCODERS = {
    f"encoder, {name}": replace(spec, causal=False)
    for name, spec in ALONE.items()
    if name.split()[0] in ("position", "pattern", "kernel") and name not in CAUSAL_ONLY
}


ENCODERS |= {
    "encoder, kernel Linformer": replace(DEFAULT, causal=False, kernel=LINFORMER),
    "encoder, Linformer, k per layer": replace(
        DEFAULT, causal=False, kernel=Linformer(64, (3, 5), sharing="none", bias=True)
    ),
    "encoder, Linformer, convolution": replace(
        DEFAULT, causal=False, kernel=Linformer(64, 16, "convolution", "key-value", bias=True)
    ),
    "encoder, Linformer, max": replace(DEFAULT, causal=False, kernel=Linformer(64, 16, "max")),
}


def without_doubles(specs: dict[str, TransformerSpec]) -> dict[str, TransformerSpec]:
    """Return one name per distinct spec; most axes have a technique that is the default."""
    first = {spec: name for name, spec in reversed(specs.items())}
    return {name: spec for spec, name in reversed(first.items())}


SPECS = without_doubles(ALONE | RECIPES | ENCODERS)
CAUSAL = {name: spec for name, spec in SPECS.items() if spec.causal}


def with_memory(spec: TransformerSpec, memory: int) -> TransformerSpec:
    """Return the spec with XL memory of the given length, unless it has another memory or no attention."""
    other = spec.memory is not None and type(spec.memory) is not XL
    return spec if other or not spec.has_attention else replace(spec, memory=XL(memory))


def streaming(spec: TransformerSpec, memory: int) -> TransformerSpec:
    """Return the spec with a pattern that is limited to the memory, so that acting is unbounded in time."""
    spec = with_memory(spec, memory)
    if not spec.has_attention:
        return spec
    return spec if spec.memory.covers(spec.pattern) else replace(spec, pattern=Window(spec.memory.length + 1))


def each(specs: dict[str, TransformerSpec]) -> pytest.MarkDecorator:
    """Parametrize a test with each of the specs."""
    return pytest.mark.parametrize("spec", specs.values(), ids=specs.keys())


@cache
def shared_model(spec: TransformerSpec, dtype: torch.dtype = torch.float64) -> Transformer:
    """Return a cached module with perturbed weights. Tests share it and must not modify it."""
    return new_model(spec).to(dtype)


def new_model(spec: TransformerSpec, seed: int = 0) -> Transformer:
    """Build a new float32 module with perturbed weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = spec.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape)
    return model
