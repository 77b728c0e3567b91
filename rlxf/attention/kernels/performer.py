"""Performer: softmax attention, estimated with positive orthogonal random features."""

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.kernels.kv_state import KeyFeatures
from rlxf.attention.kernels.linear_attention import LinearAttention, RandomFeatures
from rlxf.utils.checks import check_choice, check_int, check_seed

MAX_EXPONENT_RANGE = 40.0
"""Features are at least ``e^-40`` of the token's largest feature, so that every visible key has weight."""

MIN_DENOMINATOR = 1e-30
"""Lower bound of denominators; that of a query with visible keys is always larger."""

RELU_OFFSET = 1e-3
"""Constant that the authors add to rectified features."""


@dataclass(frozen=True)
class Performer(RandomFeatures):
    r"""FAVOR+: ``o_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)``, at linear cost.

    ``phi(x) = M^-1/2 exp(P x' - |x'|^2 / 2)`` with ``x' = x / D^1/4``, so that ``E[phi(q) . phi(k)]`` is
    softmax's ``exp(q . k / sqrt(D))``. The M rows of P are drawn in blocks of D orthogonal rows. A block is Q
    of a QR decomposition, with its columns multiplied by the signs of R's diagonal; the estimate is biased
    without these signs. Row lengths are distributed as those of vectors of D normal numbers. Heads share P;
    each layer has its own.

    Nothing is added to phi, and later tokens have no influence. The largest exponent of a query cancels in
    the quotient; that of a key is stored as its scale, and sums are scaled by the largest scale so far.
    (Public code subtracts the maximum over all keys, including later ones, and adds 1e-4 or 1e-6 afterwards.)
    Exponents are clipped at 40 below the largest exponent of the token. This is far below rounding error, and
    gives every pair of tokens a positive weight.

    ``kind="relu"`` is another attention of the paper, not an estimate of softmax: ``max(P x', 0) + 1e-3``.

    While acting with the pattern `Full`, a layer keeps ``sum_j phi(k_j) [v_j, 1]`` in place of a KV cache.
    Attention dropout has no effect, as no weights are computed.

    Source: Choromanski et al. 2021, arXiv:2009.14794, sections 2.2 to 2.4 and 4.

    Args:
        features: M; None for whole blocks, ``D round(ln D)``, 256 for D = 64: of the order D log D at which
            the paper's error bound holds.
        kind: kind of features, "exp" or "relu".
        redraw: number of updates between draws of P, as in the paper; None to draw once. The estimate changes
            with P, so outputs while acting differ from those while learning; GTrXLPPO rejects it.
        seed: seed of the draws. Together with the number of updates, which is stored with the weights, it
            determines all draws.

    Raises:
        TypeError: if features, redraw or seed is not an integer.
        ValueError: if features or redraw is less than 1, seed is negative, or kind is unknown.
    """

    paper: ClassVar[str] = "Choromanski et al. 2021, arXiv:2009.14794"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L features"
    features: int | None = None
    kind: Literal["exp", "relu"] = "exp"
    redraw: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed("Performer seed", self.seed)
        check_choice("Performer kind", self.kind, ("exp", "relu"))
        for name in ("features", "redraw"):
            if getattr(self, name) is not None:
                check_int(f"Performer {name}", getattr(self, name))

    def check_no_redraw(self) -> None:
        """Raise ValueError if ``redraw`` is not None."""
        if self.redraw is not None:
            raise ValueError(f"{self} must have redraw=None, so that random features do not change")

    def build(self, width: int, heads: int) -> "PerformerAttention":
        return {"exp": PerformerAttention, "relu": ReLUPerformerAttention}[self.kind](self, width // heads)


class PerformerAttention(LinearAttention):
    """Module of `Performer` in one layer: ``projection`` (M, D) is P, ``updates`` counts optimizer steps."""

    projection: Tensor
    updates: Tensor

    def __init__(self, spec: Performer, size: int):
        super().__init__()
        self.spec = spec
        self.features = size * max(1, round(math.log(size))) if spec.features is None else spec.features
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("projection", self._drawn(size, 0))

    def query_features(self, q: Tensor) -> Tensor:
        """Return the features of queries, ``exp(P q' - max P q')``."""
        projected = self._projected(q)
        return _exponential(projected.sub_(projected.detach().amax(-1, keepdim=True)))

    def key_features(self, k: Tensor) -> KeyFeatures:
        """Return the features of keys, whose scale is the largest exponent."""
        projected = self._projected(k)
        half = self.promote(k).square().sum(-1, keepdim=True) / (2 * k.shape[-1] ** 0.5)
        top = projected.detach().amax(-1, keepdim=True)
        features = _exponential(projected.sub_(top + (half - half.detach())))
        return KeyFeatures(features, (top - half.detach())[..., 0])

    def quotient(self, result: Tensor) -> Tensor:
        """Divide numerator by denominator: features are positive, so it is 0 only without visible keys."""
        return result[..., :-2] / result[..., -2:-1].clamp(min=MIN_DENOMINATOR)

    def _projected(self, x: Tensor) -> Tensor:
        """Return P x' (B, H, T, M)."""
        return self.promote(x) @ (self.projection.to(self.promote(x).dtype).T * x.shape[-1] ** -0.25)

    @torch.no_grad()
    def after_update(self) -> None:
        """Count the update, and redraw P if it is due."""
        self.updates += 1
        if self.spec.redraw is not None and int(self.updates) % self.spec.redraw == 0:
            draws = int(self.updates) // self.spec.redraw
            self.projection.copy_(self._drawn(self.projection.shape[1], draws))

    def _drawn(self, size: int, draws: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix_seed(self.spec.seed, draws))
        return orthogonal_rows(self.features, size, generator)


class ReLUPerformerAttention(PerformerAttention):
    """`PerformerAttention` with rectified features."""

    def query_features(self, q: Tensor) -> Tensor:
        return self._projected(q).relu() + RELU_OFFSET

    def key_features(self, k: Tensor) -> KeyFeatures:
        return LinearAttention.key_features(self, k)


def orthogonal_rows(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw rows (rows, size) that are normally distributed, and orthogonal within blocks of ``size`` rows.

    Q of a QR decomposition alone is not uniformly distributed over rotations: the signs that LAPACK
    chooses are not random.

    Source: Mezzadri 2007, arXiv:math-ph/0609050, section 5.
    """
    blocks = -(-rows // size)
    normal = torch.randn(blocks, size, size, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    uniform = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths = torch.randn(rows, size, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    drawn: Tensor = (uniform.flatten(0, 1)[:rows] * lengths).to(torch.get_default_dtype())
    return drawn


def _exponential(x: Tensor) -> Tensor:
    """Return e^x for x of at most 0, with x below -`MAX_EXPONENT_RANGE` replaced by -`MAX_EXPONENT_RANGE`."""
    return F.threshold(x, -MAX_EXPONENT_RANGE, -MAX_EXPONENT_RANGE).exp_()


def mix_seed(seed: int, draws: int) -> int:
    """Mix a seed and the number of draws into one seed, as a CPU generator uses only 32 bits of its seed."""
    return Random(f"{seed} {draws}").getrandbits(32)
