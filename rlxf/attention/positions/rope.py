"""Rotary positions: queries and keys are rotated by angles proportional to their position."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.base import (
    LayerPosition,
    PairwiseLayerPosition,
    Position,
    check_base,
    frequencies,
    rotate_pairs,
)
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_bool, check_choice, check_finite_number, check_int, check_positive

Scaling = Literal["linear", "ntk", "yarn", "dynamic"]

OPTIONS: dict[str, tuple[Scaling, ...]] = {
    "original_length": ("yarn", "dynamic"),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "truncate": ("yarn",),
    "attention_factor": ("yarn",),
}
"""Options that have an effect with some scalings only, and these scalings."""


@dataclass(frozen=True)
class RoPE(Position):
    r"""Rotate each pair ``(q[2m], q[2m+1])`` by the angle ``t * base^(-2m/D)``; the same for keys.

    ``q_i . k_j`` then depends only on i - j. Pairs are adjacent features, as in the paper; Llama pairs m with
    m + D/2, which is equivalent up to a permutation of the features of q and k.

    For sequences f times as long as in training, positions can be scaled:

    - "linear" rotates by ``t / f``.
    - "ntk" uses ``base * f^(D / (D - 2))``, which leaves the fastest pair unchanged and slows the slowest
      pair by f.
    - "yarn" leaves pairs that turn more than ``beta_fast`` times in ``original_length`` L_0 tokens unchanged,
      slows those that turn less than ``beta_slow`` times by f, and interpolates between the two. As in
      HF transformers, the two limits are numbers of pairs, at least that of the fastest pair, which therefore
      stays unchanged, even if it turns less than ``beta_slow`` times. Queries and keys are multiplied by
      ``attention_factor``.
    - "dynamic" is "ntk" with the f of the length so far: ``f n / L_0 - (f - 1)`` for the query at position
      n - 1, and 1 below L_0. The scores of each query need all keys rotated with its own base. Therefore,
      keys are cached without rotation, and the angle of each pair of query and key is computed: D numbers for
      each pair. Acting then equals learning. HF transformers keeps the base of its longest call instead, so
      that results depend on earlier calls.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2; linear: Chen et al. 2023, arXiv:2306.15595,
    section 2.3; ntk, yarn and dynamic: Peng et al. 2023, arXiv:2309.00071, sections 3.1 to 3.4, with the
    rounding of HF transformers.

    Args:
        base: longest wavelength over 2 pi, in tokens; above 1.
        scaling: "linear", "ntk", "yarn" or "dynamic".
        factor: f, at least 1; 1 for no scaling.
        original_length: L_0, the length in training, in tokens; required by "yarn" and "dynamic".
        beta_fast: turns in L_0 tokens above which "yarn" leaves a pair unchanged.
        beta_slow: turns in L_0 tokens below which "yarn" slows a pair by f.
        truncate: whether "yarn" rounds the two limits outward to whole pairs.
        attention_factor: factor of queries and of keys with "yarn"; None for ``0.1 ln(f) + 1``.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if base is not above 1 or not finite, if factor is less than 1, if an option is missing,
            has no effect with the scaling or is out of range; in a spec, if the width of a head is odd, or 2
            with "ntk" or "dynamic", or if "dynamic" is combined with a kernel without pairs or
            ``causal=False``.
    """

    paper: ClassVar[str] = "Su et al. 2021, arXiv:2104.09864"
    base: float = 10000.0
    scaling: Scaling = "linear"
    factor: float = 1.0
    original_length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_base("RoPE", self.base)
        check_finite_number("RoPE factor", self.factor)
        if self.factor < 1:
            raise ValueError(f"RoPE factor must be at least 1, got {self.factor}")
        check_choice("RoPE scaling", self.scaling, get_args(Scaling))
        self._check_original_length()
        self._check_yarn()
        self._check_effects()

    def _check_effects(self) -> None:
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self)}
        for name, scalings in OPTIONS.items():
            if self.scaling not in scalings and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"RoPE {name}={getattr(self, name)} has no effect with scaling={self.scaling!r}; leave "
                    f"it out or choose scaling={' or '.join(map(repr, scalings))}"
                )

    def _check_original_length(self) -> None:
        if self.original_length is not None:
            check_int("RoPE original_length", self.original_length)
        elif self.scaling in OPTIONS["original_length"]:
            raise ValueError(f"RoPE scaling={self.scaling!r} needs original_length, the length in training")

    def _check_yarn(self) -> None:
        check_bool("RoPE truncate", self.truncate)
        check_positive("RoPE beta_slow", self.beta_slow)
        check_finite_number("RoPE beta_fast", self.beta_fast)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"RoPE beta_fast must exceed beta_slow {self.beta_slow}, got {self.beta_fast}")
        if self.attention_factor is not None:
            check_positive("RoPE attention_factor", self.attention_factor)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the features of a head form enough pairs and the scaling is possible."""
        check_pairs("RoPE", choices)
        if choices.width == 2 * choices.score_heads and self.scaling in ("ntk", "dynamic"):
            raise ValueError(
                f"{self} needs more than 2 features per head; decrease heads or use scaling='linear'"
            )
        if self.scaling == "dynamic":
            self._check_dynamic(choices)

    def _check_dynamic(self, choices: SpecView) -> None:
        choices.kernel.check_pairwise(self)
        if not choices.causal:
            raise ValueError(
                f"{self} depends on the length up to a query, and causal=False shows the whole "
                f"sequence; choose scaling='ntk' or causal=True"
            )

    def build(self, width: int, heads: int) -> LayerPosition:
        return DynamicRoPEBias(self) if self.scaling == "dynamic" else RoPERotation(self)

    def frequencies(self, size: int, device: torch.device | None = None) -> Tensor:
        """Return the angle between adjacent positions for each pair, (size / 2,) float64.

        For "dynamic", these are the angles below L_0.
        """
        return SPEEDS[self.scaling](self, size, device)

    def dynamic_frequencies(self, length: Tensor, size: int) -> Tensor:
        """Return `frequencies` for "dynamic" at lengths (...): (..., size / 2)."""
        assert self.original_length is not None
        ratio = length.clamp(min=self.original_length).double() / self.original_length
        base = self.base * (self.factor * ratio - (self.factor - 1)) ** (size / (size - 2))
        exponent = torch.arange(0, size, 2, dtype=torch.float64, device=length.device) / size
        return base[..., None] ** -exponent

    @property
    def magnitude(self) -> float:
        """Factor of queries and of keys."""
        if self.scaling != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate x (B, H, T, D) according to position (B, T), and multiply it by `magnitude`."""
        rotated = rotate(x, position, self.frequencies(x.shape[-1], x.device))
        return rotated if self.magnitude == 1 else rotated * self.magnitude


def linear_speeds(rope: RoPE, size: int, device: torch.device | None) -> Tensor:
    """Return the frequencies of positions divided by f."""
    return frequencies(size, rope.base, device) / rope.factor


def ntk_speeds(rope: RoPE, size: int, device: torch.device | None) -> Tensor:
    """Return the frequencies of the scaled base."""
    return frequencies(size, rope.base * rope.factor ** (size / (size - 2)), device)


def yarn_speeds(rope: RoPE, size: int, device: torch.device | None) -> Tensor:
    """Return the frequencies: unchanged for fast pairs, divided by f for slow pairs, means in between."""
    low, high = (_pair_of_turns(rope, size, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), max(0, min(high, size - 1))
    pairs = torch.arange(size // 2, dtype=torch.float64, device=device)
    slowed = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    speeds = frequencies(size, rope.base, device)
    return speeds * (1 - slowed) + speeds / rope.factor * slowed


def _pair_of_turns(rope: RoPE, size: int, turns: float) -> float:
    """Return the number of the pair, from 0, that turns ``turns`` times in L_0 tokens; not rounded."""
    assert rope.original_length is not None
    return size * math.log(rope.original_length / (2 * math.pi * turns)) / (2 * math.log(rope.base))


def unscaled_speeds(rope: RoPE, size: int, device: torch.device | None) -> Tensor:
    """Return the frequencies of the base."""
    return frequencies(size, rope.base, device)


SPEEDS: dict[Scaling, Callable[[RoPE, int, torch.device | None], Tensor]] = {
    "linear": linear_speeds,
    "ntk": ntk_speeds,
    "yarn": yarn_speeds,
    "dynamic": unscaled_speeds,
}
"""Angle between adjacent positions for each pair, by scaling."""


def check_pairs(technique: str, choices: SpecView) -> None:
    """Raise ValueError unless the width of a head is even."""
    heads = choices.score_heads
    size = choices.width // heads
    if size % 2:
        raise ValueError(
            f"{technique} needs an even width per head, got {choices.width} / {heads} = {size}; use another "
            f"position, or other numbers of width and heads, of which kernel {choices.kernel} makes {heads}"
        )


def rotate(x: Tensor, position: Tensor, speed: Tensor) -> Tensor:
    """Rotate pairs of adjacent features of x (B, H, T, D) by ``position * speed``.

    position is (B, T), and speed (D / 2,) float64.
    """
    return rotate_pairs(x, position[:, None, :, None] * speed)


class RoPERotation(LayerPosition):
    """Module of `RoPE` in one layer: rotates queries and keys."""

    def __init__(self, spec: RoPE):
        super().__init__()
        self.spec = spec

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        return self.spec.rotate(q, position)

    def key(self, k: Tensor, position: Tensor) -> Tensor:
        return self.spec.rotate(k, position)

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor | None:
        """Return the effect of distances that are not those of positions; None if there are none."""
        moved = mask.moved_keys
        if moved is None:
            return None
        change = self.query(q, mask.query_in_memory) - self.query(q, mask.query.position)
        bias = change @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return bias.masked_fill(~moved[:, None, None], 0.0)


class DynamicRoPEBias(PairwiseLayerPosition):
    """Module of `RoPE` with the scaling "dynamic" in one layer: adds the effect of rotations to scores."""

    def __init__(self, spec: RoPE):
        super().__init__()
        self.spec = spec

    def pass_table(self, mask: AttentionMask) -> None:
        """Return None: the scores depend on the content of both tokens."""

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return the difference of the scores with and without rotation, (B, H, Tq, Tk)."""
        speed = self.spec.dynamic_frequencies(mask.query_in_memory + 1, q.shape[-1])
        angle = mask.distance[..., None] * speed[:, :, None]
        return (pair_scores(q, k, angle) - q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5


def pair_scores(q: Tensor, k: Tensor, angle: Tensor) -> Tensor:
    """Return products of q (B, H, Tq, D), rotated by angle (B, Tq, Tk, D / 2), and k (B, H, Tk, D)."""
    cos, sin = angle.cos().to(q.dtype)[:, None], angle.sin().to(q.dtype)[:, None]
    a, b = q[..., None, 0::2], q[..., None, 1::2]
    c, d = k[..., None, :, 0::2], k[..., None, :, 1::2]
    return ((a * cos - b * sin) * c + (a * sin + b * cos) * d).sum(-1)
