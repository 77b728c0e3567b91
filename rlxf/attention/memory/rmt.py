"""Memory tokens that are passed from segment to segment: RMT, and RATE with its retention valve."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from rlxf.attention.kernels.softmax import dot_product_attention
from rlxf.attention.memory.base import Memory
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.recurrent.base import MixerState
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_choice, check_int

TokenMask = Literal["causal", "mutual"]
"""Mask among the read tokens, and among the write tokens."""


class MemoryTokens(nn.Module):
    """Learned memory tokens before the first segment of an episode, ``start`` (m, C), and their update."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.start = nn.Parameter(torch.randn(count, width))

    def update(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the next memory (B, m, C), given the old one and the outputs of the write tokens."""
        return new


@dataclass(frozen=True)
class RMT(Memory):
    r"""Recurrent Memory Transformer: m tokens carry what an episode's segments of S tokens pass on.

    The transformer processes ``[mem_k ; x_kS ... x_(kS+S-1) ; mem_k]`` for segment k of an episode. The
    first copy is read by the tokens of the segment; the second one, the write tokens, attends to all of them.
    Its outputs, after the final norm, are ``mem_(k+1)``. ``mem_0`` is learned. A token attends to the memory
    tokens and the earlier tokens of its own segment, nothing else: memory and cost are constant.

    Segments are those of the episode: token t belongs to segment ``t // S``. They do not depend on how a
    rollout is cut for training. So an agent acts in the same segments as it learns, and acting step by step
    equals learning. A state holds the inputs of the tokens of the unfinished segment, like `XL` memory of
    S - 1 tokens. It also holds the memory tokens that the segment reads, in ``State.recurrent``: a rollout
    stores them at the starts of its segments only. The memory is written by the step that completes a
    segment; a segment that an episode's end cuts short is not written. Gradients flow through the memory
    tokens across all segments of a training segment, and stop at its start: to train what is written, train
    on several segments at once.

    Positions count within a segment: memory tokens at 0 ... m - 1, its tokens from m, write tokens from
    m + S. A `DecisionTransformer` has three tokens per step, so S should be a multiple of 3, and its windows
    several segments long. With context="episode" its segments are those of the episode, otherwise those of
    the window.

    With mask="causal", as in the paper's decoder, memory tokens attend to the earlier ones; with "mutual", as
    in its Transformer-XL form, read tokens attend to each other, and so do write tokens.

    Source: Bulatov et al. 2022, arXiv:2207.06881, section 3.2.

    Args:
        segment: tokens S of a segment, at least 2. The default is 8 steps of a `DecisionTransformer`, and
            less than half of a training segment of `GTrXLPPO`, so that gradients reach the memory tokens.
        tokens: number of memory tokens m, at least 1.
        mask: mask among read tokens and among write tokens: "causal" or "mutual".

    Raises:
        TypeError: if a number is not an int.
        ValueError: if a number is too small or the mask unknown; in a spec, unless the pattern is `Full`, the
            kernel a softmax over all visible keys and the depth fixed, or if the position has too few
            vectors.
    """

    paper: ClassVar[str] = "Bulatov et al. 2022, arXiv:2207.06881"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "(segment + 2 tokens) pairs per token"
    segment: int = 24
    tokens: int = 8
    mask: TokenMask = "causal"

    def __post_init__(self) -> None:
        check_int(f"{type(self).__name__} segment", self.segment, least=2)
        check_int(f"{type(self).__name__} tokens", self.tokens)
        check_choice(f"{type(self).__name__} mask", self.mask, get_args(TokenMask))

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the other choices process the tokens of a segment alike."""
        super().check(choices)
        self.check_attention_everywhere(choices)
        choices.depth.check_equal_passes(self)
        if choices.cross_attention:
            raise ValueError(
                f"{self} cannot be combined with cross_attention=True; use memory=XL(M) in a decoder"
            )
        self.check_full_pattern(choices)
        self.check_full_softmax(choices)
        most = choices.max_positions
        if most is not None and most < self.positions:
            raise ValueError(
                f"{self} needs {self.positions} positions in a segment, but {choices.position} has {most}; "
                f"use max_length={self.positions}"
            )

    @property
    def length(self) -> int:
        """Tokens of an unfinished segment in a state, S - 1."""
        return self.segment - 1

    @property
    def segment_length(self) -> int:
        return self.segment

    @property
    def affects_one_segment(self) -> bool:
        """True: memory tokens are passed between the segments of an episode."""
        return True

    @property
    def positions(self) -> int:
        """Positions of a segment with its memory tokens: S + 2 m."""
        return self.segment + 2 * self.tokens

    def covers(self, pattern: Pattern) -> bool:
        """Return True: the memory itself defines what is visible."""
        return True

    def check_gaps(self) -> None:
        """Raise ValueError, since an empty slot takes the place of a token of the unfinished segment."""
        raise ValueError(f"{self} would lose the first token of every segment with an empty slot")

    def check_traceable(self) -> None:
        """Raise ValueError: a step that completes a segment runs the transformer a second time."""
        raise ValueError(f"the step that completes a segment of {self} differs from the others")

    def check_recomputable(self) -> None:
        """Raise ValueError: memory tokens depend on all segments of the episode."""
        raise ValueError(f"the memory tokens of {self} depend on the whole episode")

    def build_tokens(self, width: int) -> MemoryTokens:
        """Return the module of the memory tokens of a transformer."""
        return MemoryTokens(self.tokens, width)

    def initial_carry(self, layers: int, batch: int, like: Tensor, width: int) -> MixerState:
        written = torch.zeros(batch, dtype=torch.bool, device=like.device)
        tokens = torch.zeros(batch, self.tokens, width, dtype=like.dtype, device=like.device)
        return {"tokens": tokens, "written": written, "position": torch.zeros_like(written, dtype=torch.long)}


@dataclass(frozen=True)
class RATE(RMT):
    r"""`RMT` with a memory retention valve: ``mem_(k+1) = MHA(mem_k, ReLU(w_k), ReLU(w_k))``.

    w_k are the outputs of the write tokens. The queries of the multi-head attention are the old memory, so it
    decides what of the new memory to keep. It has no mask, residual or norm. Without the valve, noise
    accumulates over many segments. With a single token the valve has no choice: use at least two. By default
    the memory tokens attend to each other, as in the authors' code.

    This is the memory of the Recurrent Action Transformer with Memory, a `DecisionTransformer`. See `RMT` for
    segments, positions and acting.

    Source: Cherepanov et al. 2023, arXiv:2306.09459, section 4.

    Args:
        segment: see `RMT`.
        tokens: see `RMT`.
        mask: see `RMT`.
        valve_heads: heads of the valve; must divide the width.

    Raises:
        TypeError: see `RMT`.
        ValueError: see `RMT`; in a spec, also if valve_heads does not divide the width.
    """

    paper: ClassVar[str] = "Cherepanov et al. 2023, arXiv:2306.09459"
    mask: TokenMask = "mutual"
    valve_heads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("RATE valve_heads", self.valve_heads)

    def check(self, choices: SpecView) -> None:
        super().check(choices)
        if choices.width % self.valve_heads:
            raise ValueError(
                f"valve_heads of {self} must divide the width {choices.width}; use valve_heads=1"
            )

    def build_tokens(self, width: int) -> "RetentionValve":
        return RetentionValve(self, width)


class RetentionValve(MemoryTokens):
    """Memory tokens of `RATE` with the projections (C, C) of the valve."""

    def __init__(self, spec: RATE, width: int):
        super().__init__(spec.tokens, width)
        self.heads = spec.valve_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def update(self, old: Tensor, new: Tensor) -> Tensor:
        new = new.relu()
        projected = (self.query(old), self.key(new), self.value(new))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projected)
        y: Tensor = self.out(dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y
