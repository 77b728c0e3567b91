"""Caches as named tensors: an acting step becomes a function of tensors that torch.export can trace."""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.cache import KVCache
from rlxf.attention.token_index import TokenIndex

CONSTANTS = ("table", "tables", "context", "core", "plan")
"""Fields of caches and states that no step needs from an earlier one, or that never change."""


def named_tensors(value: Any, path: str = "", skipped: Collection[str] = CONSTANTS) -> dict[str, Tensor]:
    """Return the tensors of a cache, or of a state that contains one; by default those that steps change.

    Args:
        value: a dataclass, possibly with nested dataclasses, tuples, lists and dicts.
        path: prefix of the names.
        skipped: names of fields that are left out.

    Returns:
        Path of fields, e.g. ``cache.layers.0.keys``, -> tensor.
    """
    if isinstance(value, Tensor):
        return {path: value}
    parts = ((_join(path, name), part) for name, part in _parts(value, skipped).items())
    return {
        name: tensor for where, part in parts for name, tensor in named_tensors(part, where, skipped).items()
    }


def with_tensors(
    value: Any, tensors: Mapping[str, Tensor], path: str = "", skipped: Collection[str] = CONSTANTS
) -> Any:
    """Return a copy of a cache or state that holds the given tensors; steps change them in place.

    Args:
        value: a cache or state like the one whose `named_tensors` are given; it is not modified.
        tensors: its tensors by name.
        path: prefix of the names.
        skipped: names of fields that keep their values.
    """
    if isinstance(value, Tensor):
        return tensors[path]
    if not named_tensors(value, path, skipped):
        return value
    new = {
        name: with_tensors(part, tensors, _join(path, name), skipped)
        for name, part in _parts(value, skipped).items()
    }
    if is_dataclass(value):
        return replace(value, **new)  # type: ignore[type-var]
    if isinstance(value, Mapping):
        return new
    return value._replace(**new) if hasattr(value, "_replace") else type(value)(new.values())


def free_last_slot(cache: KVCache) -> KVCache:
    """Return a copy whose oldest token is dropped, and whose next token takes the last slot.

    A ring buffer writes to the slot after that of the last step, a number that a traced step cannot know.
    Here the tokens move by one slot instead, so that every step writes to the same one. Outputs are equal,
    up to the order in which floating-point numbers are summed.
    """
    first = cache.fixed_slots
    layers = [
        replace(layer, keys=_shift(layer.keys, first, 2), values=_shift(layer.values, first, 2))
        if isinstance(layer, LayerCache)
        else layer
        for layer in cache.layers
    ]
    index = TokenIndex(_shift(cache.index.position, first, 1), _shift(cache.index.episode, first, 1))
    return replace(cache, layers=layers, index=index, slot=cache.index.shape[1] - first - 1)


def without_empty_keys(cache: KVCache) -> KVCache:
    """Return a copy with keys and values of 0 in empty slots, which no token attends to."""
    filled = (cache.index.episode >= 0)[:, None, :, None]
    layers = [
        replace(layer, keys=layer.keys * filled, values=layer.values * filled)
        if isinstance(layer, LayerCache)
        else layer
        for layer in cache.layers
    ]
    return replace(cache, layers=layers)


def _shift(x: Tensor, first: int, axis: int) -> Tensor:
    """Drop slot ``first`` of an axis and append a slot of zeros."""
    fixed, rest = x.narrow(axis, 0, first), x.narrow(axis, first + 1, x.shape[axis] - first - 1)
    return torch.cat([fixed, rest, torch.zeros_like(x.narrow(axis, 0, 1))], dim=axis)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors by name."""
    return {name: x.clone() for name, x in tensors.items()}


def _parts(value: Any, skipped: Collection[str]) -> dict[str, Any]:
    """Return the parts of a value that may contain tensors which change, by name."""
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.name not in skipped]
        return {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "_asdict"):  # a NamedTuple
        return dict(value._asdict())
    return {str(number): part for number, part in enumerate(value)} if isinstance(value, list | tuple) else {}
