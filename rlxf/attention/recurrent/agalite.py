"""AGaLiTe: gated linear attention with outer-product features and an approximation of low rank."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, Recurrence, RecurrentMixer, zeros
from rlxf.attention.recurrent.heads import split_heads
from rlxf.attention.recurrent.scan import linear_scan
from rlxf.utils.checks import check_int

EPSILON = 1e-5
"""Added to the denominator, as in the authors' code."""


@dataclass(frozen=True)
class AGaLiTe(Recurrence):
    r"""Linear attention whose state of D x eta D entries is replaced by r pairs of vectors.

    With ``psi = relu(p_1) (x) relu(k)``, ``phi = relu(p_2) (x) relu(q)``, ``gamma = sigmoid(p_3) (x)
    sigmoid(g)``, ``beta = sigmoid(b)`` and ``c_jt = cos(omega_j t)``::

        k_j = (1 - gamma) k_j + c_jt gamma psi         v_j = (1 - beta) v_j + c_jt beta v
        s = (1 - gamma) s + gamma psi                  y = sum_j v_j (k_j . phi) / (2 r (s . phi) + eps)

    omega_j are r values from -pi to pi. All projections are of the current token, and t counts the steps of
    an episode from 2, as in the authors' code. Time steps that differ by ``2 (r - 1)`` have equal c_j
    and cannot be distinguished. r = 1 and r = 3 only distinguish even and odd steps.

    Source: Pramanik et al. 2023, arXiv:2310.15719, sections 3.2 and 3.3.

    Args:
        eta: size of the projections p; multiplies the features of keys and queries.
        rank: number r of oscillators.

    Raises:
        TypeError: if an option is not an int.
        ValueError: if an option is less than 1.
    """

    paper: ClassVar[str] = "Pramanik et al. 2023, arXiv:2310.15719"
    eta: int = 4
    rank: int = 4

    def __post_init__(self) -> None:
        check_int("AGaLiTe eta", self.eta)
        check_int("AGaLiTe rank", self.rank)

    def build(self, width: int, heads: int) -> "AGaLiTeMixer":
        return AGaLiTeMixer(self, width, heads)


class AGaLiTeMixer(RecurrentMixer):
    """Mixer of `AGaLiTe`."""

    def __init__(self, spec: AGaLiTe, width: int, heads: int):
        super().__init__()
        self.spec = spec
        self.heads = heads
        self.size = width // heads
        self.features = orthogonal_linear(width, 5 * width)
        self.expansions = orthogonal_linear(width, 3 * heads * spec.eta)
        self.output = orthogonal_linear(width, width)

    def initial_state(self, batch: int) -> MixerState:
        weight = self.output.weight
        features = self.spec.eta * self.size
        return {
            "key": zeros(weight, batch, self.spec.rank, self.heads, features),
            "value": zeros(weight, batch, self.spec.rank, self.heads, self.size),
            "normalizer": zeros(weight, batch, self.heads, features),
        }

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        k, q, v, beta, gamma = split_heads(self.features(x), self.heads).chunk(5, dim=-1)
        p1, p2, p3 = split_heads(self.expansions(x), self.heads).chunk(3, dim=-1)
        forgotten = runs.decays(_complement(p3, gamma))
        gamma = _outer(p3.sigmoid(), gamma.sigmoid())
        written, phi = gamma * _outer(p1.relu(), k.relu()), _outer(p2.relu(), q.relu())
        phase = self._oscillators(runs.position).to(x.dtype)[..., None, None]
        keys = linear_scan(forgotten[:, :, None], runs.inputs(phase * written[:, :, None]), state["key"])
        values = linear_scan(
            runs.decays((-beta).sigmoid())[:, :, None],
            runs.inputs(phase * (beta.sigmoid() * v)[:, :, None]),
            state["value"],
        )
        normalizer = linear_scan(forgotten, runs.inputs(written), state["normalizer"])
        weights = (keys * phi[:, :, None]).sum(dim=-1, keepdim=True)
        total = 2 * self.spec.rank * (normalizer * phi).sum(dim=-1, keepdim=True) + EPSILON
        y = ((values * weights).sum(dim=2) / total).flatten(-2).to(x.dtype)
        return self.output(y), {"key": keys[:, -1], "value": values[:, -1], "normalizer": normalizer[:, -1]}

    def _oscillators(self, position: Tensor) -> Tensor:
        """Return ``cos(omega_j t)`` for positions (B, T), in float64: (B, T, r)."""
        omega = torch.linspace(-math.pi, math.pi, self.spec.rank, dtype=torch.float64, device=position.device)
        return ((position[..., None] + 2) * omega).cos()


def _complement(p: Tensor, x: Tensor) -> Tensor:
    """Return ``1 - sigmoid(p) (x) sigmoid(x)``, (..., eta D), without cancellation."""
    p, x = p[..., :, None], x[..., None, :]
    return ((-p).sigmoid() + p.sigmoid() * (-x).sigmoid()).flatten(-2)


def _outer(p: Tensor, x: Tensor) -> Tensor:
    """Return the outer products (..., eta D) of p (..., eta) and x (..., D)."""
    return (p[..., :, None] * x[..., None, :]).flatten(-2)
