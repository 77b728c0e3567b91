"""Position and episode of each token, blocks of consecutive positions, and decisions by values of tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.nn import functional as F

Result = TypeVar("Result")

EMPTY = -1
"""Episode number of a slot that holds no token."""

MISSING = -1
"""Slot of a position that has no token."""


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Position and episode of every token of a batch.

    Tokens attend only to tokens of their own episode. Episode numbers are local to a row of
    the batch. A slot with episode -1 is empty: no token attends to it, and its output is undefined. Its
    position is arbitrary, and its token must be finite: masked weights are 0, and 0 times NaN is NaN.

    Args:
        position: (B, T) int64, steps since the start of the episode, from 0.
        episode: (B, T) int64, episode number, -1 for an empty slot.

    Raises:
        ValueError: if the two shapes differ or are not (B, T).
        TypeError: if position or episode is not int64.
    """

    position: Tensor
    episode: Tensor
    _on_cpu: "TokenIndex | None" = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.position.dim() != 2 or self.position.shape != self.episode.shape:
            shapes = f"{tuple(self.position.shape)} and {tuple(self.episode.shape)}"
            raise ValueError(f"position and episode must both have shape (B, T), got {shapes}")
        if not self.position.dtype == self.episode.dtype == torch.int64:
            raise TypeError(
                f"position and episode must have dtype torch.int64, got {self.position.dtype} and "
                f"{self.episode.dtype}; convert them with .long()"
            )

    @classmethod
    def range(
        cls, batch: int, length: int, start: int = 0, device: torch.device | None = None
    ) -> "TokenIndex":
        """Create an index with one episode per row and positions start ... start + length - 1.

        Raises:
            ValueError: if ``start`` is negative.
        """
        if start < 0:
            raise ValueError(f"positions count from 0, got start={start}")
        position = torch.arange(start, start + length, device=device).expand(batch, length)
        return cls(position, torch.zeros_like(position))

    @classmethod
    def empty(cls, batch: int, length: int, device: torch.device | None = None) -> "TokenIndex":
        """Create an index that has only empty slots."""
        position = torch.zeros(batch, length, dtype=torch.long, device=device)
        return cls(position, torch.full_like(position, EMPTY))

    @property
    def shape(self) -> torch.Size:
        """Shape (B, T)."""
        return self.position.shape

    @property
    def filled_position(self) -> Tensor:
        """Positions (B, T), with 0 for empty slots, whose position is arbitrary."""
        return self.position.masked_fill(self.episode == EMPTY, 0)

    @property
    def on_cpu(self) -> "TokenIndex":
        """This index on the CPU, from which the program takes decisions; the index itself if it is there.

        Known values (`with_values`) come first. Otherwise the first use copies the index from its device, and
        the program waits for it. Once used, the index must not be modified.

        Raises:
            RuntimeError: while operations are recorded, if the values are not known.
        """
        if self._on_cpu is None and is_recording():
            raise RuntimeError("a decision depends on the positions or episodes of tokens")
        if self._on_cpu is None and self.position.device.type == "cpu":
            return self
        if self._on_cpu is None:
            object.__setattr__(self, "_on_cpu", TokenIndex(*torch.stack([self.position, self.episode]).cpu()))
        assert self._on_cpu is not None
        return self._on_cpu

    @property
    def known_on_cpu(self) -> bool:
        """Return whether `on_cpu` needs no copy."""
        return self.position.device.type == "cpu" or self._on_cpu is not None

    def to(self, device: torch.device | str) -> "TokenIndex":
        """Return this index on a device, with its values on the CPU; the program does not wait."""
        parts = (self.position, self.episode)
        moved = TokenIndex(*(x.to(device, non_blocking=True) for x in parts))
        return moved.with_values(self.on_cpu) if moved.position.device.type != "cpu" else moved

    def with_values(self, on_cpu: "TokenIndex | None") -> "TokenIndex":
        """Return this index with known values on the CPU, which are equal; None if they are not known."""
        return self if on_cpu is self else replace(self, _on_cpu=on_cpu)

    def _with_known(
        self, part: "TokenIndex", compute: Callable[["TokenIndex"], "TokenIndex"]
    ) -> "TokenIndex":
        """Return ``part`` with values that ``compute`` derives from those of this index, if these are known.

        The derivation is not recorded, see `is_recording`.
        """
        if self._on_cpu is None:
            return part
        with disable_proxy_modes_tracing():
            return part.with_values(compute(self._on_cpu))

    @property
    def contiguous(self) -> bool:
        """Return whether each episode occupies contiguous slots with positions that increase by 1.

        Episode numbers must also increase from slot to slot.
        """
        episode, position = self.episode, self.position
        previous, current = episode[:, :-1], episode[:, 1:]
        continues = (current == previous) & (position[:, 1:] == position[:, :-1] + 1)
        starts = current > previous.cummax(dim=1).values
        return bool((continues | starts | (current == EMPTY)).all())

    @property
    def episodes(self) -> Tensor:
        """Distinct episode numbers of each row, ascending: (B, N), padded with `EMPTY`; N is at least 1."""
        ordered = self.episode.sort(dim=1).values
        is_new = (ordered != EMPTY) & (ordered.diff(dim=1, prepend=ordered[:, :1] - 1) != 0)
        count = max(1, int(is_new.sum(1).max()))
        first = (~is_new).sort(dim=1, stable=True).indices[:, :count]
        return torch.where(is_new, ordered, EMPTY).gather(1, first)

    def shares_episode(self, key: "TokenIndex") -> Tensor:
        """Return whether tokens (B, Tq) and keys (B, Tk) share an episode, (B, Tq, Tk); empty keys do not."""
        same = self.episode[:, :, None] == key.episode[:, None, :]
        same &= (key.episode != EMPTY)[:, None, :]
        return same

    def find(self, tokens: "TokenIndex") -> Tensor:
        """Return the slot (B, N) of each of the tokens (B, N) in its row of this index; -1 if missing."""
        keys, targets = (((one.episode << 32) + one.position).contiguous() for one in (self, tokens))
        if not keys.shape[1]:
            return torch.full_like(targets, -1)
        keys, order = keys.sort(dim=1)
        rank = torch.searchsorted(keys, targets).clamp(max=keys.shape[1] - 1)
        return torch.where(keys.gather(1, rank) == targets, order.gather(1, rank), -1)

    def concatenate(self, later: "TokenIndex") -> "TokenIndex":
        """Concatenate this index and ``later`` along time."""
        position = torch.cat([self.position, later.position], dim=1)
        joined = TokenIndex(position, torch.cat([self.episode, later.episode], dim=1))
        if later._on_cpu is None:
            return joined
        known = later._on_cpu
        return self._with_known(joined, lambda own: own.concatenate(known))

    def rows(self, rows: Tensor | slice) -> "TokenIndex":
        """Return the selected rows of the batch: a bool (B,) mask, int64 (N,) row numbers, or a slice."""
        part = TokenIndex(self.position[rows], self.episode[rows])
        return self._with_known(part, lambda own: own.rows(rows)) if isinstance(rows, slice) else part

    def at(self, tokens: slice) -> "TokenIndex":
        """Return the selected slots of every row, as views."""
        part = TokenIndex(self.position[:, tokens], self.episode[:, tokens])
        return self._with_known(part, lambda own: own.at(tokens))

    def last(self, length: int) -> "TokenIndex":
        """Return the last ``length`` slots of every row, as views."""
        return self.at(slice(self.shape[1] - length, None))

    def gather(self, slots: Tensor) -> "TokenIndex":
        """Return the index of the tokens in slots (B, N); empty for `MISSING`."""
        if not self.shape[1]:
            return TokenIndex.empty(slots.shape[0], slots.shape[1], slots.device)
        position, episode = (x.gather(1, slots.clamp(min=0)) for x in (self.position, self.episode))
        return TokenIndex(position, episode.masked_fill(slots == MISSING, EMPTY))

    def newest(self) -> "TokenIndex":
        """Return the index of the last token of each row, (B, 1); empty for rows without tokens."""
        slots = torch.arange(self.shape[1], device=self.episode.device)
        filled = torch.where(self.episode == EMPTY, MISSING, slots)
        return self.gather(F.pad(filled, (1, 0), value=MISSING).amax(1, keepdim=True))

    def write(self, rows: Tensor | slice, slots: Tensor | int, tokens: "TokenIndex") -> None:
        """Write the index of tokens (R, 1) to one slot in each of the given rows, in place."""
        self.position[rows, slots] = tokens.position[:, 0]
        self.episode[rows, slots] = tokens.episode[:, 0]


