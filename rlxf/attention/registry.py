"""Table of all techniques, and their conversion to and from JSON."""

from dataclasses import fields
from typing import Any

from rlxf.attention.depth.act import ACT
from rlxf.attention.depth.calm import CALM
from rlxf.attention.depth.constant import Fixed, Universal
from rlxf.attention.depth.depth_adaptive import DepthAdaptive
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.knn_lm import KNNLM
from rlxf.attention.heads.spalm import SPALM
from rlxf.attention.kernels.assigned import HeadKernels, LayerKernels
from rlxf.attention.kernels.differential import Differential
from rlxf.attention.kernels.linformer import Linformer
from rlxf.attention.kernels.lsh import LSH
from rlxf.attention.kernels.performer import Performer
from rlxf.attention.kernels.rfa import RFA
from rlxf.attention.kernels.routing import Routing
from rlxf.attention.kernels.sink_softmax import SinkSoftmax
from rlxf.attention.kernels.softmax import Softmax
from rlxf.attention.kernels.span import AdaptiveSpan, DynamicSpan
from rlxf.attention.memory.compressive import Compressive
from rlxf.attention.memory.knn import KNN
from rlxf.attention.memory.rmt import RATE, RMT
from rlxf.attention.memory.streaming import StreamingXL
from rlxf.attention.memory.xl import XL
from rlxf.attention.patterns.assigned import HeadPatterns, LayerPatterns
from rlxf.attention.patterns.attention_sinks import AttentionSinks
from rlxf.attention.patterns.base import Both, Either
from rlxf.attention.patterns.big_bird import BigBird, BigBirdETC
from rlxf.attention.patterns.blockwise import Blockwise
from rlxf.attention.patterns.etc import ETC
from rlxf.attention.patterns.local import Local1D, Local2D
from rlxf.attention.patterns.longformer import Longformer
from rlxf.attention.patterns.sparse_transformer import FixedColumns, Strided
from rlxf.attention.patterns.window import Dilated, Full, Window
from rlxf.attention.positions.alibi import ALiBi
from rlxf.attention.positions.cope import CoPE
from rlxf.attention.positions.deberta import Deberta
from rlxf.attention.positions.distance_aware import DistanceAware
from rlxf.attention.positions.etc_labels import ETCLabels
from rlxf.attention.positions.fire import FIRE
from rlxf.attention.positions.floater import Floater
from rlxf.attention.positions.kerple import KERPLE
from rlxf.attention.positions.learned_absolute import LearnedAbsolute, LearnedPerLayer, Multiplicative
from rlxf.attention.positions.rope import RoPE
from rlxf.attention.positions.shaw_relative import ShawRelative
from rlxf.attention.positions.sinusoidal import Sinusoidal, UniversalSinusoid
from rlxf.attention.positions.t5_bias import T5Bias
from rlxf.attention.positions.tupe import Tupe
from rlxf.attention.positions.xl_relative import XLRelative
from rlxf.attention.positions.xpos import XPos
from rlxf.attention.recurrent.agalite import AGaLiTe
from rlxf.attention.recurrent.conv_former import ConvFormer
from rlxf.attention.recurrent.deltanet import DeltaNet
from rlxf.attention.recurrent.gated_deltanet import GatedDeltaNet
from rlxf.attention.recurrent.gla import GLA
from rlxf.attention.recurrent.gru import GRU
from rlxf.attention.recurrent.infini import InfiniAttention
from rlxf.attention.recurrent.linear_attention import RecurrentPerformer, RecurrentRFA
from rlxf.attention.recurrent.lru import LRU
from rlxf.attention.recurrent.lstm import LSTM
from rlxf.attention.recurrent.mamba2 import Mamba2
from rlxf.attention.recurrent.min_gru import MinGRU
from rlxf.attention.recurrent.retnet import RetNet
from rlxf.attention.recurrent.shm import SHM
from rlxf.attention.residuals.base import Add
from rlxf.attention.residuals.gates import AddReLU, GRUGate, HighwayGate, InputGate, OutputGate, SigTanhGate
from rlxf.attention.residuals.reversible import Reversible
from rlxf.attention.technique import Technique

