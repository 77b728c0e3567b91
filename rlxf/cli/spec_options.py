"""Options of the transformer core on the command line, by the names of techniques."""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import fields
from functools import partial, reduce
from operator import and_, or_
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
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.registry import HEADS, OPTIONAL, TECHNIQUES, technique_from_json
from rlxf.cli.options import default_hint, given_options, without_markup
from rlxf.utils.names import choose_one_of, plain_name
from rlxf.utils.warnings import warn_user

NONE, FIT_MEMORY = "None", "fitting"
OPTIONS_OF = "{}_options"
"""Name of the field with the options of the technique of an axis."""

STEM_LETTERS = 4
"""Letters that two words of one stem have in common, e.g. "rotary" and "rotate"."""
OPERATORS = {"|": or_, "&": and_}
"""Operators that join patterns, in the order of increasing precedence, as in Python."""
JOINABLE = ("pattern",)
"""Axes whose techniques can be joined by operators."""


def choosable(axis: str) -> list[str]:
    """Return the names that can be chosen for an axis, or for output heads with the axis "head".

    The pattern ``fitting`` is the largest one that fits the memory: a token attends to itself and to as many
    earlier tokens as the memory holds.
    """
    if axis == "head":
        return [*HEADS]
    return [*[FIT_MEMORY] * (axis == "pattern"), *[NONE] * (axis in OPTIONAL), *TECHNIQUES[axis]]


def match_name(axis: str, text: str) -> str:
    """Return the name of a technique; case, dashes and underscores in ``text`` are ignored.

    Raises:
        ValueError: if the technique does not exist.
    """
    name = _match(axis, text)
    if name is None:
        hint = choose_one_of(text, choosable(axis), _described_name(axis, text))
        raise ValueError(f"unknown {axis} {text!r}{hint}")
    return name


def _described_name(axis: str, text: str) -> str | None:
    """Return the first technique whose summary has a word of the same stem."""
    if len(text) < STEM_LETTERS:
        return None
    techniques = HEADS if axis == "head" else TECHNIQUES[axis]
    stem = re.compile(rf"\b{re.escape(text[:STEM_LETTERS])}", re.IGNORECASE)
    return next((name for name, technique in techniques.items() if stem.search(summary(technique))), None)


def summary(technique: type) -> str:
    """Return the first paragraph of a technique's docstring in one line."""
    return " ".join((technique.__doc__ or "").split("\n\n")[0].split())


def is_description(axis: str, text: str) -> bool:
    """Return whether the text is a JSON object or a combination of patterns instead of a name."""
    return text.lstrip().startswith("{") or _operator(axis, text) is not None


