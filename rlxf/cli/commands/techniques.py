"""``rlxf techniques``: list or describe techniques, list their combinations, or draw an attention pattern."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from tyro.conf import Positional

from rlxf.cli.options import Command, check_figure_path, options, without_markup
from rlxf.cli.output import print_out
from rlxf.utils.names import did_you_mean, plain_name

if TYPE_CHECKING:
    import numpy as np

    from rlxf.attention.patterns.base import Pattern

HEAD_QUESTION = "how does a trained agent use logged trajectories?"
"""Question of output heads with a datastore, which are not part of the transformer."""
CONTEXT_QUESTION = "how does a trained agent combine several contexts?"
"""Question of techniques that merge action distributions, which are not part of the transformer."""
TOKENS = 128
"""Default number of tokens in an image."""
DRAWN_LAYERS, DRAWN_HEADS = 2, 4
"""Numbers of layers and heads that are searched for different masks."""


@options
class Techniques(Command):
    """List the techniques that a transformer can be built from, or describe some of them.

    With names, the formula, the explanation, the source, the options and the cost of these techniques are
    printed. The other options list incompatible pairs, or draw an attention pattern.

    Example: rlxf techniques DeltaNet residual
    """

    names: Positional[tuple[str, ...]] = ()
    """Techniques, such as DeltaNet, or axes, such as residual, that are described. Without names, all
    techniques are listed."""
    draw: str | None = None
    """Pattern whose mask is saved as a PNG.
    It is a name, JSON like {"name": "Window", "size": 9}, or several of these joined by & and |."""
    length: int = TOKENS
    """Number of tokens in the image."""
    output: Path | None = None
    """File of the image, which ends in .png. None means the name of the pattern in the current folder."""
    pairs: bool = False
    """List the incompatible pairs of techniques, each with its default options, and the reasons."""

    def prepare(self) -> Callable[[], None]:
        """Return the function that prints the list or the pairs, or draws the pattern."""
        from rlxf.utils.checks import check_int

        if bool(self.names) + self.pairs + (self.draw is not None) > 1:
            raise ValueError("names, --pairs and --draw exclude each other: leave out all but one")
        if self.draw is not None:
            pattern = read_pattern(self.draw)
            check_int("length", self.length)
            file = self.output or Path(f"{type(pattern).__name__}.png")
            check_figure_path("--output", file)
            return partial(draw_pattern, pattern, self.length, file)
        if self.output is not None or self.length != TOKENS:
            raise ValueError("--output and --length apply to --draw PATTERN: add it, or leave them out")
        if self.pairs:
            return show_pairs
        if self.names:
            return partial(print_out, "\n\n\n".join(descriptions(self.names)))
        return show_techniques


def tables() -> dict[str, tuple[str, Mapping[str, type[Any]]]]:
    """Return axis -> its question and its techniques by name, with output heads and contexts as last axes."""
    from rlxf.agents.contexts import CONTEXT_MERGERS
    from rlxf.attention.registry import HEADS, TECHNIQUES
    from rlxf.cli.spec_options import QUESTIONS

    return {
        **{axis: (question, TECHNIQUES[axis]) for axis, question in QUESTIONS.items()},
        "head": (HEAD_QUESTION, HEADS),
        "context": (CONTEXT_QUESTION, CONTEXT_MERGERS),
    }


def show_techniques() -> None:
    """Print a table for each axis, and for output heads and combinations of contexts."""
    for axis, (question, techniques) in tables().items():
        table = Table("technique", "source", title=f"{axis}: {question}", expand=True)
        for name, technique in techniques.items():
            table.add_row(name, technique.paper)
        print_out(table)
    print_out(
        '"rlxf techniques NAME" describes a technique, and "rlxf techniques memory" all those of an axis.'
    )


def descriptions(names: Sequence[str]) -> list[str]:
    """Return the description of each named technique, and of all techniques of each named axis.

    Raises:
        ValueError: if a name is neither a technique nor an axis.
    """
    axes = {axis: techniques for axis, (_, techniques) in tables().items()}
    return [_describe(axis, technique) for name in names for axis, technique in _find(name, axes)]


def _find(name: str, axes: Mapping[str, Mapping[str, type[Any]]]) -> list[tuple[str, type[Any]]]:
    """Return axis and type of the techniques that a name of a technique or of an axis means."""
    known: dict[str, list[tuple[str, type[Any]]]] = {}
    for axis, techniques in axes.items():
        known[axis] = [(axis, technique) for technique in techniques.values()]
        known |= {one: [(axis, technique)] for one, technique in techniques.items()}
    plain = {plain_name(one): one for one in known}
    key = plain_name(name)
    if key not in plain:
        hint = did_you_mean(name, known, 'see the list of "rlxf techniques"')
        raise ValueError(f"unknown technique or axis {name!r}{hint}")
    return known[plain[key]]


def _describe(axis: str, technique: type[Any]) -> str:
    """Return the name with default options, the properties and the docstring of a technique."""
    from rlxf.attention.registry import TECHNIQUES

    properties = _properties(axis, technique) if axis in TECHNIQUES else _costs(technique)
    documented = without_markup(inspect.getdoc(technique) or "").partition("\n\nRaises:")[0]
    described = documented.replace("\n\nArgs:\n", "\n\nOptions:\n")
    return f"{axis} {technique()!r}\n{properties}\n\n{described}"


def _properties(axis: str, technique: type[Any]) -> str:
    """Return origin of the causal form, cost for L tokens, and support of an XL memory as text.

    A recurrence supports a memory if some layers have attention.
    """
    from rlxf.attention import XL, TransformerSpec

    layers = (0,) if axis == "recurrence" else ()
    try:
        TransformerSpec(**{"memory": XL(), axis: technique()}, attention_layers=layers).build()
        with_memory = "yes"
    except ValueError:
        with_memory = "no"
    return f"{_costs(technique)}; with memory: {with_memory}"


def _costs(technique: type[Any]) -> str:
    """Return the origin of the causal form and the cost of a technique as text."""
    return f"causal form: {technique.causal_form}; cost: {technique.cost}"


def pairs(causal: bool) -> Iterator[tuple[str, str, str]]:
    """Yield axis and name of both techniques of all pairs, and the reason why they are incompatible.

    The techniques have their default options; optional axes include None. The reason is the error message of
    a transformer with both techniques, and empty if it can be built.
    """
    from rlxf.attention import TransformerSpec
    from rlxf.attention.registry import OPTIONAL, TECHNIQUES

    choices = {
        axis: [None] * (axis in OPTIONAL) + [technique() for technique in techniques.values()]
        for axis, techniques in TECHNIQUES.items()
    }
    for one, other in combinations(choices, 2):
        for first, second in product(choices[one], choices[other]):
            error = ""
            try:
                TransformerSpec(causal=causal, **{one: first, other: second})
            except ValueError as refusal:
                error = str(refusal)
            yield f"{one} {_name(first)}", f"{other} {_name(second)}", error


def _name(technique: Any) -> str:
    return "None" if technique is None else type(technique).__name__


def show_pairs() -> None:
    """Print the pairs that causal transformers do not support, and the numbers of supported pairs."""
    table = Table("technique", "is incompatible with", "because", expand=True)
    for pair in pairs(causal=True):
        if pair[-1]:
            table.add_row(*pair)
    print_out(table)
    for causal in (True, False):
        valid = [not error for *_, error in pairs(causal)]
        print_out(
            f"{causal=}: {sum(valid)} pairs of techniques are compatible, {len(valid) - sum(valid)} are not"
        )


def read_pattern(text: str) -> "Pattern":
    """Return the pattern of a text: a name, a JSON object, or several of these joined by & or |.

    Raises:
        ValueError: if the pattern or one of its options does not exist.
    """
    from rlxf.cli.spec_options import FIT_MEMORY, parse_technique

    if text.lower() == FIT_MEMORY:
        raise ValueError(f"the {FIT_MEMORY} pattern depends on the memory; draw window or full instead")
    return parse_technique("pattern", text)


def distinct_masks(pattern: "Pattern") -> "dict[Pattern, str]":
    """Return the distinct patterns of layers and heads, each with the first layer and head that uses it."""
    places: dict[Pattern, str] = {}
    for layer in range(DRAWN_LAYERS):
        for head, rule in enumerate(pattern.for_layer(layer).for_heads(DRAWN_HEADS)):
            places.setdefault(rule, f"layer {layer}, head {head}")
    return places


def mask_image(rule: "Pattern", length: int) -> "np.ndarray":
    """Return the attention mask as (length, length): 0 masked, 1 visible if not causal, 2 always visible."""
    import torch

    position = torch.arange(length)
    allowed = rule.mask_mod(position[:, None], position).expand(length, length).int()
    return (allowed * (1 + torch.ones(length, length).tril().int())).numpy()


def draw_pattern(pattern: "Pattern", length: int, file: Path) -> None:
    """Write the mask as a PNG, and print its path.

    Rows are queries, columns are keys; future keys have a lighter color.
    """
    from matplotlib.figure import Figure

    rules = distinct_masks(pattern)
    figure = Figure(figsize=(4 * len(rules), 4.4), layout="constrained")
    for number, (rule, place) in enumerate(rules.items(), start=1):
        axes = figure.add_subplot(1, len(rules), number)
        axes.imshow(mask_image(rule, length), cmap="Blues", vmin=0, vmax=2, interpolation="nearest")
        axes.set(title=place if len(rules) > 1 else "", xlabel="key", ylabel="query")
    figure.suptitle(repr(pattern))
    figure.savefig(file, format="png")
    print_out(f"{file}: rows are queries, columns are keys; light: masked in causal transformers")
