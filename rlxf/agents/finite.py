"""Check that losses and gradients are finite before each optimizer step."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlxf.training import NumericalError

ADVICE = "this step did not change the weights; lower the learning rate, or scale down rewards and inputs"


def clip_finite(
    parts: Mapping[str, Tensor],
    model: nn.Module,
    clipped: Iterable[nn.Parameter],
    max_norm: float,
    beside: Iterable[nn.Parameter] = (),
) -> Tensor:
    """Clip the gradient norm like ``torch.nn.utils.clip_grad_norm_``, and check that all values are finite.

    The check reads the loss, the norm and one sum per unclipped gradient. The faulty tensor is searched only
    if one of them is not finite.

    Args:
        parts: scalars by name: "loss", which was differentiated, and its terms.
        model: the model, for the names of parameters.
        clipped: parameters whose gradient is clipped.
        max_norm: largest norm of the gradient.
        beside: parameters trained by the same loss whose gradient is checked but not clipped.

    Returns:
        The norm before clipping.

    Raises:
        NumericalError: if the loss or a gradient is NaN or infinite; gradients are not modified.
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
    """Add the update, and the tensors of the batch that are not finite, to the message of a NumericalError.

    Args:
        update: name of the update, e.g. "update 7".
        batch: a dataclass with tensors.

    Raises:
        NumericalError: in place of the original one.
    """
    try:
        yield
    except NumericalError as error:
        faulty = " and ".join(_not_finite(batch))
        inputs = f"; the batch holds values that are not finite in: {faulty}" if faulty else ""
        raise NumericalError(f"{update}: {error}{inputs}") from error


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _fault(parts: Mapping[str, Tensor], model: nn.Module) -> str:
    """Describe the value that is not finite: the loss and its terms, else a gradient, else the norm."""
    if not parts["loss"].isfinite():
        faulty = [f"{name} is {x.item()}" for name, x in parts.items() if not x.isfinite()]
        return f"the {', '.join(faulty)}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            value = parameter.grad[~parameter.grad.isfinite()][0].item()
            return f"the gradient of {name} contains {value}"
    return "the norm of the gradient exceeds the range of its dtype"


def _not_finite(batch: Any) -> Iterator[str]:
    """Yield the names of tensors with NaN or infinity in a dataclass and in nested dataclasses."""
    for name, value in vars(batch).items() if is_dataclass(batch) else ():
        if isinstance(value, Tensor) and not value.isfinite().all():
            yield name
        yield from _not_finite(value)