def parse_technique(axis: str, text: str) -> Any:
    """Parse a technique: a name, a JSON object with options, or a combination of patterns.

    Patterns are combined as in Python, ``strided & window | dilated``, where each is a name or a JSON object.

    Raises:
        TypeError, ValueError: if a technique or option does not exist, or the text is not valid JSON.
    """
    if operator := _operator(axis, text):
        return reduce(
            OPERATORS[operator], [parse_technique(axis, part.strip()) for part in text.split(operator)]
        )
    if not text.lstrip().startswith("{"):
        return technique_from_json(axis, {"name": match_name(axis, text)})
    try:
        return technique_from_json(axis, json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{text} is not valid JSON: {error}") from error


def given_techniques(args: Sequence[str]) -> dict[str, str]:
    """Return axis -> name or description given with ``--core.AXIS``, without names that do not exist."""
    given = given_options(args, *(f"core.{axis}" for axis in TECHNIQUES))
    texts = {option.removeprefix("core."): text for option, text in given.items()}
    names = {axis: text if is_description(axis, text) else _match(axis, text) for axis, text in texts.items()}
    return {axis: name for axis, name in names.items() if name}


def _operator(axis: str, text: str) -> str | None:
    """Return the operator with the lowest precedence in the text; None without operators.

    No option of a pattern is a text that contains an operator.
    """
    return next((sign for sign in OPERATORS if sign in text), None) if axis in JOINABLE else None


def _match(axis: str, text: str) -> str | None:
    plain = plain_name(text)
    return next((name for name in choosable(axis) if plain_name(name) == plain), None)


QUESTIONS = {
    "position": "how are token positions encoded?",
    "pattern": "which keys may a query attend to?",
    "kernel": "how is attention computed?",
    "memory": "what is kept of previous segments?",
    "recurrence": "which recurrent mixer replaces self-attention?",
    "residual": "how is a sublayer's output added to the residual stream?",
    "depth": "how many layers process a token?",
}
"""Axis of `TransformerSpec` -> question."""
NOTES = {
    "position": "If this option is not given and the default is incompatible with the other choices, a "
    "compatible position is used instead, with a warning.",
    "pattern": f"The pattern named {FIT_MEMORY} lets a token attend to itself and to as many earlier tokens "
    "as the memory holds; without a memory it is Full.",
    "recurrence": "All layers are recurrent, except those of --core.attention-layers. If all "
    "layers are recurrent, position, pattern and memory have no effect and are left out.",
}
"""Axis -> explanation of its default."""
SCALAR_OPTIONS = {
    "width": "Model width: features per token. 64 suits small observations, and 128 to 384 suit images.",
    "layers": "Number of layers. Each layer extends the reach of the memory by the memory length.",
    "heads": "Number of attention heads. It must divide the width.",
    "kv_heads": "Heads of keys and values that the attention heads share: fewer make caches smaller. It must "
    "divide the number of heads. None means as many as attention heads; 1 means multi-query attention.",
    "qk_norm": "Normalization of queries and keys: rms, rms_all_heads or l2. None means no normalization.",
    "attention_gate": "Gate of the outputs of attention: elementwise or headwise. None means no gate.",
    "feed_forward": "Hidden features of the feed-forward sublayer. None means 4 times the width, or "
    "8/3 times with --core.activation swiglu.",
    "feed_forward_chunk": "Tokens per chunk of the feed-forward sublayer, to save memory. None means all "
    "tokens at once.",
    "attention_layers": "Layers, counted from 0, that keep self-attention in a core with --core.recurrence. "
    "By default none.",
    "norm": "Position of the norm: before each sublayer (pre) or after it (post).",
    "norm_type": "Normalization: layer_norm, or rms_norm, which does not subtract the mean.",
    "final_norm": "Apply a final norm to the output.",
    "activation": "Activation function of the feed-forward sublayer; swiglu makes it a gated network.",
    "dropout": "Dropout probability of attention weights and features. PPO requires 0.",
}
"""Help texts of the fields of `TransformerSpec` that are not techniques. Agents fix the remaining fields:
they are causal and have no cross-attention."""


OTHER_POSITIONS = (RoPE(), Sinusoidal(), ALiBi(), None)
"""Position techniques to try, in this order, if the default is incompatible with the other choices."""


def add_core_rule(registry: ConstructorRegistry, args: Sequence[str]) -> None:
    """Add the rule that parses a `TransformerSpec` to a tyro registry.

    The available options depend on the techniques named in ``args``: ``--core.residual.bias 1`` needs
    ``--core.residual gru-gate``. A JSON object contains its options:
    ``--core.pattern '{"name": "Window", "size": 9}'``.

    Args:
        registry: registry of a command.
        args: arguments of the command line.
    """
    # A technique is kept if it, or one of its options, is given.
    given = {axis for axis in TECHNIQUES for word in args if _names_axis(axis, word)}
    join = TransformerSpec if "position" in given else with_compatible_position
    join = partial(without_unused_defaults, join, given)
    registry.struct_rule(partial(_spec_rule, given_techniques(args), join))


def _names_axis(axis: str, word: str) -> bool:
    return re.match(rf"--(no-)?core\.{axis}([.=]|$)", word.lower()) is not None


def _spec_rule(
    names: dict[str, str], join: Callable[..., TransformerSpec], info: StructTypeInfo
) -> StructConstructorSpec | None:
    if info.type is not TransformerSpec:
        return None
    types = get_type_hints(TransformerSpec)
    sizes = [
        StructFieldSpec(name, _with_hint(types[name]), getattr(info.default, name), text)
        for name, text in SCALAR_OPTIONS.items()
    ]
    axes = [
        field for axis in TECHNIQUES for field in _axis(axis, getattr(info.default, axis), names.get(axis))
    ]
    return StructConstructorSpec(partial(_build, join), (*sizes, *axes))


def _with_hint(annotation: Any) -> Any:
    return Annotated[annotation, arg(help_behavior_hint=default_hint)]


def _axis(axis: str, default: Any, name: str | None) -> Iterator[StructFieldSpec]:
    """Yield the field that chooses a technique, and the options of the named or the default technique.

    The names of the options begin with ``--core.AXIS.``
    """
    default_name = FIT_MEMORY if axis == "pattern" else NONE if default is None else type(default).__name__
    of = "One of the following, or several joined by & and |:" if axis in JOINABLE else "One of"
    description = f"{QUESTIONS[axis].capitalize()} {of} {', '.join(choosable(axis))}. {NOTES.get(axis, '')}"
    yield StructFieldSpec(axis, _name_type(axis), default_name, description.strip())
    technique = TECHNIQUES[axis].get(name or default_name)
    if technique is not None and fields(technique):
        options = default if type(default) is technique else technique()
        annotation: Any = Annotated[technique, arg(name=axis)]
        text = without_markup((inspect.getdoc(technique) or "").partition("\n\nArgs:")[0])
        yield StructFieldSpec(OPTIONS_OF.format(axis), annotation, options, text)


def _name_type(axis: str) -> Any:
    """Return the type of an option that takes the name or the JSON description of a technique."""
    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda words: (parse_technique if is_description(axis, words[0]) else match_name)(
            axis, words[0]
        ),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
    )
    return Annotated[str, spec]


