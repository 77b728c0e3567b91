"""The options that say which transformer to build."""

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Annotated, Any

from tyro.conf import arg, subcommand

from rlxf.agents.gtrxl.core import gtrxl
from rlxf.attention import GRUGate, Softmax, TransformerSpec, XLRelative
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.positions.base import Position
from rlxf.attention.residuals.base import Residual
from rlxf.attention.techniques import OPTIONAL, TECHNIQUES
from rlxf.cli.questions import summary

GRU_GATE, XL_RELATIVE, SOFTMAX = GRUGate(bias=2.0), XLRelative(), Softmax()


def any_of(axis: str) -> Any:
    """The techniques of an axis as a tyro union: ``residual:Add``, ``position:none``."""
    choices = [
        Annotated[technique, subcommand(name, description=summary(technique))]
        for name, technique in TECHNIQUES[axis].items()
    ]
    return reduce(or_, choices + [None] * (axis in OPTIONAL))


@dataclass(frozen=True, kw_only=True)
class Core:
    """The transformer. With the defaults it is a Gated Transformer-XL."""

    memory_length: int = 128
    """Steps remembered from before a segment. Each layer looks as far back, so 2 layers reach 256 steps."""
    width: int = 64
    """Features of a token. Enough for small observations; 128 to 384 for images and rich tasks."""
    layers: int = 2
    """Number of layers."""
    heads: int = 4
    """Attention heads; must divide the width."""
    feed_forward: int | None = None
    """Features inside the feed-forward sublayer; None is 4 times the width."""
    residual: Annotated[Residual, arg(constructor=any_of("residual"))] = GRU_GATE
    """How a sublayer's output joins the stream. GRU gates are the paper's most stable."""
    position: Annotated[Position | None, arg(constructor=any_of("position"))] = XL_RELATIVE
    """How order enters."""
    kernel: Annotated[Kernel, arg(constructor=any_of("kernel"))] = SOFTMAX
    """How the weighted average is computed."""

    def spec(self) -> TransformerSpec:
        """These options as the core of an agent."""
        sizes = {name: getattr(self, name) for name in ("width", "layers", "heads", "feed_forward")}
        spec = gtrxl(self.memory_length, residual=self.residual, **sizes)
        return replace(spec, position=self.position, kernel=self.kernel)
