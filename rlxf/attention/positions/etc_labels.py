"""ETC's relative position labels: a learned key and bias for each label of a pair of tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.patterns.global_attention import is_global, number_of_kind
from rlxf.attention.patterns.global_tokens import (
    SegmentLengths,
    checked_positions,
    checked_segments,
    segment_of,
)
from rlxf.attention.positions.base import PairwiseLayerPosition, PairwisePosition
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class ETCLabels(PairwisePosition):
    r"""``s_ij = (q_i . (k_j + a_l) + b_l) / sqrt(D)`` with the label ``l = l(i, j)``.

    Each head of each layer learns a key a_l and a bias b_l for each of 2 K + 3 labels. In the pattern `ETC`,
    global tokens and other tokens have separate tables. Two tokens that are both global, or both not, have a
    label of their distance, clipped at K: ``min(j - i, K)`` for the token itself and later keys,
    ``K + min(i - j, K)`` for earlier keys. For a global token and another one, the label is 2 K + 2 if the
    other token belongs to the global one, else 2 K + 1. Token n of those that are not global belongs to
    global token ``n // segment``, as the words of a sentence do in the paper. Sentences of different lengths
    are given as a tuple. With ``outside``, all keys of other sentences have that label instead of a
    label for their distance, as the authors' code allows.

    A causal transformer does not use the labels of later keys.

    Source: Ainslie et al. 2020, arXiv:2004.08483, sections 3.1 and 3.4; label numbers and the bias from the
    authors' code.

    Args:
        max_distance: K, the largest distance, in tokens, that has its own label.
        global_tokens: number of global tokens, the first positions of an episode, or their positions as a
            tuple; must equal that of the pattern, if it has global tokens.
        segment: number of tokens that belong to each global token, or a tuple with the number of each; None:
            no token belongs to one.
        outside: label of keys of other sentences, from 0 to 2 K + 2, where neither token is global; None for
            labels of their distances.

    Raises:
        TypeError: if an option is not an integer or, where allowed, a tuple of integers.
        ValueError: if max_distance or segment is less than 1, global_tokens is less than 0, a position is
            negative or given twice, or outside is out of range or given without segment. In a spec, if the
            pattern has different global tokens, or the kernel does not compute each pair.
    """

    paper: ClassVar[str] = "Ainslie et al. 2020, arXiv:2004.08483"
    max_distance: int = 16
    global_tokens: int | tuple[int, ...] = 4
    segment: SegmentLengths = None
    outside: int | None = None

    def __post_init__(self) -> None:
        check_int("ETCLabels max_distance", self.max_distance)
        if isinstance(self.global_tokens, list | tuple):
            object.__setattr__(self, "global_tokens", checked_positions(self.global_tokens))
        else:
            check_int("ETCLabels global_tokens", self.global_tokens, least=0)
        object.__setattr__(self, "segment", checked_segments("ETCLabels segment", self.segment))
        if self.outside is None:
            return
        check_int("ETCLabels outside", self.outside, least=0, most=2 * self.max_distance + 2)
        if self.segment is None:
            raise ValueError(
                f"ETCLabels outside={self.outside} needs the lengths of sentences; set segment or "
                f"outside=None"
            )

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless kernel and global tokens fit; see `ETCLabels`."""
        super().check(choices)
        tokens = getattr(choices.pattern, "global_tokens", self.global_tokens)
        if tokens != self.global_tokens:
            raise ValueError(
                f"{self} and {choices.pattern} disagree on the global tokens; "
                f"set ETCLabels global_tokens={tokens}"
            )

    def build(self, width: int, heads: int) -> "ETCLabelBias":
        return ETCLabelBias(self, width // heads, heads)

    def label(self, i: Tensor, j: Tensor, distance: Tensor) -> Tensor:
        """Return the label (...) int64 of each pair.

        Args:
            i: position of the query.
            j: position of the key; broadcasts with i.
            distance: distance of the pair, usually ``i - j``; see `AttentionMask.distance`.
        """
        max_distance = self.max_distance
        global_i, global_j = (is_global(position, self.global_tokens) for position in (i, j))
        after, before = (x.clamp(max=max_distance) for x in (-distance, distance))
        by_distance = torch.where(distance <= 0, after, max_distance + before)
        if self.outside is not None:
            same = self._segment(i) == self._segment(j)
            by_distance = torch.where(same | global_i, by_distance, self.outside)
        token, owner = torch.where(global_i, j, i), torch.where(global_i, i, j)
        own = self._segment(token) == number_of_kind(owner, self.global_tokens)
        return torch.where(global_i == global_j, by_distance, 2 * max_distance + 1 + own.long())

    def _segment(self, position: Tensor) -> Tensor:
        """Return the segment of tokens that are not global; -1 for none."""
        return segment_of(number_of_kind(position, self.global_tokens), self.segment)


class ETCLabelBias(PairwiseLayerPosition):
    """Module of `ETCLabels` in one layer: ``keys`` (2 K + 3, H, D) and ``biases`` (2 K + 3, H)."""

    def __init__(self, spec: ETCLabels, size: int, heads: int):
        super().__init__()
        self.spec = spec
        labels = 2 * spec.max_distance + 3
        self.keys = nn.Parameter(torch.zeros(labels, heads, size))
        self.biases = nn.Parameter(torch.zeros(labels, heads))

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return ``(q_i . a_l + b_l) / sqrt(D)`` (B, H, Tq, Tk) for q (B, H, Tq, D)."""
        label_scores = q @ self.keys.permute(1, 2, 0) + self.biases.T[:, None]
        label = self.spec.label(mask.query.position[..., None], mask.key.position[:, None], mask.distance)
        scores = label_scores.gather(-1, label[:, None].expand(-1, q.shape[1], -1, -1))
        return scores * q.shape[-1] ** -0.5