def without_unused_defaults(
    join: Callable[..., TransformerSpec], given: Set[str], **choices: Any
) -> TransformerSpec:
    """Build the spec of these choices, without the defaults that only attention uses if there is none.

    Args:
        join: function that builds the spec.
        given: axes that the command line names; their choices are kept, and a spec may refuse them.
        choices: fields of the spec.
    """
    if choices["recurrence"] is not None and not choices["attention_layers"]:
        choices |= {axis: None for axis in OPTIONAL if axis not in {*given, "recurrence"}}
        choices |= {"pattern": Full()} if "pattern" not in given else {}
    return join(**choices)


def with_compatible_position(**choices: Any) -> TransformerSpec:
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
                warn_user(
                    f"the default position is incompatible with the other choices: {refusal}; {position} is "
                    f"used instead. To choose another one, pass --core.position"
                )
                return spec
        raise


def _build(join: Callable[..., TransformerSpec], **values: Any) -> TransformerSpec:
    sizes = {name: values[name] for name in SCALAR_OPTIONS}
    chosen = {axis: _technique(axis, values) for axis in TECHNIQUES if values[axis] != FIT_MEMORY}
    chosen["pattern"] = bound_to_memory(chosen["memory"], chosen.get("pattern"))
    return join(**sizes, **chosen)


def _technique(axis: str, values: dict[str, Any]) -> Any:
    if values[axis] == NONE:
        return None
    if not isinstance(values[axis], str):
        return values[axis]
    return values.get(OPTIONS_OF.format(axis)) or TECHNIQUES[axis][values[axis]]()


def bound_to_memory(memory: Memory | None, requested: Pattern | None) -> Pattern:
    """Return the pattern, by default Full, bounded to the length of the memory if it reaches farther back.

    Tokens then see the same keys at every position of a segment.

    Warns:
        UserWarning: if a requested pattern is bounded.
    """
    pattern = requested or Full()
    if memory is None or memory.covers(pattern):
        return pattern
    bounded = limit_distance(pattern, memory.length)
    if requested not in (None, bounded):
        unlimited = pattern.max_distance >= UNLIMITED
        longer = "a longer memory" if unlimited else f"--core.memory.length {pattern.max_distance}"
        warn_user(
            f"pattern {pattern} reaches farther back than memory {memory}, so that single steps and segments "
            f"would differ; it is bounded to {bounded}. To keep its reach, use {longer}"
        )
    return bounded
