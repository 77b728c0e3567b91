"""XPos: rotary positions whose scores also decay with the distance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.base import PairwiseLayerPosition, PairwisePosition, check_base, frequencies
from rlxf.attention.positions.rope import check_pairs, rotate
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import EMPTY, TokenIndex, is_tracing
from rlxf.utils.checks import MAX_INT, check_positive

GAMMA = 0.4
"""The paper's gamma, which limits the decay of the fastest pair."""

MAX_LOG_SCALE = 60.0
"""Largest logarithm of a scale. Float32 and bfloat16 overflow at 88 and underflow at -87: a key whose scale
underflows then has less than 2e-12 times the score without scales."""


@dataclass(frozen=True)
class XPos(PairwisePosition):
    r"""`RoPE` whose n-th pair of features is scaled by ``zeta_n^((i - j) / S)``.

    ``zeta_n = (2n/D + g) / (1 + g)`` with ``g = 0.4``: queries are scaled by ``zeta_n^(i / S)`` and keys by
    ``zeta_n^(-j / S)``. The fastest pairs decay most, so the scores of distant keys depend mainly on
    the slow pairs.

    Scales of absolute positions overflow in long episodes. Therefore, keys are cached without a scale, and
    both scales count from the newest token of the episode in each pass. This costs a second product of
    queries and keys, and in passes over more than 47 S tokens of an episode another one for each 47 S tokens.

    A causal transformer is required, because scores grow with the distance to later tokens.

    Source: Sun et al. 2023, arXiv:2212.10554, section 3, and the authors' code.

    Args:
        base: longest wavelength over 2 pi, in tokens; above 1.
        scale_base: S, distance in tokens at which a pair is scaled by ``zeta_n``; 512 as in the authors'
            code.

    Raises:
        TypeError: if an option is not a number.
        ValueError: if base is not above 1, or scale_base is not above 0; in a spec, if the width of a head is
            odd, or the transformer is not causal.
    """

    paper: ClassVar[str] = "Sun et al. 2023, arXiv:2212.10554"
    base: float = 10000.0
    scale_base: float = 512.0

    def __post_init__(self) -> None:
        check_base("XPos", self.base)
        check_positive("XPos scale_base", self.scale_base)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless features form pairs and the transformer is causal."""
        super().check(choices)
        check_pairs("XPos", choices)
        if not choices.causal:
            raise ValueError(
                f"scores of {self} grow with the distance to later tokens, which are visible with "
                f"causal=False; choose RoPE() or causal=True"
            )

    def build(self, width: int, heads: int) -> "XPosBias":
        return XPosBias(self)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate x (B, H, T, D) according to position (B, T)."""
        return rotate(x, position, frequencies(x.shape[-1], self.base, x.device))

    def scale(self, x: Tensor, position: Tensor) -> Tensor:
        """Multiply x (B, H, T, D) by ``zeta_n^(position / S)``, for position (B, T) of any sign.

        Factors are at most ``e^60``, see `MAX_LOG_SCALE`.
        """
        pairs = torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1]
        log_zeta = ((pairs + GAMMA) / (1 + GAMMA)).log().repeat_interleave(2)
        exponent = position[:, None, :, None] * (log_zeta / self.scale_base)
        return x * exponent.clamp(max=MAX_LOG_SCALE).exp().to(x.dtype)

    @property
    def max_span(self) -> int:
        """Number of positions for which scales of queries with a common origin do not overflow."""
        return max(1, int(min(MAX_INT, MAX_LOG_SCALE * self.scale_base / math.log((1 + GAMMA) / GAMMA))))

    def query_blocks(self, mask: AttentionMask) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Divide the queries of each episode into blocks of `max_span` positions, from the newest token.

        Returns:
            For each block: the mask of its queries (B, Tq) bool, and the positions of queries (B, Tq) and
            keys (B, Tk) minus the last position of the block. Later keys, which are masked, have 0.
        """
        query, key = positions_from_newest(mask)
        if is_tracing():
            return [(torch.ones_like(query, dtype=torch.bool), query, key)]
        number = (
            (-query).div(self.max_span, rounding_mode="floor").masked_fill(mask.query.episode == EMPTY, 0)
        )
        offsets = [(block, block * self.max_span) for block in number.unique().tolist()]
        return [(number == block, query + offset, (key + offset).clamp(max=0)) for block, offset in offsets]


class XPosBias(PairwiseLayerPosition):
    """Module of `XPos` in one layer: rotates queries and keys, and adds the effect of their scales."""

    def __init__(self, spec: XPos):
        super().__init__()
        self.spec = spec

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        return self.spec.rotate(q, position)

    def key(self, k: Tensor, position: Tensor) -> Tensor:
        return self.spec.rotate(k, position)

    def pass_table(self, mask: AttentionMask) -> None:
        """Return None: the scores depend on the content of both tokens."""

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return the difference of scaled and unscaled scores, (B, H, Tq, Tk).

        Scores of keys that the memory moved (`AttentionMask.moved_keys`) use the positions in the memory.
        """
        rotated = self.query(q, mask.query.position)
        (_, *positions), *others = mask.once(self.spec.query_blocks)
        scaled = self._scaled_scores(rotated, k, *positions)
        for of_block, *positions in others:
            scores = self._scaled_scores(rotated, k, *positions)
            scaled = torch.where(of_block[:, None, :, None], scores, scaled)
        moved = mask.moved_keys
        if moved is not None:
            query, key = mask.query_in_memory, mask.key.position.masked_fill(~moved, 0)
            near = self._scaled_scores(self.query(q, query), k, query, key)
            scaled = torch.where(moved[:, None, None], near, scaled)
        return (scaled - rotated @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5

    def _scaled_scores(self, q: Tensor, k: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
        """Return products of rotated q and k that are scaled by positions with a common origin."""
        return self.spec.scale(q, of_query) @ self.spec.scale(k, -of_key).transpose(-1, -2)


def positions_from_newest(mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Return positions of queries (B, Tq) and keys (B, Tk) minus the newest of their episode in the pass."""
    tokens = mask.query.concatenate(mask.key)
    return tuple((tokens.position - newest(tokens)).split([mask.query.shape[1], mask.key.shape[1]], dim=1))


def newest(index: TokenIndex) -> Tensor:
    """Return the last position of the episode of each token, (B, T); arbitrary for empty slots."""
    if is_tracing():  # which cannot count episodes
        same = index.episode[:, :, None] == index.episode[:, None]
        return index.position[:, None].where(same, 0).amax(-1)
    episodes = index.episodes
    number = (index.episode[..., None] == episodes[:, None]).int().argmax(-1)
    position = index.position.where(index.episode != EMPTY, 0)
    last = torch.zeros_like(episodes).scatter_reduce(1, number, position, "amax")
    return last.gather(1, number)
