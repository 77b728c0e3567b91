"""Options of the transformer: its techniques by name, and the options of each chosen technique."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, get_type_hints

from tyro.conf import arg
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from rlxf.attention import ALiBi, Full, RoPE, Sinusoidal, TransformerSpec
from rlxf.attention.memory.base import Memory
from rlxf.attention.patterns.base import UNLIMITED, Pattern
from rlxf.attention.patterns.window import bounded
from rlxf.attention.techniques import JOINTS, TECHNIQUES
from rlxf.cli.questions import QUESTIONS
from rlxf.cli.technique_names import CHOOSABLE, FITTING, NONE, described, find, named, read

SIZES = {
    "width": "Model width: features per token. 64 suits small observations, 128 to 384 images.",
    "layers": "Number of layers. Each layer extends the reach of the memory by the memory length.",
    "heads": "Number of attention heads. It must divide the width.",
    "feed_forward": "Hidden features of the feed-forward sublayer. None means 4 times the width.",
    "feed_forward_chunk": "Tokens per chunk of the feed-forward sublayer, to save memory. None means all.",
    "norm": "Position of the layer norm: before each sublayer (pre) or after it (post).",
    "final_norm": "Apply a final layer norm to the output.",
    "activation": "Activation function of the feed-forward sublayer.",
    "dropout": "Dropout probability of attention weights and features. It must be 0 for PPO.",
}
"""Help texts of the fields of `TransformerSpec` that are not techniques. Agents fix the remaining fields:
they are causal and have no cross-attention."""


OTHER_POSITIONS = (RoPE(), Sinusoidal(), ALiBi(), None)
"""Position techniques to try, in this order, if the default is incompatible with the other choices."""


def core_registry(args: Sequence[str]) -> ConstructorRegistry:
    """Return the tyro registry that parses a `TransformerSpec`.

    The available options depend on the techniques named in ``args``: ``--core.residual.bias 1`` needs
    ``--core.residual gru-gate``. A JSON object contains its options:
    ``--core.pattern '{"name": "Window", "size": 9}'``.
    """
    registry = ConstructorRegistry()
    registry.struct_rule(partial(_spec_rule, named(args), _names_position(args)))
    return registry


def within(memory: Memory | None, pattern: Pattern) -> Pattern:
    """Return the pattern, bounded to the length of the memory if it reaches farther back.

    Tokens then see the same keys at every position of a segment.
    """
    if memory is None or memory.shows(pattern).reach <= memory.length:
        return pattern
    return bounded(pattern, memory.length)


def narrowed(memory: Memory | None, requested: Pattern) -> Pattern:
    """Return the requested pattern, bounded by `within`.

    Warns:
        UserWarning: if the pattern is bounded.
    """
    pattern = within(memory, requested)
    if pattern != requested:
        longer = (
            "a longer memory" if requested.reach >= UNLIMITED else f"--core.memory.length {requested.reach}"
        )
        warnings.warn(
            f"pattern {requested} reaches farther back than memory {memory}, so that single steps and "
            f"segments would differ; it is bounded to {pattern}. To keep its reach, use {longer}",
            stacklevel=2,
        )
    return pattern


def _names_position(args: Sequence[str]) -> bool:
    """Return whether the position or one of its options is given."""
    return any(re.match(r"--(no-)?core\.position([.=]|$)", word.lower()) for word in args)


def _spec_rule(
    names: dict[str, str], position_named: bool, info: StructTypeInfo
) -> StructConstructorSpec | None:
    if info.type is not TransformerSpec:
        return None
    types = get_type_hints(TransformerSpec)
    sizes = [StructFieldSpec(name, types[name], getattr(info.default, name), SIZES[name]) for name in SIZES]
    axes = [
        field for axis in TECHNIQUES for field in _axis(axis, getattr(info.default, axis), names.get(axis))
    ]
    join = TransformerSpec if position_named else with_some_position
    return StructConstructorSpec(partial(_build, join), (*sizes, *axes))


def _axis(axis: str, default: Any, name: str | None) -> Iterator[StructFieldSpec]:
    """Yield the field that chooses a technique, and the options of the named or the default technique."""
    default_name = FITTING if axis == "pattern" else NONE if default is None else type(default).__name__
    of = "One of the following, or several joined by & and |:" if axis in JOINTS else "One of"
    description = f"{QUESTIONS[axis].capitalize()} {of} {', '.join(CHOOSABLE[axis])}."
    yield StructFieldSpec(axis, _name_type(axis), default_name, description)
    technique = TECHNIQUES[axis].get(name or default_name)
    if technique is not None and fields(technique):
        options = default if type(default) is technique else technique()
        yield StructFieldSpec(_options(axis), _within(axis, technique), options)


def _name_type(axis: str) -> Any:
    """Return the type of an option that takes the name or the JSON description of a technique."""
    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda words: (read if described(axis, words[0]) else find)(axis, words[0]),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    )
    return Annotated[str, spec]


def _within(axis: str, technique: type) -> Any:
    """Return the technique annotated so that its options begin with ``--core.AXIS.``"""
    return Annotated[technique, arg(name=axis)]


def _options(axis: str) -> str:
    return f"{axis}_options"


def with_some_position(**choices: Any) -> TransformerSpec:
    """Build the spec of these choices, with another position if the default is incompatible.

    Raises:
        ValueError: if no position is compatible; the message is that of the default position.

    Warns:
        UserWarning: if a position other than the default is chosen.
    """
    try:
        return TransformerSpec(**choices)
    except ValueError as refusal:
        for position in OTHER_POSITIONS:
            with suppress(ValueError):
                spec = TransformerSpec(**choices | {"position": position})
                warnings.warn(
                    f"the default position is incompatible with the other choices: {refusal}; {position} is "
                    f"used instead. To choose another one, pass --core.position",
                    stacklevel=2,
                )
                return spec
        raise


def _build(join: Callable[..., TransformerSpec], **values: Any) -> TransformerSpec:
    chosen = {axis: _technique(axis, values) for axis in TECHNIQUES if values[axis] != FITTING}
    sizes = {name: values[name] for name in SIZES}
    requested = chosen.pop("pattern", None)
    memory = chosen["memory"]
    pattern = within(memory, Full()) if requested is None else narrowed(memory, requested)
    return join(**sizes, pattern=pattern, **chosen)


def _technique(axis: str, values: dict[str, Any]) -> Any:
    if values[axis] == NONE:
        return None
    if not isinstance(values[axis], str):
        return values[axis]
    return values.get(_options(axis)) or TECHNIQUES[axis][values[axis]]()
