"""Performer: softmax attention, estimated with positive orthogonal random features."""

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.checks import check_seed, check_whole, check_word
from rlxf.attention.kernels.base import RecurrentKernel
from rlxf.attention.kernels.linear_attention import LinearAttention, with_own_seeds
from rlxf.attention.kernels.sums import Keys

DEPTH = 40.0
"""A feature is at least ``e^-40`` of the largest one of its token: so a query gives weight to any key."""

LEAST = 1e-30
"""No denominator of a query that sees something is as small."""

RELU_LEAST = 1e-3
"""What the authors add to rectified features."""


@dataclass(frozen=True)
class Performer(RecurrentKernel):
    r"""FAVOR+: ``o_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)``, at linear cost.

    ``phi(x) = M^-1/2 exp(P x' - |x'|^2 / 2)`` with ``x' = x / D^1/4``, so that ``E[phi(q) . phi(k)]`` is
    softmax's ``exp(q . k / sqrt(D))``. The M rows of P are drawn in blocks of D orthogonal ones: Q of a QR
    decomposition, its columns times the signs of R's diagonal, without which the estimate is biased, and
    lengths as those of D normal numbers. Heads share P; layers have their own.

    Nothing is added to phi, and nothing is seen ahead. The largest exponent of a query cancels in the
    quotient; that of a key is kept beside it as a scale, and sums are scaled by the largest so far. (Public
    code subtracts the maximum over all keys, later ones too, and adds 1e-4 or 1e-6 afterwards.) No exponent
    is more than 40 below the largest of its token. That is far below rounding, and lets any two tokens meet.

    ``kind="relu"`` is another attention of the paper, no estimate of softmax: ``max(P x', 0) + 1e-3``.

    While acting with the pattern `Full`, a layer keeps ``sum_j phi(k_j) [v_j, 1]`` in place of keys and
    values. Attention weights are not dropped: there are none.

    Source: Choromanski et al. 2021, arXiv:2009.14794, sections 2.2 to 2.4 and 4.

    Args:
        features: M; None for whole blocks, ``D round(ln D)``, 256 for D = 64: of the order D log D at which
            the paper's bound of the error holds.
        kind: of features, "exp" or "relu".
        redraw: updates after which P is drawn anew, as in the paper; None for never. The estimate changes
            with P, so what was done before differs from what is learned after: GTrXLPPO refuses it.
        seed: of the draws. With the number of updates, which is kept with the weights, it says all of them.

    Raises:
        TypeError: if features, redraw or seed is no whole number.
        ValueError: if features or redraw is less than 1, seed negative, or the kind another one.
    """

    paper: ClassVar[str] = "Choromanski et al. 2021, arXiv:2009.14794"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L features"
    features: int | None = None
    kind: Literal["exp", "relu"] = "exp"
    redraw: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed("Performer seed", self.seed)
        check_word("Performer kind", self.kind, ("exp", "relu"))
        for name in ("features", "redraw"):
            if getattr(self, name) is not None:
                check_whole(f"Performer {name}", getattr(self, name))

    def for_layers(self, layers: int) -> tuple["Performer", ...]:
        """See `Kernel`: each layer draws by itself."""
        return with_own_seeds(self, layers)

    def build(self, width: int, heads: int) -> "PerformerAverage":
        """See `Kernel`."""
        return {"exp": PerformerAverage, "relu": ReLUAverage}[self.kind](self, width // heads)


class PerformerAverage(LinearAttention):
    """A `Performer` in one layer: ``projection`` (M, D) is P, ``updates`` counts those of the weights."""

    projection: Tensor
    updates: Tensor

    def __init__(self, spec: Performer, size: int):
        super().__init__()
        self.spec = spec
        self.features = size * max(1, round(math.log(size))) if spec.features is None else spec.features
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("projection", self._drawn(size, 0))

    def asking(self, q: Tensor) -> Tensor:
        """See `LinearAttention`: ``exp(P q' - max P q')``."""
        raised = self._raised(q)
        return _exponential(raised.sub_(raised.detach().amax(-1, keepdim=True)))

    def heard(self, k: Tensor) -> Keys:
        """See `LinearAttention`: the largest exponent is the scale."""
        raised = self._raised(k)
        half = self.wide(k).square().sum(-1, keepdim=True) / (2 * k.shape[-1] ** 0.5)
        top = raised.detach().amax(-1, keepdim=True)
        features = _exponential(raised.sub_(top + (half - half.detach())))
        return Keys(features, (top - half.detach())[..., 0])

    def quotient(self, found: Tensor) -> Tensor:
        """See `LinearAttention`: features are positive, so the denominator is 0 only without visible keys."""
        return found[..., :-2] / found[..., -2:-1].clamp(min=LEAST)

    def _raised(self, x: Tensor) -> Tensor:
        """P x' (B, H, T, M)."""
        return self.wide(x) @ (self.projection.to(self.wide(x).dtype).T * x.shape[-1] ** -0.25)

    @torch.no_grad()
    def after_update(self) -> None:
        """Count, and draw anew when it is time."""
        self.updates += 1
        if self.spec.redraw is not None and int(self.updates) % self.spec.redraw == 0:
            draws = int(self.updates) // self.spec.redraw
            self.projection.copy_(self._drawn(self.projection.shape[1], draws))

    def _drawn(self, size: int, draws: int) -> Tensor:
        generator = torch.Generator().manual_seed(mixed(self.spec.seed, draws))
        return orthogonal_rows(self.features, size, generator)


class ReLUAverage(PerformerAverage):
    """The same with features that are no exponentials."""

    def asking(self, q: Tensor) -> Tensor:
        """See `LinearAttention`."""
        return self._raised(q).relu() + RELU_LEAST

    def heard(self, k: Tensor) -> Keys:
        """See `LinearAttention`."""
        return Keys(self.asking(k), k.new_zeros(k.shape[:-1], dtype=self.wide(k).dtype))


def orthogonal_rows(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """(rows, size): each row is distributed as normal numbers; those of a block of ``size`` are orthogonal.

    A decomposition as it comes is not uniform over rotations: LAPACK prefers signs.

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
    """e^x, where x of at most 0 counts as at least -`DEPTH`."""
    return F.threshold(x, -DEPTH, -DEPTH).exp_()


def mixed(seed: int, draws: int) -> int:
    """A seed for both numbers. A generator on CPU reads 32 bits of it, so they have to be mixed."""
    return Random(f"{seed} {draws}").getrandbits(32)
