"""CoPE: contextual positions, which count only the tokens that the query selects."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.base import PairwiseLayerPosition, PairwisePosition
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class CoPE(PairwisePosition):
    r"""``s_ij += q_i . e[p_ij]``, ``p_ij = sum_{t=j..i} sigmoid(q_i . k_t / sqrt(D))``.

    A query counts the tokens from the key to itself, weighted by its gates: for example, the number of
    observations of some kind since then. Between whole positions, e is interpolated linearly. Positions from
    ``positions - 1`` on share a vector; their gates have no gradient. All heads of a layer share e.

    The sum is over the keys that the query may attend to. With `Full`, `Window` and an `XL` memory these are
    all tokens from j to i, as in the paper; with other patterns, hidden tokens are not counted. A query
    therefore needs the keys of its own group only, and no term of hidden keys enters the gates.

    A causal transformer is required: p counts up to the query.

    Source: Golovneva et al. 2024, arXiv:2405.18719, section 4.

    Args:
        positions: number of vectors e[0], e[1], ...

    Raises:
        TypeError: if positions is not an integer.
        ValueError: if positions is less than 2; in a spec, if the transformer is not causal.
    """

    paper: ClassVar[str] = "Golovneva et al. 2024, arXiv:2405.18719"
    cost: ClassVar[str] = "visible pairs + L positions"
    positions: int = 64

    def __post_init__(self) -> None:
        check_int("CoPE positions", self.positions, least=2)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the kernel computes each pair and the transformer is causal."""
        super().check(choices)
        if not choices.causal:
            raise ValueError(
                f"{self} counts the tokens from a key to a later query, and causal=False shows keys after "
                f"the query; choose T5Bias() or causal=True"
            )

    def build(self, width: int, heads: int) -> "CoPEBias":
        return CoPEBias(self, width // heads)


class CoPEBias(PairwiseLayerPosition):
    """Module of `CoPE` in one layer: e, ``vectors`` (P, D), which start at 0 as in the paper."""

    def __init__(self, spec: CoPE, size: int):
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(spec.positions, size))

    def pass_table(self, mask: AttentionMask) -> None:
        """Return None: the positions depend on the content."""

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return ``q_i . e[p_ij]`` (B, H, Tq, Tk), arbitrary where masked."""
        gates = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).sigmoid()
        position = count_from_key(gates.masked_fill(~mask.allowed_by_head, 0.0), mask)
        position = position.clamp(max=len(self.vectors) - 1)
        below = position.detach().floor()
        scores = q @ self.vectors.T
        number = below.long()
        above = (number + 1).clamp(max=len(self.vectors) - 1)
        fraction = (position - below).to(q.dtype)
        return scores.gather(-1, number).lerp(scores.gather(-1, above), fraction)


def count_from_key(gates: Tensor, mask: AttentionMask) -> Tensor:
    """Sum gates (B, H, Tq, Tk), 0 where masked, over the keys from each key on; at least float32."""
    order = mask.once(newest_first)[:, None, None].expand_as(gates)
    wide = gates.to(torch.promote_types(gates.dtype, torch.float32))
    counts = wide.gather(-1, order).cumsum(-1)
    return torch.zeros_like(counts).scatter(-1, order, counts)


def newest_first(mask: AttentionMask) -> Tensor:
    """Return the slots of the keys in descending order of position, (B, Tk)."""
    return mask.key.position.argsort(dim=1, descending=True)
