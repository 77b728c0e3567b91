"""Random feature attention: softmax over directions, estimated with random Fourier features."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.kernels.base import LinearFn, check_key_heads
from rlxf.attention.kernels.kv_state import KeyFeatures
from rlxf.attention.kernels.linear_attention import LinearAttention, RandomFeatures
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import TokenIndex
from rlxf.utils.checks import check_bool, check_finite_number, check_int, check_positive, check_seed


@dataclass(frozen=True)
class RFA(RandomFeatures):
    r"""``o_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)``, at linear cost.

    ``phi(x) = D^-1/2 [sin(W x'), cos(W x')]`` with ``x' = x / |x|`` and D rows of W drawn from N(0, 1 /
    sigma^2), so that ``E[phi(q) . phi(k)] = exp(-|q' - k'|^2 / 2 sigma^2)``. As x' has length 1, this is
    softmax over ``q' . k' / sigma^2``. Each head and layer has its own W.

    With ``gate``, ``g_t = sigmoid(w_g . x_t + b_g)`` of each head weights the past: ``S_t = g_t S_{t-1} + (1
    - g_t) phi(k_t) v_t``, and the denominator in the same way. The weight of a pair is ``phi(q_i) . phi(k_j)
    (1 - g_j) g_{j+1} ... g_i``: with every pattern, it depends on all tokens between the two.

    The products of features may be negative, so weights may be negative and a denominator d may come near 0.
    The paper's formula does not cover this case. The denominator of an average over n keys has a standard
    error of up to ``(n / 2 D)^1/2``. Here numerators are divided by d where
    ``d^2 >= 4 sum_j |phi(k_j)|^2 / D``, which is 4 n / D without a gate: about three standard errors.
    Elsewhere they are multiplied by d and divided by that bound. The divisor is positive and bounded away
    from 0, and the result is continuous where d changes its sign. (The authors' code divides by
    ``max(d, 100 / D)`` when acting and by |d| when learning.) Features and sums are float64: for small sigma,
    sums cancel to a small fraction of their terms.

    While acting with the pattern `Full`, a layer keeps ``sum_j phi(k_j) [v_j, 1]`` in place of a KV cache.
    Attention dropout has no effect, as no weights are computed.

    Source: Peng et al. 2021, arXiv:2103.02143, sections 3.1 and 3.2.

    Args:
        features: D, number of rows of W, each with a sine and a cosine; None for the width of a head, as in
            the authors' code.
        sigma: initial width of the Gaussian kernel; 1 as in the authors' code. Smaller values give sharper
            attention.
        fixed: keep sigma fixed. By default 1 / sigma is learned for each head and for each of its query
            dimensions, as in the authors' code.
        gate: use the gate. It requires a causal transformer without cross-attention.
        gate_bias: initial b_g; w_g starts at 0. With 4, the weight of the past falls to 1 / e after about 55
            tokens.
        seed: seed of the draw of W.

    Raises:
        TypeError: if features or seed is not an integer, sigma or gate_bias is not a number, or a flag is
            neither True nor False.
        ValueError: if features is less than 1, seed is negative, sigma is not positive, or gate_bias is not
            finite.
    """

    paper: ClassVar[str] = "Peng et al. 2021, arXiv:2103.02143"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L features"
    features: int | None = None
    sigma: float = 1.0
    fixed: bool = False
    gate: bool = False
    gate_bias: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed("RFA seed", self.seed)
        check_bool("RFA fixed", self.fixed)
        check_bool("RFA gate", self.gate)
        if self.features is not None:
            check_int("RFA features", self.features)
        check_positive("RFA sigma", self.sigma)
        check_finite_number("RFA gate_bias", self.gate_bias)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError for a second normalization, or a gate without past tokens or with shared keys."""
        if choices.qk_norm is not None:
            raise ValueError(
                f"{self} normalizes queries and keys, and qk_norm={choices.qk_norm!r} would do it again; use "
                f"qk_norm=None or another kernel"
            )
        if self.gate:
            check_key_heads(self, choices)
        if self.gate and not choices.causal:
            raise ValueError(f"{self} has a gate over past tokens and requires causal=True; set gate=False")
        if self.gate and choices.cross_attention:
            raise ValueError(
                f"{self} has a gate over past tokens, and with cross_attention=True keys are from another "
                f"sequence; set gate=False"
            )

    def build(self, width: int, heads: int) -> "RFAAttention":
        return GatedRFAAttention(self, width, heads) if self.gate else RFAAttention(self, width, heads)


