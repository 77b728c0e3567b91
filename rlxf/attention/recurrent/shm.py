"""Stable Hadamard memory: a matrix whose entries are scaled by calibration factors of mean 1."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, Recurrence, RecurrentMixer, zeros
from rlxf.attention.recurrent.scan import growing_scan
from rlxf.utils.checks import check_int

NORM_EPSILON = 1e-5
"""Added to the sum of the features of keys and queries, as in the authors' code."""

HASH_MULTIPLIER = 2654435761
"""Multiplier of Knuth's multiplicative hash."""


@dataclass(frozen=True)
class SHM(Recurrence):
    r"""``M_t = M_(t-1) * C_t + (e_t v_t) k_t^T`` and ``y_t = M_t q_t + x_t W_s + b_s``.

    ``*`` is the elementwise product. ``C_t = 1 + tanh(theta c_t^T)``, where c_t is a projection of the
    token and theta one of ``rows`` learned vectors. Keys and queries are rectified and divided by their sum,
    and ``e_t = sigmoid(x_t W_e)``. The paper draws a row of theta at random for each step. Here a hash of the
    position in the episode selects it, so that a step has the same row in acting and in training. A
    projection of y_t to the width follows.

    The factors C range to 2, and the state is not clipped, because a recurrence with clipping cannot be
    computed in parallel. In the paper, theta has mean 0, so that products of C are 1 in expectation. Here
    theta is initialized with mean 0 in each column: whatever the token, the product of C over all rows is
    then at most 1, since ``log(1 + tanh(z))`` is concave. Training can change that. Whether a state overflows
    then depends on the tokens, so that it is an error only when it happens.

    Source: Le et al. 2024, arXiv:2410.10132, sections 3.2 and 3.3.

    Args:
        size: rows and columns of the matrix M.
        rows: number of vectors theta.

    Raises:
        TypeError: if an option is not an int.
        ValueError: if an option is less than 1.
    """

    paper: ClassVar[str] = "Le et al. 2024, arXiv:2410.10132"
    size: int = 32
    rows: int = 128

    def __post_init__(self) -> None:
        check_int("SHM size", self.size)
        check_int("SHM rows", self.rows)

    def row(self, position: Tensor) -> Tensor:
        """Return the row of theta for each position (B, T)."""
        return (position * HASH_MULTIPLIER % 2**32 >> 8) % self.rows

    def build(self, width: int, heads: int) -> "HadamardMemory":
        return HadamardMemory(self, width)


class HadamardMemory(RecurrentMixer):
    """Mixer of `SHM`."""

    def __init__(self, spec: SHM, width: int):
        super().__init__()
        self.spec = spec
        self.key = orthogonal_linear(width, spec.size, bias=False)
        self.query = orthogonal_linear(width, spec.size, bias=False)
        self.value = orthogonal_linear(width, spec.size, bias=False)
        self.calibration = orthogonal_linear(width, spec.size, bias=False)
        self.theta = nn.Parameter(torch.empty(spec.rows, spec.size))
        nn.init.xavier_uniform_(self.theta)
        self.theta.data -= self.theta.data.mean(dim=0)
        self.strength = nn.Linear(width, 1, bias=False)
        self.shortcut = orthogonal_linear(width, spec.size)
        self.output = orthogonal_linear(spec.size, width)

    def initial_state(self, batch: int) -> MixerState:
        return {"state": zeros(self.theta, batch, self.spec.size, self.spec.size)}

    def forward(self, x: Tensor, runs: EpisodeRuns, state: MixerState) -> tuple[Tensor, MixerState]:
        k, q = (_normalize_rectified(projection(x)) for projection in (self.key, self.query))
        theta = self.theta[self.spec.row(runs.position)]
        rates = theta[..., :, None] * self.calibration(x)[..., None, :]
        calibration = 1 + rates.to(state["state"].dtype).tanh()
        written = (self.strength(x).sigmoid() * self.value(x))[..., :, None] * k[..., None, :]
        states = growing_scan(runs.decays(calibration), runs.inputs(written), state["state"])
        y = (states @ q.to(states.dtype)[..., None])[..., 0].to(x.dtype) + self.shortcut(x)
        return self.output(y), {"state": states[:, -1]}


def _normalize_rectified(x: Tensor) -> Tensor:
    """Rectify x (..., D) and divide it by its sum."""
    x = x.relu()
    return x / (NORM_EPSILON + x.sum(dim=-1, keepdim=True))
