"""The options of the transformer: its techniques by name, with the options of those that are chosen."""

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
    "width": "Features of a token. 64 for small observations, 128 to 384 for images and rich tasks.",
    "layers": "Number of layers. With each, what is remembered reaches as far back again.",
    "heads": "Attention heads; must divide the width.",
    "feed_forward": "Features inside the feed-forward sublayer; None is 4 times the width.",
    "feed_forward_chunk": "Tokens thought through at a time, to save memory in long segments; None for all.",
    "norm": "Layer norm before each sublayer (pre) or behind it (post).",
    "final_norm": "One more layer norm at the top.",
    "activation": "Of the feed-forward sublayer.",
    "dropout": "Probability of dropping a weight or a feature in training. PPO takes 0 only.",
}
"""What is said of each choice that is no technique. Agents are causal and look at no other context."""


OTHER_POSITIONS = (RoPE(), Sinusoidal(), ALiBi(), None)
"""Positions to choose, in this order, if the default one is incompatible with the other choices."""


def core_registry(args: Sequence[str]) -> ConstructorRegistry:
    """How tyro reads a `TransformerSpec`, with the options of the techniques that ``args`` name.

    ``--core.residual gru-gate --core.residual.bias 1``: which options there are depends on the name. A JSON
    object, ``--core.pattern '{"name": "Window", "size": 9}'``, has its options inside.
    """
    registry = ConstructorRegistry()
    registry.struct_rule(partial(_spec_rule, named(args), _names_position(args)))
    return registry


def within(memory: Memory | None, pattern: Pattern) -> Pattern:
    """What the pattern shows of a token itself and of what memory holds, wherever in its segment that is."""
    if memory is None or memory.shows(pattern).reach <= memory.length:
        return pattern
    return bounded(pattern, memory.length)


def narrowed(memory: Memory | None, asked: Pattern) -> Pattern:
    """`within`.

    Warns:
        UserWarning: if that is less than was asked for.
    """
    pattern = within(memory, asked)
    if pattern != asked:
        farther = "a longer memory" if asked.reach >= UNLIMITED else f"--core.memory.length {asked.reach}"
        warnings.warn(
            f"pattern {asked} sees farther back than memory {memory} remembers, so steps and segments would "
            f"differ; it is cut to {pattern}. To see farther, give {farther}",
            stacklevel=2,
        )
    return pattern


def _names_position(args: Sequence[str]) -> bool:
    """True if the position or one of its options is given."""
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
    """The choice of a technique, and the options of the one that is named, or else of the default."""
    usual = FITTING if axis == "pattern" else NONE if default is None else type(default).__name__
    of = "Of these, or several joined by & and |:" if axis in JOINTS else "One of"
    told = f"{QUESTIONS[axis].capitalize()} {of} {', '.join(CHOOSABLE[axis])}."
    yield StructFieldSpec(axis, _name_type(axis), usual, told)
    technique = TECHNIQUES[axis].get(name or usual)
    if technique is not None and fields(technique):
        options = default if type(default) is technique else technique()
        yield StructFieldSpec(_options(axis), _within(axis, technique), options)


def _name_type(axis: str) -> Any:
    """A str that names a technique of the axis, or a technique that was described."""
    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda words: (read if described(axis, words[0]) else find)(axis, words[0]),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    )
    return Annotated[str, spec]


def _within(axis: str, technique: type) -> Any:
    """The technique, whose options begin with ``--core.AXIS.``"""
    return Annotated[technique, arg(name=axis)]


def _options(axis: str) -> str:
    return f"{axis}_options"


def with_some_position(**choices: Any) -> TransformerSpec:
    """Build the spec of these choices, with another position if the default one is incompatible.

    Raises:
        ValueError: if no position is compatible; with the message for the default one.

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
                    f"the default position does not go with the other choices: {refusal}; it is {position} "
                    f"instead. To choose another one, give --core.position",
                    stacklevel=2,
                )
                return spec
        raise


def _build(join: Callable[..., TransformerSpec], **values: Any) -> TransformerSpec:
    chosen = {axis: _technique(axis, values) for axis in TECHNIQUES if values[axis] != FITTING}
    sizes = {name: values[name] for name in SIZES}
    asked = chosen.pop("pattern", None)
    memory = chosen["memory"]
    pattern = within(memory, Full()) if asked is None else narrowed(memory, asked)
    return join(**sizes, pattern=pattern, **chosen)


def _technique(axis: str, values: dict[str, Any]) -> Any:
    if values[axis] == NONE:
        return None
    if not isinstance(values[axis], str):
        return values[axis]
    return values.get(_options(axis)) or TECHNIQUES[axis][values[axis]]()
