"""Tests of techniques that are registered from outside of the package."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import Tensor

from rlxf.attention import (
    BigBird,
    Blockwise,
    Dilated,
    Full,
    Longformer,
    Strided,
    TransformerSpec,
    Window,
    register_technique,
)
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.registration import INTERFACES
from rlxf.attention.registry import COMBINATORS, TECHNIQUES
from rlxf.cli.entry_point import parse
from rlxf.cli.spec_options import match_name

pytestmark = pytest.mark.usefixtures("restored_registry")


def new_pattern(name: str = "Even", module: str = "mine", **attributes: object) -> type[Pattern]:
    """Return a pattern that allows keys at even distances, with changed or added attributes."""

    @dataclass(frozen=True)
    class Even(Pattern):
        paper: ClassVar[str] = "none"
        causal_form: ClassVar[str] = "my own"
        cost: ClassVar[str] = "L^2 pairs"
        step: int = 2

        def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
            return (i - j) % self.step == 0

    Even.__name__ = Even.__qualname__ = name
    Even.__module__ = module
    for attribute, value in attributes.items():
        setattr(Even, attribute, value)
    return Even


def test_registered_technique_is_part_of_specs_json_and_the_command_line():
    even = register_technique("pattern")(new_pattern(module=__name__))
    spec = TransformerSpec(width=8, heads=2, pattern=even(step=3))
    assert TransformerSpec.from_json(spec.to_json()) == spec
    assert match_name("pattern", "even") == "Even"
    words = "train gtrxl --env x --core.memory none --core.pattern even --core.pattern.step 3"
    assert parse(words.split()).core.pattern == even(3)


def test_axes_have_an_interface():
    assert INTERFACES.keys() == TECHNIQUES.keys()
    for axis, techniques in TECHNIQUES.items():
        assert all(issubclass(each, INTERFACES[axis]) for each in techniques.values())


@pytest.mark.parametrize("name", ["Window", "window", "BIG_BIRD", "Both", "HeadPatterns"])
def test_taken_names_are_refused_with_both_classes(name):
    before = dict(TECHNIQUES["pattern"])
    with pytest.raises(
        ValueError, match=rf"mine\.{name} cannot .* the axis pattern already has rlxf\.attention\."
    ):
        register_technique("pattern")(new_pattern(name))
    assert TECHNIQUES["pattern"] == before


def test_two_modules_cannot_register_the_same_name():
    register_technique("pattern")(new_pattern(module="mine"))
    with pytest.raises(
        ValueError, match=r"yours\.Even cannot be registered: .* already has mine\.Even; rename"
    ):
        register_technique("pattern")(new_pattern(module="yours"))


def test_a_second_definition_in_the_same_module_replaces_the_first():
    register_technique("pattern")(new_pattern())
    again = register_technique("pattern")(new_pattern())
    assert TECHNIQUES["pattern"]["Even"] is again


def test_instance_of_a_replaced_definition_is_refused_with_the_remedy():
    earlier = register_technique("pattern")(new_pattern())(step=3)
    now = register_technique("pattern")(new_pattern())
    with pytest.raises(TypeError, match=r"Even\(step=3\) is of an earlier definition .* create it again"):
        TransformerSpec(pattern=earlier)
    assert TransformerSpec(pattern=now(step=3)).pattern.step == 3


def test_the_same_name_is_allowed_on_another_axis():
    assert "XL" in TECHNIQUES["memory"]
    register_technique("pattern")(new_pattern("XL"))
    assert TransformerSpec(pattern=TECHNIQUES["pattern"]["XL"]()).pattern.step == 2


@pytest.mark.parametrize("name", ["Fitting", "none"])
def test_words_of_the_command_line_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is a word of the command line; rename"):
        register_technique("pattern")(new_pattern(name))


def test_unknown_axis_is_refused():
    with pytest.raises(
        ValueError, match="there is no axis 'patterns'; choose one of position, pattern, kernel"
    ):
        register_technique("patterns")


@pytest.mark.parametrize("technique", [Full(), int, "Full"], ids=["instance", "other class", "text"])
def test_other_objects_are_refused(technique):
    with pytest.raises(
        TypeError, match=r"must be a subclass of rlxf\.attention\.patterns\.base\.Pattern, got"
    ):
        register_technique("pattern")(technique)


def test_technique_of_another_axis_is_refused():
    with pytest.raises(
        TypeError, match=r"a technique of the axis kernel must be a subclass of .*Kernel, got .*Even"
    ):
        register_technique("kernel")(new_pattern())


def test_class_that_is_no_frozen_dataclass_is_refused():
    class Plain(new_pattern()):
        pass

    with pytest.raises(TypeError, match="Plain must be a frozen dataclass: write @dataclass"):
        register_technique("pattern")(Plain)
    with pytest.raises(TypeError, match="Mutable must be a frozen dataclass"):
        register_technique("pattern")(type("Mutable", (Plain,), {}))


@pytest.mark.parametrize("name", ["paper", "causal_form", "cost"])
def test_missing_description_is_refused(name):
    with pytest.raises(ValueError, match=f"mine.Even must define {name}"):
        register_technique("pattern")(new_pattern(**{name: None}))


def test_missing_method_is_refused():
    @register_technique("pattern")
    @dataclass(frozen=True)
    class Fine(new_pattern()):
        pass

    @dataclass(frozen=True)
    class Partial(Pattern):
        paper = causal_form = cost = "none"

    with pytest.raises(ValueError, match="Partial must define mask_mod"):
        register_technique("pattern")(Partial)


def with_rule(kind: type[Pattern]) -> type[Pattern]:
    """Return a subclass of a pattern with another rule."""
    mask_mod = {"mask_mod": lambda self, i, j: i == j}
    return dataclass(frozen=True)(type(f"My{kind.__name__}", (kind,), mask_mod))


@pytest.mark.parametrize("kind", [Full, Window, Dilated])
def test_rules_of_patterns_may_be_overridden(kind):
    mine = register_technique("pattern")(with_rule(kind))
    assert TransformerSpec(pattern=mine()).pattern.for_layer(0) == mine()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(BigBird, "for_heads"), (Blockwise, "for_heads"), (Longformer, "for_heads"), (Strided, "for_layer")],
)
def test_overridden_rule_without_effect_is_refused(kind, name):
    with pytest.raises(ValueError, match=f"My{kind.__name__} overrides a rule, but inherits {name}, .* both"):
        register_technique("pattern")(with_rule(kind))


def test_option_without_default_is_refused():
    @dataclass(frozen=True)
    class Needy(Pattern):
        paper = causal_form = cost = "none"
        size: int

        def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
            return i - j < self.size

    with pytest.raises(ValueError, match="Needy must have a default for size"):
        register_technique("pattern")(Needy)


def test_file_with_an_unknown_technique_names_the_remedy():
    data = TransformerSpec(width=8, heads=2).to_dict() | {"pattern": {"name": "Even", "step": 2}}
    with pytest.raises(
        ValueError, match=r"no pattern named 'Even'; .* import the module that registers it first"
    ):
        TransformerSpec.from_dict(data)


def test_combinators_are_part_of_the_names():
    assert {"Both", "HeadPatterns"} <= COMBINATORS["pattern"].keys()