def write_slots(buffer: Tensor, axis: int, slot: int | Tensor, x: Tensor) -> None:
    """Write x to consecutive slots of an axis of a buffer, in place.

    Args:
        buffer: tensor with an axis of slots.
        axis: the axis.
        slot: first slot; a tensor (1,) int64 for a traced step, which does not know the number.
        x: the values; shaped like the buffer, but for the number of slots.
    """
    count = x.shape[axis]
    if isinstance(slot, Tensor):
        slots = slot if count == 1 else slot + torch.arange(count, device=slot.device)
        buffer.index_copy_(axis, slots, x)
    else:
        buffer.narrow(axis, slot, count).copy_(x)


def gather_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Gather x (B, H, T, D) at slots (B, H, n, W) int64, for each head its own: (B, H, n, W, D)."""
    chosen = slots.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, chosen).unflatten(2, slots.shape[2:])


def is_tracing() -> bool:
    """Return whether torch.export traces this code, so that values of tensors are unknown."""
    return torch.compiler.is_exporting()


def is_recording() -> bool:
    """Return whether torch.fx records operations, which are repeated later with other values of tensors.

    Decisions may depend on known values (`TokenIndex.with_values`), unlike those while `is_tracing`.
    """
    return get_proxy_mode() is not None


def uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that reads values of tensors, and that ``torch.compile`` calls without tracing it."""
    compiling = torch.compiler.is_dynamo_compiling() and not is_tracing()
    return torch.compiler.disable(function) if compiling else function


