"""Checks that weights, losses, gradients and network outputs are finite."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlxf.attention.parameter_checks import parameter_fault
from rlxf.attention.recurrent.base import RecurrentState
from rlxf.attention.token_index import EMPTY, is_readable, is_tracing
from rlxf.training import NumericalError

ADVICE = "this step did not change the weights; lower the learning rate, or scale down rewards and inputs"


def clip_grad_norm_checked(
    parts: Mapping[str, Tensor],
    model: nn.Module,
    clipped: Iterable[nn.Parameter],
    max_norm: float,
    unclipped: Iterable[nn.Parameter] = (),
) -> Tensor:
    """Clip the gradient norm like ``torch.nn.utils.clip_grad_norm_``, and check that all values are finite.

    The check reads the loss, the norm and one sum per unclipped gradient. The faulty tensor is searched only
    if one of them is not finite.

    Args:
        parts: scalars by name: "loss", which was differentiated, and its terms.
        model: the model, for the names of parameters.
        clipped: parameters whose gradient is clipped.
        max_norm: maximum gradient norm; larger gradients are clipped.
        unclipped: parameters trained by the same loss whose gradient is checked but not clipped.

    Returns:
        The norm before clipping.

    Raises:
        NumericalError: if the loss or a gradient is NaN or infinite; gradients are not modified.
    """
    weights = list(clipped)
    norm = get_total_norm(_gradients(weights))
    sums = [gradient.sum() for gradient in _gradients(unclipped)]
    if not torch.stack([parts["loss"].detach(), norm, *sums]).isfinite().all():
        raise NumericalError(f"{_fault(parts, model)}; {ADVICE}")
    clip_grads_with_norm_(weights, max_norm, norm)
    return norm


@contextmanager
def numerical_error_context(update: str, batch: Any = ()) -> Iterator[None]:
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


def check_parameters(policy: nn.Module) -> None:
    """Raise NumericalError if a parameter is not finite, or could make a recurrent state overflow.

    Args:
        policy: network; if it has a `Transformer`, this is named ``transformer``.
    """
    transformer: Any = getattr(policy, "transformer", None)
    fault = None if transformer is None else parameter_fault(transformer)
    if (fault := fault or _other_parameter_fault(policy)) is not None:
        raise NumericalError(f"{fault}; load a checkpoint of an earlier update, or build a new agent")


def _other_parameter_fault(policy: nn.Module) -> str | None:
    """Describe the first parameter outside of the transformer that is NaN or infinite."""
    others = {name: x for name, x in policy.named_parameters() if not name.startswith("transformer.")}
    if not others or torch.stack([x.isfinite().all() for x in others.values()]).all():
        return None
    for name, x in others.items():
        if not x.isfinite().all():
            return f"the parameter {name!r} contains {x[~x.isfinite()][0].item()}; it must be finite"
    return None


LARGEST_STATE = 1e18
"""Value of a recurrent state above which a layer can have outputs whose squares exceed float32."""
LARGEST_TOKEN = 1e18
"""Absolute value of a token above which sums of squares, as in a normalization, can exceed float32."""


def check_outputs(
    policy: nn.Module,
    outputs: Tensor,
    episode: Tensor,
    tokens: Tensor,
    before: RecurrentState | None,
    after: Callable[[], RecurrentState | None],
) -> None:
    """Raise NumericalError if outputs of a transformer are not finite; the message names the cause.

    Outputs with gradient are read only if `is_readable` allows it. Otherwise they make
    the loss NaN or infinite, which the optimizer step checks, and `naming_output_faults` finds the cause.

    Args:
        policy: network with a `Transformer` named ``transformer``.
        outputs: outputs of a step or segment, (..., C).
        episode: episode of each output, (...); outputs of empty slots are ignored.
        tokens: inputs of the step or segment.
        before: states of recurrent layers and memory before it.
        after: returns the states after it; called only if an output is not finite.
    """
    if is_tracing() or (outputs.requires_grad and not is_readable(outputs)):
        return
    if outputs.sum().isfinite() or outputs[episode != EMPTY].isfinite().all():
        return
    raise_output_fault(policy, tokens, before, after)


@contextmanager
def naming_output_faults(repeat: Callable[[], Any]) -> Iterator[None]:
    """Repeat a pass without gradient if the body raises `NumericalError`; `check_outputs` names the cause.

    Args:
        repeat: computes the loss that the body differentiates.
    """
    try:
        yield
    except NumericalError:
        with torch.no_grad():
            repeat()
        raise


@dataclass(frozen=True, eq=False)
class OutputCheck:
    """Check of the outputs of an acting step, which may be read after the actions.

    Args:
        finite: scalar bool, whether all outputs are finite; None if they were checked at once.
        raise_fault: raises a `NumericalError` that names the cause.
    """

    finite: Tensor | None
    raise_fault: Callable[[], None]

    def fetch(self) -> "OutputCheck":
        """Start to copy the result to the CPU; read it after a later copy, such as that of the actions."""
        if self.finite is None:
            return self
        return replace(self, finite=self.finite.to("cpu", non_blocking=True))

    def __call__(self) -> None:
        """Raise NumericalError if an output was not finite; while the step is traced, do nothing."""
        if self.finite is not None and not is_tracing() and not self.finite:
            self.raise_fault()


def check_outputs_later(
    policy: nn.Module,
    outputs: Tensor,
    episode: Tensor,
    tokens: Tensor,
    before: RecurrentState | None,
    after: Callable[[], RecurrentState | None],
) -> tuple[Tensor, OutputCheck]:
    """Return outputs (E, C) and their check; arguments as in `check_outputs`.

    Rows that are not finite are 0 on an accelerator, where sampling from NaN would end the process. On the
    CPU, the check is made at once.

    Raises:
        NumericalError: on the CPU, if an output is not finite.
    """
    fault = partial(raise_output_fault, policy, tokens, before, after)
    if outputs.device.type == "cpu":
        check_outputs(policy, outputs, episode, tokens, before, after)
        return outputs, OutputCheck(None, fault)
    finite = outputs.isfinite().all(dim=-1) | (episode == EMPTY)
    outputs = outputs.masked_fill(~finite[:, None], 0.0)
    return outputs, OutputCheck(finite.all(), fault)


def raise_output_fault(
    policy: nn.Module,
    tokens: Tensor,
    before: RecurrentState | None,
    after: Callable[[], RecurrentState | None],
) -> None:
    """Raise NumericalError for outputs that are not finite; arguments as in `check_outputs`."""
    transformer: Any = policy.transformer
    check_recurrent_state(transformer, before)
    check_parameters(policy)
    faulty = ~tokens.isfinite().flatten(1).all(dim=1)
    if faulty.any():
        raise NumericalError(
            f"the tokens of the transformer are not finite in row {int(faulty.nonzero()[0])} of the batch: "
            f"observations, actions or returns, now or in the state, are NaN or exceed the range of float32; "
            f"normalize them, or scale them down"
        )
    largest = float(tokens.abs().max())
    if largest > LARGEST_TOKEN:
        raise NumericalError(
            f"the outputs of the transformer are not finite, because its tokens reach {largest:.3g}: "
            f"observations, actions or returns are too large; normalize them, for example observations by a "
            f"VecNormalize around the environments, or scale them down"
        )
    new = after()
    fault = transformer.recurrent_fault(new) or transformer.recurrent_fault(new, LARGEST_STATE)
    if fault is not None:
        raise NumericalError(
            f"{fault} after the step; the weights are unchanged: lower the learning rate, or use a "
            f"recurrence whose decay is at most 1"
        )
    raise NumericalError(
        "the outputs of the transformer are not finite, although its parameters, tokens and recurrent states "
        "are: the memory before the step contains NaN, or a layer exceeds the range of its dtype; start new "
        "episodes, in predict with state=None, or lower the learning rate"
    )


def check_recurrent_state(transformer: Any, state: RecurrentState | None) -> None:
    """Raise NumericalError if a state before a step is not finite; the message names layer and row.

    Args:
        transformer: a `Transformer`.
        state: states of its recurrent layers and memory; None without any.
    """
    if (fault := transformer.recurrent_fault(state)) is not None:
        raise NumericalError(f"{fault} before the step; start new episodes, in predict with state=None")
