"""Registry of techniques: the class of every name on every axis."""

from dataclasses import fields
from typing import Any

from rlxf.attention.depth.act import ACT
from rlxf.attention.depth.calm import CALM
from rlxf.attention.depth.depth_adaptive import DepthAdaptive
from rlxf.attention.depth.fixed import Fixed
from rlxf.attention.depth.universal import Universal
from rlxf.attention.heads.base import OutputHead
from rlxf.attention.heads.knn_lm import KNNLM
from rlxf.attention.heads.spalm import SPALM
from rlxf.attention.kernels.adaptive_span import AdaptiveSpan
from rlxf.attention.kernels.dynamic_span import DynamicSpan
from rlxf.attention.kernels.linformer import Linformer
from rlxf.attention.kernels.lsh import LSH
from rlxf.attention.kernels.performer import Performer
from rlxf.attention.kernels.rfa import RFA
from rlxf.attention.kernels.routing import Routing
from rlxf.attention.kernels.softmax import Softmax
from rlxf.attention.memory.compressive import Compressive
from rlxf.attention.memory.knn import KNN
from rlxf.attention.memory.xl import XL
from rlxf.attention.patterns.base import Both, Either
from rlxf.attention.patterns.big_bird import BigBird
from rlxf.attention.patterns.big_bird_etc import BigBirdETC
from rlxf.attention.patterns.blockwise import Blockwise
from rlxf.attention.patterns.dilated import Dilated
from rlxf.attention.patterns.etc import ETC
from rlxf.attention.patterns.fixed_columns import FixedColumns
from rlxf.attention.patterns.full import Full
from rlxf.attention.patterns.local_1d import Local1D
from rlxf.attention.patterns.local_2d import Local2D
from rlxf.attention.patterns.longformer import Longformer
from rlxf.attention.patterns.strided import Strided
from rlxf.attention.patterns.window import Window
from rlxf.attention.positions.alibi import ALiBi
from rlxf.attention.positions.deberta import Deberta
from rlxf.attention.positions.distance_aware import DistanceAware
from rlxf.attention.positions.etc_labels import ETCLabels
from rlxf.attention.positions.floater import Floater
from rlxf.attention.positions.learned_absolute import LearnedAbsolute
from rlxf.attention.positions.multiplicative import Multiplicative
from rlxf.attention.positions.rope import RoPE
from rlxf.attention.positions.shaw_relative import ShawRelative
from rlxf.attention.positions.sinusoidal import Sinusoidal
from rlxf.attention.positions.t5_bias import T5Bias
from rlxf.attention.positions.tupe import Tupe
from rlxf.attention.positions.universal_sinusoid import UniversalSinusoid
from rlxf.attention.positions.xl_relative import XLRelative
from rlxf.attention.residuals.add import Add
from rlxf.attention.residuals.gru import GRUGate
from rlxf.attention.residuals.highway import HighwayGate
from rlxf.attention.residuals.input import InputGate
from rlxf.attention.residuals.output import OutputGate
from rlxf.attention.residuals.reversible import Reversible
from rlxf.attention.residuals.sig_tanh import SigTanhGate
from rlxf.attention.technique import Technique

TECHNIQUES: dict[str, dict[str, type[Any]]] = {
    axis: {technique.__name__: technique for technique in techniques}
    for axis, techniques in {
        "position": (
            Sinusoidal,
            UniversalSinusoid,
            LearnedAbsolute,
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
            ALiBi,
        ),
        "pattern": (
            Full,
            Window,
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
        "kernel": (Softmax, AdaptiveSpan, DynamicSpan, RFA, Performer, Linformer, LSH, Routing),
        "memory": (XL, Compressive, KNN),
        "residual": (Add, GRUGate, InputGate, OutputGate, HighwayGate, SigTanhGate, Reversible),
        "depth": (Fixed, Universal, ACT, DepthAdaptive, CALM),
    }.items()
}
"""Axis -> name -> class of each technique. Position and memory may also be None."""

HEADS: dict[str, type[OutputHead]] = {head.__name__: head for head in (KNNLM, SPALM)}
"""Name -> class of each output head. Heads are attached to trained transformers, so they are not an axis."""

OPTIONAL = ("position", "memory")
"""Axes that accept None."""

COMBINATORS: dict[str, dict[str, type[Any]]] = {"pattern": {"Both": Both, "Either": Either}}
"""Axis -> name -> class that combines two techniques of the axis: ``first & second``, ``first | second``."""


def techniques_of(axis: str) -> dict[str, type[Any]]:
    """Return name -> class for all techniques of an axis, or of output heads for "head"."""
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
        raise ValueError(f"there is no {axis} named {data['name']!r}; there are {', '.join(names)}")
    options = {key: value for key, value in data.items() if key != "name"}
    if data["name"] in COMBINATORS.get(axis, {}):
        options = {side: technique_from_json(axis, part) for side, part in options.items()}
    try:
        return names[data["name"]](**options)
    except TypeError as error:
        raise ValueError(f"{axis} {data['name']}: {error}") from error