TECHNIQUES: dict[str, dict[str, type[Any]]] = {
    axis: {technique.__name__: technique for technique in techniques}
    for axis, techniques in {
        "position": (
            Sinusoidal,
            UniversalSinusoid,
            LearnedAbsolute,
            LearnedPerLayer,
            Multiplicative,
            Floater,
            ShawRelative,
            XLRelative,
            T5Bias,
            Tupe,
            Deberta,
            DistanceAware,
            ETCLabels,
            RoPE,
            XPos,
            ALiBi,
            KERPLE,
            FIRE,
            CoPE,
        ),
        "pattern": (
            Full,
            Window,
            AttentionSinks,
            Dilated,
            Local1D,
            Local2D,
            Strided,
            FixedColumns,
            Blockwise,
            ETC,
            Longformer,
            BigBird,
            BigBirdETC,
        ),
        "kernel": (
            Softmax,
            SinkSoftmax,
            Differential,
            AdaptiveSpan,
            DynamicSpan,
            RFA,
            Performer,
            Linformer,
            LSH,
            Routing,
        ),
        "memory": (XL, StreamingXL, Compressive, KNN, RMT, RATE),
        "recurrence": (
            MinGRU,
            LRU,
            RetNet,
            GLA,
            DeltaNet,
            GatedDeltaNet,
            Mamba2,
            AGaLiTe,
            SHM,
            ConvFormer,
            RecurrentRFA,
            RecurrentPerformer,
            InfiniAttention,
            LSTM,
            GRU,
        ),
        "residual": (Add, AddReLU, GRUGate, InputGate, OutputGate, HighwayGate, SigTanhGate, Reversible),
        "depth": (Fixed, Universal, ACT, DepthAdaptive, CALM),
    }.items()
}
"""Axis -> name -> class of each technique. Position, memory and recurrence may also be None."""


HEADS: dict[str, type[OutputHead]] = {head.__name__: head for head in (KNNLM, SPALM)}
"""Name -> class of each output head. Heads are attached to trained transformers, so they are not an axis."""


OPTIONAL = ("position", "memory", "recurrence")
"""Axes that accept None."""


COMBINATORS: dict[str, dict[str, type[Any]]] = {
    axis: {combinator.__name__: combinator for combinator in combinators}
    for axis, combinators in {
        "pattern": (Both, Either, HeadPatterns, LayerPatterns),
        "kernel": (HeadKernels, LayerKernels),
    }.items()
}
"""Axis -> name -> class that combines two techniques of the axis, for example ``first & second``."""


def techniques_of(axis: str) -> dict[str, type[Any]]:
    """Return name -> class for all techniques and combinators of an axis, or for the output heads.

    The axis of output heads is "head".
    """
    return HEADS if axis == "head" else TECHNIQUES[axis] | COMBINATORS.get(axis, {})


def technique_to_json(technique: Any) -> dict[str, Any] | None:
    """Return a technique as ``{"name": class name, ...options}``; None for None."""
    if technique is None:
        return None
    options = {field.name: getattr(technique, field.name) for field in fields(technique)}
    nested = {
        name: technique_to_json(value) for name, value in options.items() if isinstance(value, Technique)
    }
    return {"name": type(technique).__name__, **options, **nested}


def technique_from_json(axis: str, data: Any) -> Any:
    """Create a technique from the result of `technique_to_json`.

    Raises:
        ValueError: if the axis has no technique of this name, or an option is unknown or invalid.
    """
    if data is None and axis in OPTIONAL:
        return None
    if not isinstance(data, dict) or "name" not in data:
        raise ValueError(f'{axis} must be an object with a "name", got {data!r}')
    names = techniques_of(axis)
    if not isinstance(data["name"], str) or data["name"] not in names:
        raise ValueError(
            f"there is no {axis} named {data['name']!r}; there are {', '.join(names)}. If it is not part of "
            f"rlxf, import the module that registers it first"
        )
    options = {key: value for key, value in data.items() if key != "name"}
    if data["name"] in COMBINATORS.get(axis, {}):
        options = {
            name: technique_from_json(axis, value) if isinstance(value, dict) else value
            for name, value in options.items()
        }
    try:
        return names[data["name"]](**options)
    except TypeError as error:
        raise ValueError(f"{axis} {data['name']}: {error}") from error