def unrecorded(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function whose operations are computed, but not recorded: for decisions by known values.

    While operations are recorded, indices among the arguments are replaced by their `TokenIndex.on_cpu`, and
    other arguments must not contain tensors.
    """

    @wraps(function)
    def computed(*args: Any) -> Result:
        if not is_recording():
            return function(*args)
        known = [arg.on_cpu if isinstance(arg, TokenIndex) else arg for arg in args]
        with disable_proxy_modes_tracing():
            return function(*known)

    return computed


def is_readable(x: Tensor) -> bool:
    """Return whether the program may read values of a tensor to take a decision.

    It may not on an accelerator, for which it would wait, nor while operations are recorded.
    """
    return x.device.type == "cpu" and not is_recording()


def may_contain_true(mask: Tensor) -> bool:
    """Return whether a bool tensor contains True; while tracing or recording, return True.

    Code uses it to skip work that would change nothing. An exported or recorded program always does it.
    """
    return is_tracing() or is_recording() or bool(mask.any())


def selected_rows(mask: Tensor) -> Tensor:
    """Return the rows (N,) int64 where a mask (B,) is True; while tracing or recording, all rows.

    The caller must let rows where the mask is False change nothing, e.g. by writing to an unused slot.
    """
    if is_tracing() or is_recording():
        return torch.arange(len(mask), device=mask.device)
    return mask.nonzero()[:, 0]


def none_if_all_false(mask: Tensor) -> Tensor | None:
    """Return a bool mask; None if no value is True, so that callers can leave out what it would not change.

    The mask is always returned where it may not be read (`is_readable`), and while torch.export traces.
    """
    return mask if not is_readable(mask) or may_contain_true(mask) else None


@dataclass(frozen=True, eq=False)
class PositionBlocks:
    """N blocks of n consecutive positions in each row of a batch, each within one episode.

    Args:
        slots: (B, N, n) int64, slot of the token at each position; `MISSING` where there is none.
    """

    slots: Tensor

    @classmethod
    def of_episodes(cls, index: TokenIndex, length: int) -> "PositionBlocks":
        """Return positions 0 to length - 1 of each of ``index.episodes``; later positions must not occur."""
        episodes = index.episodes
        batch, count = episodes.shape
        number = (index.episode[..., None] == episodes[:, None]).int().argmax(-1)
        target = torch.where(index.episode == EMPTY, count * length, number * length + index.position)
        slots = episodes.new_full((batch, count * length + 1), MISSING)
        slots.scatter_(1, target, torch.arange(index.shape[1], device=episodes.device).expand(batch, -1))
        return cls(slots[:, :-1].unflatten(1, (count, length)))

    @classmethod
    def of_complete_blocks(cls, index: TokenIndex, size: int) -> "PositionBlocks":
        """Return the blocks from position c size to c size + size - 1 of an episode that have all tokens.

        Rows with fewer blocks than others are padded with blocks without tokens.
        """
        tokens = torch.where(index.episode == EMPTY, -1, (index.episode << 32) + index.position)
        tokens, order = tokens.sort(dim=1)
        first, last = tokens[:, : max(0, tokens.shape[1] - size + 1)], tokens[:, size - 1 :]
        complete = (first >= 0) & ((first & 0xFFFFFFFF) % size == 0) & (last == first + size - 1)
        count = int(complete.sum(1).max()) if complete.numel() else 0
        starts = (~complete).sort(dim=1, stable=True).indices[:, :count]
        inside = starts[..., None] + torch.arange(size, device=starts.device)
        slots = order.gather(1, inside.flatten(1)).view_as(inside)
        return cls(slots.masked_fill(~complete.gather(1, starts)[..., None], MISSING))

    @property
    def filled(self) -> Tensor:
        """Mask of positions that have a token, (B, N, n) bool."""
        return self.slots != MISSING

    def gather(self, x: Tensor) -> Tensor:
        """Arrange x (B, H, S, D) by position: (B, N, n, H, D), 0 where there is no token."""
        (batch, count, length), slots = self.slots.shape, self.slots.flatten(1)
        rows, start = x.transpose(1, 2), int(slots[0, 0])
        consecutive = torch.arange(start, start + slots.shape[1], device=slots.device)
        if start != MISSING and bool((slots == consecutive).all()):
            return rows[:, start : start + slots.shape[1]].unflatten(1, (count, length))
        offset = torch.arange(batch, device=slots.device)[:, None] * rows.shape[1]
        picked = F.embedding(slots.clamp(min=0) + offset, rows.flatten(0, 1).flatten(1))
        picked = picked.masked_fill((slots == MISSING)[..., None], 0.0)
        return picked.unflatten(1, (count, length)).unflatten(-1, rows.shape[2:])

    def fully_visible(self, allowed: Tensor) -> Tensor:
        """Return the blocks of which a query may attend to every token, for blocks without missing tokens.

        allowed (B, h, Tq, S) bool -> (B, h, Tq, N) bool.
        """
        shape = (*allowed.shape[:3], self.slots[0].numel())
        slots = self.slots.clamp(min=0).flatten(1)[:, None, None].expand(shape)
        visible = allowed.gather(-1, slots).unflatten(-1, self.slots.shape[1:]).all(-1)
        return visible & self.filled[:, None, None, :, 0]

    def spread(self, of_blocks: Tensor, tokens: int) -> Tensor:
        """Expand a mask of blocks (B, h, Tq, N) to the S tokens of a row; False for tokens in no block."""
        batch, count, length = self.slots.shape
        slots = torch.where(self.filled, self.slots, tokens).flatten(1)
        number = torch.arange(count, device=slots.device).repeat_interleave(length).expand(batch, -1)
        of_token = slots.new_full((batch, tokens + 1), count).scatter_(1, slots, number)[:, :-1]
        shape = (*of_blocks.shape[:3], tokens)
        return F.pad(of_blocks, (0, 1)).gather(-1, of_token[:, None, None].expand(shape))


def check_tokens(x: Tensor, index: TokenIndex, width: int) -> None:
    """Raise ValueError unless x is (B, T, C) for the width C and the index, with at least one token."""
    if x.dim() != 3 or x.shape[2] != width or x.shape[:2] != index.shape or not x.numel():
        raise ValueError(
            f"tokens must have shape (B, T, {width}) with at least one token, and the index must have shape "
            f"(B, T); got {tuple(x.shape)} and {tuple(index.shape)}"
        )
