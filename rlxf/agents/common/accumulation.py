"""Losses of a batch: as one program, operation by operation, or in micro-batches, which saves memory."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlxf.training.process_group import ProcessGroup
from rlxf.utils.checks import check_int

Losses = dict[str, Tensor]
"""Scalar losses and other means over a batch, by name."""
GradientSetter = Callable[[], None]
"""Sets the gradients of all parameters."""
Batch = TypeVar("Batch")


def losses_of_batch(
    losses: Callable[[Any], Losses],
    batch: Any,
    count: Callable[[Any], Tensor],
    steps: int,
    ranks: ProcessGroup,
    program: Callable[[Any], tuple[Losses, GradientSetter] | None] | None,
) -> tuple[Losses, GradientSetter | None]:
    """Return the losses of a batch, and a function that sets their gradients.

    The function is None if the "loss" has to be differentiated. With micro-batches, gradients must be cleared
    before, see `accumulate_gradients`.

    Args:
        losses: returns the means over a batch by name, including "loss", which has a gradient.
        batch: the batch; its method ``split`` returns micro-batches.
        count: returns the number of real steps of a micro-batch, a scalar.
        steps: number of micro-batches.
        ranks: process group.
        program: computes losses and gradients as one program, or returns None if it cannot. It is neither
            used for micro-batches nor with several processes. None to run the operations of ``losses`` one by
            one.
    """
    if steps > 1:
        return accumulate_gradients(losses, batch.split(steps), count, ranks), None
    computed = program(batch) if program is not None and ranks.world_size == 1 else None
    return computed or (losses(batch), None)


def accumulate_gradients(
    losses: Callable[[Batch], Losses],
    micro_batches: Sequence[Batch],
    count: Callable[[Batch], Tensor],
    ranks: ProcessGroup,
) -> Losses:
    r"""Return the means of losses over a batch; add the gradients of all micro-batches but the last.

    Losses are means over real steps. If micro-batch i has n_i of the N real steps and the mean L_i, the mean
    over the batch is ``L = sum_i (n_i / N) L_i``. Each micro-batch is differentiated before the next one is
    computed, so the activations of one micro-batch at a time are in memory. The gradient of the returned
    "loss" is that of the last term: its ``backward`` completes the gradient of L. Gradients must be cleared
    before. The gradients of this process are weighted by its fraction of the real steps of all processes.

    Dropout, and the sampled entropy of Box actions in `MaximumEntropy`, draw other random numbers than for
    the whole batch. A loss that is not a mean over real steps, e.g. a quotient of means, cannot be divided.

    Args:
        losses: returns the means over a batch by name, including "loss", which has a gradient.
        micro_batches: parts of the batch.
        count: returns the number n_i of real steps of a micro-batch, a scalar.
        ranks: process group; this method contains one collective.
    """
    counts = torch.stack([count(batch) for batch in micro_batches])
    fraction = ranks.weight_fraction(counts.sum())
    weights = counts / counts.sum().clamp(min=1)
    sums: Losses = {}
    for number, batch in enumerate(micro_batches):
        parts = losses(batch)
        weight = weights[number].to(parts["loss"].dtype)
        sums = {name: sums.get(name, 0) + weight * x.detach() for name, x in parts.items()}
        term = weight * parts["loss"]
        if number < len(micro_batches) - 1:
            (fraction * term).backward()
    return sums | {"loss": term + (sums["loss"] - term).detach()}


def check_accumulation_steps(steps: int, rows: int, kind: str) -> None:
    """Check ``gradient_accumulation_steps``.

    Args:
        steps: number of micro-batches.
        rows: number of rows of a batch.
        kind: description of the rows, for the message.

    Raises:
        TypeError: if the number is not an integer.
        ValueError: if it is less than 1 or more than the rows of a batch.
    """
    check_int("gradient_accumulation_steps", steps)
    if steps > rows:
        raise ValueError(
            f"gradient_accumulation_steps must be at most {rows}, the {kind} of a batch, got {steps}"
        )
