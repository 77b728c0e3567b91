"""Differential attention: the difference of two softmax attention maps."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention import Attention, Projected
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments, OutputGate, repeat_heads
from rlxf.attention.kernels.base import Kernel, PairwiseKernel
from rlxf.attention.kernels.softmax import SoftmaxAttention
from rlxf.attention.norm import RMSNorm
from rlxf.attention.technique import AttentionFactory, SpecView
from rlxf.utils.checks import check_between

LAMBDA_STD = 0.1
"""Standard deviation of the vectors of lambda before training, as in the authors' code."""


@dataclass(frozen=True)
class Differential(PairwiseKernel):
    r"""``o_i = (1 - l) RMSNorm(sum_j (a1_ij - lambda a2_ij) v_j)``: the difference of two attention maps.

    The maps are ``an_ij = softmax_j(qn_i . kn_j / sqrt(d))`` for n = 1, 2. The weight of the second one is
    ``lambda = exp(a . b) - exp(a' . b') + l`` for learned vectors a, b, a' and b' (d,) of the layer.

    Each of the H heads splits its D features of queries and keys into two halves of d = D / 2. Tokens to
    which both maps attend cancel, which leaves more weight for the relevant tokens. Values have all D
    features. The norm has one weight (D,) for all heads.

    For positions, the two maps of head h are the heads 2 h and 2 h + 1 of 2 H. Both have the pattern of head
    h. The weights of a query sum to about 1 - lambda, and some are negative.

    Source: Ye et al. 2024, arXiv:2410.05258, section 2.1.

    Args:
        initial_lambda: l; None for ``0.8 - 0.6 exp(-0.3 n)`` in layer n, from 0, as in the paper.

    Raises:
        TypeError: if initial_lambda is not a number.
        ValueError: if it is outside of [0, 1); in a spec, if the number of features per head is odd.
    """

    paper: ClassVar[str] = "Ye et al. 2024, arXiv:2410.05258"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "2 times the visible pairs"
    initial_lambda: float | None = None

    def __post_init__(self) -> None:
        if self.initial_lambda is None:
            return
        check_between("Differential initial_lambda", self.initial_lambda, 0, 1, inclusive="left")

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless heads have two halves, and values depend on one projection of tokens."""
        if choices.width // choices.heads % 2:
            raise ValueError(
                f"{self} splits each head into two halves, and width {choices.width} / heads {choices.heads} "
                f"is odd; use an even width per head"
            )
        if len(choices.pattern.query_rules) > 1:
            raise ValueError(
                f"{self} has its own attention module, and {choices.pattern} has separate projections for "
                f"global tokens; choose another pattern or kernel"
            )
        if choices.position is not None and choices.position.changes_values:
            raise ValueError(
                f"{self} averages values of {choices.width // choices.heads} features with maps of half as "
                f"many, and {choices.position} adds vectors of the same size to keys and values; choose "
                f"another position, e.g. RoPE()"
            )

    def score_heads(self, heads: int) -> int:
        """Return the number of maps, 2 H."""
        return 2 * heads

    def for_layers(self, layers: int) -> tuple[Kernel, ...]:
        if self.initial_lambda is not None:
            return (self,) * layers
        return tuple(replace(self, initial_lambda=layer_lambda(layer)) for layer in range(layers))

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        first = layer_lambda(0) if self.initial_lambda is None else self.initial_lambda
        return partial(DifferentialAttention, initial_lambda=first)

    def build(self, width: int, heads: int) -> SoftmaxAttention:
        """Return softmax attention, which computes each map."""
        return SoftmaxAttention()


def layer_lambda(layer: int) -> float:
    """Return the initial lambda of a layer, numbered from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class DifferentialAttention(Attention):
    """Module of `Differential` in one layer: `Attention` with 2 H maps of d features.

    ``lambdas`` (4, d) are a, b, a' and b'. Keys are cached with 2 K heads of d features, values with K heads
    of D features.
    """

    def __init__(self, arguments: AttentionArguments, initial_lambda: float):
        heads = arguments.heads
        options = arguments.options
        maps = replace(options, kv_heads=2 * (options.kv_heads or heads), attention_gate=None)
        super().__init__(replace(arguments, heads=2 * heads, options=maps))
        gate = options.attention_gate
        self.output_gate = None if gate is None else OutputGate(gate, self.width, heads)
        self.initial_lambda = initial_lambda
        self.lambdas = nn.Parameter(LAMBDA_STD * torch.randn(4, self.size))
        self.norm = RMSNorm(2 * self.size)

    @property
    def lambda_(self) -> Tensor:
        """Weight of the second map, a scalar."""
        a, b, c, d = self.lambdas
        return (a @ b).exp() - (c @ d).exp() + self.initial_lambda

    def prepare_keys(self, projected: Projected, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (B, 2 K, S, d) and values (B, K, S, D)."""
        k, v = super().prepare_keys(projected, position)
        return k, v.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)

    def repeat_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Repeat keys (B, 2 K, S, d) in pairs, and values (B, K, S, D), for the 2 H maps.

        Map n of head h reads half n of its key, and its value.
        """
        pairs = k.unflatten(1, (-1, 2))
        keys = repeat_heads(pairs, self.heads // 2).flatten(1, 2)
        return keys, repeat_heads(v, self.heads)

    def _difference(self, y: Tensor) -> Tensor:
        """Subtract the second map of each head: y (B, 2 H, ...) -> (B, H, ...)."""
        first, second = y.unflatten(1, (-1, 2)).unbind(2)
        return first - self.lambda_ * second

    def _merge_heads(self, y: Tensor, x: Tensor, mask: AttentionMask) -> Tensor:
        normalized = self.norm(self._difference(y)) * (1 - self.initial_lambda)
        return super()._merge_heads(normalized, x, mask)

    def weights(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        """Return the differences of the maps, (B, H, T, M + T), before the norm."""
        return self._difference(super().weights(x, memory, mask))
