"""Base classes of the residual techniques, and the plain residual connection."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from rlxf.attention.norm import NORMS, PreNorm
from rlxf.attention.technique import LayerPasses, SpecView, Technique


class Residual(Technique, ABC):
    """Combination of a sublayer's output y with the residual stream x; base of frozen dataclasses.

    The residual stream consists of the tokens, unless a technique overrides its methods.
    """

    causal_form: ClassVar[str] = "token by token"
    cost: ClassVar[str] = "L"

    @abstractmethod
    def build(self, width: int, heads: int) -> nn.Module:
        """Return the module with ``forward(x, y)``, (..., C) and (..., C) -> (..., C)."""

    def build_norm(self, spec: SpecView) -> PreNorm:
        """Return the norm of a sublayer together with its residual connection."""
        kind: type[PreNorm] = NORMS[spec.norm]
        return kind(spec.width, self.build(spec.width, spec.heads), spec.norm_type)

    def build_norms(self, spec: SpecView) -> tuple[PreNorm, PreNorm]:
        """Return `build_norm` for the attention and for the feed-forward sublayer of a layer."""
        return self.build_norm(spec), self.build_norm(spec)

    def run_passes(self, passes: LayerPasses, x: Tensor) -> Tensor:
        """Run all passes, each once, on the stream x (B, T, C) and return the selected outputs."""
        for number in range(passes.count):
            x = passes.run(number, passes.start_pass(number, x))
        return x

    def init_stream(self, x: Tensor) -> Tensor:
        """Return the residual stream before the first layer, for tokens (..., C)."""
        return x

    def attention_input(self, stream: Tensor) -> Tensor:
        """Return the input of attention, (..., C)."""
        return stream

    def output(self, stream: Tensor) -> Tensor:
        """Return the output after the last layer, (..., C)."""
        return stream


@dataclass(frozen=True)
class Add(Residual):
    """``x + y``.

    Source: He et al. 2016, arXiv:1512.03385, section 3.1.
    """

    paper: ClassVar[str] = "He et al. 2016, arXiv:1512.03385"

    def build(self, width: int, heads: int) -> "Sum":
        """Return the module; it has no parameters."""
        return Sum()


class Sum(nn.Module):
    """Module of `Add`: x + y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y, for x (..., C) and y (..., C): (..., C)."""
        return x + y


class Gate(nn.Module, ABC):
    """Gate of the Gated Transformer-XL: ``g(x, ReLU(y))``.

    The paper applies a ReLU after each sublayer, before its gate.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2 and equations 5 to 9.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Apply the gate to stream x (..., C) and sublayer output y (..., C): (..., C)."""
        return self.gate(x, y.relu())

    @abstractmethod
    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return g(x, y) of the paper."""

    def update_gate(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the fraction of each feature of x that ``forward(x, y)`` replaces, (..., C).

        None, the default, for a gate without such a fraction.
        """
        return None
