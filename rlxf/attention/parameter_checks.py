"""Search for parameters that are not finite, or from which a recurrent state without limit could follow."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlxf.attention.recurrent.base import RecurrentMixer


def parameter_fault(transformer: Any, parameters: Mapping[str, Tensor] | None = None) -> str | None:
    """Describe the first parameter that is NaN, infinite, or more than the limit of its mixer.

    Args:
        transformer: a `Transformer`.
        parameters: values by the names of its ``state_dict``, of which some may be missing; None for its own.

    Returns:
        The parameter, its layer, the value and the allowed values; None if all parameters are valid.
    """
    own = {name: x for name, x in transformer.named_parameters() if not x.is_meta}
    values = {name: x for name, x in (own if parameters is None else parameters).items() if name in own}
    limits = {name: limit for name, limit in _limits(transformer) if name in values}
    if not _any_fault(values, limits):
        return None
    for name, x in values.items():
        most = limits.get(name, math.inf)
        faulty = ~x.isfinite() | (x > most)
        if faulty.any():
            return _describe(transformer, name, x[faulty][0].item(), most)
    return None


@torch.no_grad()
def _any_fault(values: Mapping[str, Tensor], limits: Mapping[str, float]) -> bool:
    """Return whether a value is at fault, with one transfer from the device."""
    filled = {name: x.aminmax() for name, x in values.items() if x.numel()}
    if not filled:
        return False
    least, most = (torch.stack([pair[end].double() for pair in filled.values()]) for end in range(2))
    allowed = most.new_tensor([limits.get(name, math.inf) for name in filled])
    return not bool((least.isfinite() & most.isfinite() & (most <= allowed)).all())


def _limits(transformer: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the full name and the limit of each parameter that a mixer limits."""
    for prefix, module in transformer.named_modules():
        if isinstance(module, RecurrentMixer):
            yield from ((f"{prefix}.{name}", limit) for name, limit in module.limits.items())


def _describe(transformer: Any, name: str, value: float, most: float) -> str:
    owner, inner = "the transformer", name
    for number in range(len(transformer.blocks)):
        if name.startswith(prefix := f"blocks.{number}."):
            mixer = f", {transformer.spec.recurrence}," if transformer.spec.is_recurrent(number) else ""
            owner, inner = f"layer {number + 1}{mixer}", name.removeprefix(prefix)
    allowed = (
        "it must be finite"
        if not math.isfinite(value)
        else f"more than {most:.4g} can make the state exceed float32 within 10,000 steps"
    )
    return f"the parameter {inner!r} of {owner} contains {value:.6g}; {allowed}"