class RFAAttention(LinearAttention):
    """Module of `RFA` in one layer.

    W is ``waves`` (H, D, d) times ``frequency`` (H, 1, d), which starts at 1 / sigma.
    """

    waves: Tensor
    frequency: Tensor
    precision = torch.float64

    def __init__(self, spec: RFA, width: int, heads: int):
        super().__init__()
        size = width // heads
        count = size if spec.features is None else spec.features
        self.features = 2 * count
        generator = torch.Generator().manual_seed(spec.seed)
        self.register_buffer("waves", torch.randn(heads, count, size, generator=generator))
        frequency = torch.full((heads, 1, size), 1 / spec.sigma)
        if spec.fixed:
            self.register_buffer("frequency", frequency)
        else:
            self.frequency = nn.Parameter(frequency)

    def query_features(self, q: Tensor) -> Tensor:
        w = self.promote(self.waves) * self.frequency
        angle = F.normalize(self.promote(q), dim=-1) @ w.mT
        return torch.cat([angle.sin(), angle.cos()], dim=-1) * w.shape[1] ** -0.5

    def quotient(self, result: Tensor) -> Tensor:
        """Divide numerator by the denominator d so that the result is continuous at d = 0; see `RFA`."""
        numerator = result[..., :-2]
        denominator = result[..., -2:-1]
        energy = result[..., -1:]
        noise = (4 * energy / self.waves.shape[1]).clamp(min=torch.finfo(energy.dtype).tiny)
        return numerator * denominator / torch.maximum(denominator.square(), noise)


class GatedRFAAttention(RFAAttention):
    """`RFAAttention` with a gate, ``gate`` (C -> H), computed from the token.

    The extra feature of a key is the logit of its gate. `contextualize_keys` replaces it with the logarithm
    of the key's weight, ``l_j = log(1 - g_j) - log g_j - ... - log g_1``, summed from the first available
    token of the episode: terms that all keys of a query share cancel. l grows with time and only its
    differences matter, so it is float64. It is stored as two numbers: its value, and a 0 that carries its
    gradient.
    """

    def __init__(self, spec: RFA, width: int, heads: int):
        super().__init__(spec, width, heads)
        self.gate = nn.Linear(width, heads)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, spec.gate_bias)

    def key_extras(self, x: Tensor, linear: LinearFn = F.linear) -> Tensor:
        """Return the logit of g for each token x (B, T, C): (B, H, T, 1)."""
        return linear(x, self.gate.weight, self.gate.bias).transpose(1, 2)[..., None]

    def log_decay(self, k: Tensor) -> Tensor:
        """Return log g of each key."""
        return F.logsigmoid(k[..., -1].double())

    def contextualize_keys(self, k: Tensor, index: TokenIndex) -> Tensor:
        """Replace the gate logit of each key with the value and the gradient carrier of l."""
        log_weight = F.logsigmoid(-k[..., -1].double()) - cumulative_sum_by_episode(self.log_decay(k), index)
        value = log_weight.detach()
        return torch.cat([k[..., :-1], torch.stack([value, log_weight - value], dim=-1)], dim=-1)

    def key_features(self, k: Tensor) -> KeyFeatures:
        value = k[..., -2]
        zero = k[..., -1:]
        return KeyFeatures(self.query_features(k[..., :-2]) * zero.exp(), value.detach())


def cumulative_sum_by_episode(x: Tensor, index: TokenIndex) -> Tensor:
    """Return the sum of x_t over the tokens t up to i of the episode of i, by position, (B, H, S).

    Episodes may be interleaved, and slots may be in any order. The sums over 1, 2, 4, ... tokens are added
    and nothing is subtracted, so the rounding of one episode does not affect another.
    """
    order = ((index.episode << 32) + index.position).argsort(dim=1)
    episode = index.episode.gather(1, order)
    sorted_slots = order[:, None].expand_as(x)
    x = x.gather(-1, sorted_slots)
    span = 1
    while span < x.shape[-1]:
        same = (episode[:, span:] == episode[:, :-span])[:, None]
        x = x + F.pad(x[..., :-span].masked_fill(~same, 0.0), (span, 0))
        span *= 2
    return torch.empty_like(x).scatter(-1, sorted_slots, x)
