"""An optimiser steps from finite numbers alone."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlxf.training import NumericalError

ADVICE = "the weights are those before this step: lower the learning rate, or make rewards and inputs smaller"


def clip_finite(
    parts: Mapping[str, Tensor],
    model: nn.Module,
    clipped: Iterable[nn.Parameter],
    max_norm: float,
    beside: Iterable[nn.Parameter] = (),
) -> Tensor:
    """Shorten a gradient to ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does; gives its norm before.

    What is finite is known from one number, the sum of the loss and the norm. Only where it is not, the place
    is looked for.

    Args:
        parts: "loss", whose gradient it is, and what the loss is made of; a number each.
        model: says what parameters are called.
        clipped: parameters whose gradient is shortened.
        beside: parameters that learn from the same loss, and whose gradient stays as it is.

    Raises:
        NumericalError: if the loss or a gradient is NaN or infinite; gradients are as they were.
    """
    weights = list(clipped)
    norm = get_total_norm(_gradients(weights))
    sums = [gradient.sum() for gradient in _gradients(beside)]
    if not torch.stack([parts["loss"].detach(), norm, *sums]).isfinite().all():
        raise NumericalError(f"{_fault(parts, model)}; {ADVICE}")
    clip_grads_with_norm_(weights, max_norm, norm)
    return norm


@contextmanager
def naming(update: str, batch: Any = ()) -> Iterator[None]:
    """Say in which update the numbers were not finite, and whether they came with what it learned from.

    Args:
        update: such as "update 7".
        batch: a dataclass with tensors.

    Raises:
        NumericalError: in place of one that was raised.
    """
    try:
        yield
    except NumericalError as error:
        guilty = " and ".join(_not_finite(batch))
        came_with = f"; not finite in what it learned from: {guilty}" if guilty else ""
        raise NumericalError(f"{update}: {error}{came_with}") from error


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _fault(parts: Mapping[str, Tensor], model: nn.Module) -> str:
    """What is not finite: the loss, with those of its parts; else the first gradient, else their norm."""
    if not parts["loss"].isfinite():
        guilty = [f"{name} is {x.item()}" for name, x in parts.items() if not x.isfinite()]
        return f"the {', '.join(guilty)}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            value = parameter.grad[~parameter.grad.isfinite()][0].item()
            return f"the gradient of {name} has a number that is {value}"
    return "the norm of the gradient is too large for its number format"


def _not_finite(batch: Any) -> Iterator[str]:
    """Names of tensors in a dataclass, and in those inside it."""
    for name, value in vars(batch).items() if is_dataclass(batch) else ():
        if isinstance(value, Tensor) and not value.isfinite().all():
            yield name
        yield from _not_finite(value)
