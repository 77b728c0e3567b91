"""Weights of one agent as the beginning of another."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlxf.attention import Transformer, TransformerSpec
from rlxf.training import CheckpointError
from rlxf.utils.differences import first_difference

NO_WEIGHTS = ("causal", "memory", "pattern", "dropout", "feed_forward_chunk")
"""Choices that two cores may differ in: as a rule no weight depends on them. Where one does, it is named."""


def hand_over(source: Any, target: nn.Module, parts: Sequence[str] = ("transformer",)) -> None:
    """Give a model the weights of an agent's, or of a pre-training's.

    The specs of their transformers must be equal but for `NO_WEIGHTS`: so weights of a core that looks both
    ways fit one that looks back, with memory or without. Weights that the memory alone has are given where
    both have the same ones; else those of the model stay.

    Args:
        source: who has them.
        target: the model of who gets them.
        parts: names of the modules whose weights are given, in both models.

    Raises:
        TypeError: if ``source`` has no transformer.
        ValueError: if the weights do not fit; the first difference is named, and nothing is changed.
    """
    model = getattr(source, "policy", None)
    given, own = (getattr(each, "transformer", None) for each in (model, target))
    if not isinstance(given, Transformer):
        raise TypeError(
            f"weights come from a MaskedPretraining, a DecisionTransformer or a GTrXLPPO, got {source!r}"
        )
    assert isinstance(own, Transformer)
    check_alike(given.spec, own.spec)
    states = {part: getattr(model, part).state_dict() for part in parts}
    states["transformer"] = with_memory(given, own)
    for part, state in states.items():
        check_tensors(part, state, getattr(target, part).state_dict())
    for part, state in states.items():
        getattr(target, part).load_state_dict(state)


def with_memory(given: Transformer, own: Transformer) -> dict[str, Tensor]:
    """Weights of a transformer by name; those of its memory are another's where the two differ in shape."""
    theirs, ours = of_memory(given), of_memory(own)
    if {name: x.shape for name, x in theirs.items()} == {name: x.shape for name, x in ours.items()}:
        return given.state_dict()
    return {name: x for name, x in given.state_dict().items() if name not in theirs} | ours


def of_memory(transformer: Transformer) -> dict[str, Tensor]:
    """The weights that a transformer would not have without memory, by name."""
    with torch.device("meta"):  # names alone are asked for
        without = replace(transformer.spec, memory=None).build().state_dict()
    return {name: x for name, x in transformer.state_dict().items() if name not in without}


def check_alike(given: TransformerSpec, own: TransformerSpec) -> None:
    """Raise ValueError unless the specs are equal but for `NO_WEIGHTS`; the first difference is named."""
    if found := core_difference(given, own):
        name, theirs, ours = found
        raise ValueError(
            f"the weights do not fit: they are of a core with {name}={theirs}, the agent's has "
            f"{name}={ours}; build both with the same core"
        )


def core_difference(given: TransformerSpec, own: TransformerSpec) -> tuple[str, Any, Any] | None:
    """Return the first option but `NO_WEIGHTS` that differs in two specs, and its values; None if equal."""
    theirs, ours = (spec.to_dict() | {"feed_forward": spec.inner_width} for spec in (given, own))
    found = (first_difference(n, theirs[n], ours[n]) for n in theirs if n not in NO_WEIGHTS)
    return next((difference for difference in found if difference), None)


@contextmanager
def naming_core(stored: TransformerSpec, given: TransformerSpec | None) -> Iterator[None]:
    """While weights are loaded, name the option in which a core that was passed differs from the file's.

    Args:
        stored: the core in the file.
        given: the one that was passed when loading; None if none was.

    Raises:
        CheckpointError: instead of an error that only reports that the weights do not fit.
    """
    try:
        yield
    except CheckpointError as error:
        found = None if given is None else core_difference(stored, given)
        if found is None:
            raise
        name, theirs, ours = found
        raise CheckpointError(
            f"the checkpoint's weights do not fit the core that was passed: the file's has {name}={theirs}, "
            f"the one passed {name}={ours}; load it without core, or pass the file's"
        ) from error


def check_tensors(part: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless both have the same names and shapes; the first difference is named.

    Args:
        part: whose tensors they are, for the message.
        given: tensors by name.
        own: those that they are to take the place of.
    """
    for name in [*own, *(name for name in given if name not in own)]:
        theirs, ours = (tuple(of[name].shape) if name in of else "none" for of in (given, own))
        if theirs != ours:
            raise ValueError(
                f"the weights do not fit: {name} of {part} is {theirs}, the agent's is {ours}; build both "
                f"with the same settings"
            )
