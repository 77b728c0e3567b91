"""GRU as a token mixer."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from rlxf.attention.recurrent.base import DEFAULT_HORIZON, Recurrence, time_constants
from rlxf.attention.recurrent.lstm import GatedRNN
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class GRU(Recurrence):
    r"""``h_t = (1 - z_t) n_t + z_t h_(t-1)``, with gates computed from x_t and h_(t-1).

    This is torch's ``nn.GRU`` with one layer, which applies the reset gate after the recurrent product; in
    the paper it is applied before. A projection follows. The steps of the GRU are computed in
    sequence, because the gates depend on the state.

    Source: Cho et al. 2014, arXiv:1406.1078, section 2.3.

    Args:
        horizon: largest of the time constants that the biases of z give the features of h, in tokens.

    Raises:
        TypeError: if horizon is not an int.
        ValueError: if horizon is less than 1.
    """

    paper: ClassVar[str] = "Cho et al. 2014, arXiv:1406.1078"
    causal_form: ClassVar[str] = "torch's"
    horizon: int = DEFAULT_HORIZON

    def __post_init__(self) -> None:
        check_int("GRU horizon", self.horizon)

    def build(self, width: int, heads: int) -> GatedRNN:
        rnn = nn.GRU(width, width)
        rnn.get_parameter("bias_ih_l0").data[width : 2 * width] = time_constants(self.horizon, width).log()
        return GatedRNN(rnn, ("hidden",))
