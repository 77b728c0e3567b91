"""Attention core: a transformer configured along six axes. Depends on torch only and is independent of RL."""

from rlxf.attention.cache import KVCache
from rlxf.attention.cross_attention import Context, EncoderDecoder
from rlxf.attention.depth.act import ACT
from rlxf.attention.depth.base import ExitTargets
from rlxf.attention.depth.calm import CALM
from rlxf.attention.depth.depth_adaptive import DepthAdaptive
from rlxf.attention.depth.fixed import Fixed
from rlxf.attention.depth.universal import Universal
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
from rlxf.attention.memory.base import State
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
from rlxf.attention.spec import TransformerSpec
from rlxf.attention.token_index import TokenIndex
from rlxf.attention.transformer import Transformer

__all__ = [
    "CALM",
    "DepthAdaptive",
    "ExitTargets",
    "Reversible",
    "ACT",
    "Universal",
    "UniversalSinusoid",
    "KNN",
    "KNNLM",
    "LSH",
    "SPALM",
    "XL",
    "ALiBi",
    "AdaptiveSpan",
    "Add",
    "BigBird",
    "BigBirdETC",
    "Blockwise",
    "Both",
    "KVCache",
    "Compressive",
    "Context",
    "Deberta",
    "Dilated",
    "ETC",
    "Either",
    "DistanceAware",
    "DynamicSpan",
    "ETCLabels",
    "EncoderDecoder",
    "Fixed",
    "FixedColumns",
    "Floater",
    "Full",
    "GRUGate",
    "HighwayGate",
    "TokenIndex",
    "InputGate",
    "LearnedAbsolute",
    "Linformer",
    "Local1D",
    "Local2D",
    "Longformer",
    "Multiplicative",
    "OutputGate",
    "Performer",
    "RFA",
    "RoPE",
    "Routing",
    "ShawRelative",
    "SigTanhGate",
    "Sinusoidal",
    "Softmax",
    "State",
    "Strided",
    "T5Bias",
    "Transformer",
    "TransformerSpec",
    "Tupe",
    "Window",
    "XLRelative",
]
