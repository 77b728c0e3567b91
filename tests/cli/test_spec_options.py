"""Tests of the options of the transformer: names of techniques, and their options."""

import json
import warnings
from dataclasses import Field, fields, replace
from typing import Any, get_args, get_type_hints

import pytest

from rlxf.agents.gtrxl import gtrxl
from rlxf.attention import (
    ETC,
    LSH,
    RATE,
    RMT,
    ALiBi,
    BigBird,
    Compressive,
    Dilated,
    ETCLabels,
    Full,
    GRUGate,
    Longformer,
    RoPE,
    Routing,
    Strided,
    TransformerSpec,
    Tupe,
    Window,
)
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.registry import OPTIONAL, TECHNIQUES, technique_to_json
from rlxf.cli.commands.techniques import read_pattern
from rlxf.cli.entry_point import parse
from rlxf.cli.spec_options import SCALAR_OPTIONS
from tests.cli.running import TASK, TINY, wrong_usage

ALL = [(axis, technique) for axis, techniques in TECHNIQUES.items() for technique in techniques.values()]
BOUNDED = pytest.mark.filterwarnings("ignore:pattern .* reaches farther back than memory")
AHEAD = {(LSH, "chunk"), (Routing, "window"), (ETC, "segments")}
"""Options that are invalid for causal transformers."""
NESTED = {(BigBird, "given_blocks")}
"""Options whose nested tuples can be given as JSON only."""
OPTIONS = [
    (axis, technique, option)
    for axis, technique in ALL
    for option in fields(technique)
    if (technique, option.name) not in AHEAD | NESTED
]


def core(*args: str) -> TransformerSpec:
    return parse(["train", "gtrxl", "--env", "x", *args]).core


def value_id(value: object) -> str:
    return getattr(value, "name", None) or getattr(value, "__name__", str(value))


def test_default_core_equals_that_of_the_agent():
    assert core() == gtrxl()


def test_every_field_of_the_spec_is_an_option_except_those_fixed_by_agents():
    names = {field.name for field in fields(TransformerSpec)}
    assert {*SCALAR_OPTIONS, *TECHNIQUES, "causal", "cross_attention"} == names


@pytest.mark.parametrize(("axis", "technique"), ALL, ids=value_id)
def test_every_technique_can_be_chosen_by_name(axis, technique):
    assert getattr(free(axis, technique), axis) == technique()


def free(axis: str, technique: type, *args: str) -> TransformerSpec:
    """Return a core with this technique.

    Patterns are combined with no memory, which bounds them, and kernels with no position.
    """
    without = {"pattern": ["--core.memory", "none"], "kernel": ["--core.position", "none"]}
    return core(*without.get(axis, []), f"--core.{axis}", technique.__name__, *args)


@BOUNDED
@pytest.mark.parametrize("pattern", TECHNIQUES["pattern"].values(), ids=value_id)
def test_patterns_are_bounded_by_the_memory(pattern):
    chosen = core("--core.memory.length", "9", "--core.pattern", pattern.__name__).pattern
    assert chosen == limit_distance(pattern(), 9)
    assert chosen.max_distance <= 9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "window --core.pattern.size 500",
            r"Window\(size=500\) .* is bounded to .*=129\).* --core.memory.length 499",
        ),
        ("full", r"Full\(\).* memory XL\(length=128\).* bounded to Window\(size=129\).* use a longer memory"),
    ],
)
def test_bounded_patterns_emit_a_warning(args, message):
    with pytest.warns(UserWarning, match=message):
        assert core("--core.pattern", *args.split()).pattern == Window(129)


@pytest.mark.parametrize("args", [[], ["--core.memory", "none"], ["--core.memory.length", "499"]])
def test_unchanged_patterns_emit_no_warning(args, recwarn):
    core(*args)
    core(*args, "--core.pattern", "window", "--core.pattern.size", "128")
    assert list(recwarn) == []


W, S = Window(), Strided()


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('{"name": "Window", "size": 9}', Window(9)),
        ("window & strided", W & S),
        ("strided|WINDOW & dilated", S | W & Dilated()),
        ('{"name": "Window", "size": 9} | strided', Window(9) | S),
        (json.dumps(technique_to_json(S & Window(9) | W)), S & Window(9) | W),
    ],
)
def test_patterns_can_be_json_and_combined_with_operators(text, pattern):
    assert core("--core.memory", "none", "--core.pattern", text).pattern == pattern
    assert read_pattern(text) == pattern


@pytest.mark.parametrize("axis", TECHNIQUES)
def test_techniques_can_be_json(axis):
    technique = list(TECHNIQUES[axis].values())[-1]()
    without = {"pattern": ["--core.memory", "none"], "kernel": ["--core.position", "none"]}.get(axis, [])
    text = json.dumps(technique_to_json(technique))
    assert getattr(core(*without, f"--core.{axis}", text), axis) == technique


@pytest.mark.parametrize("axis", OPTIONAL)
def test_optional_techniques_can_be_none(axis):
    assert getattr(core(f"--core.{axis}", "none"), axis) is None


@pytest.mark.parametrize(("axis", "technique", "option"), OPTIONS, ids=value_id)
def test_every_option_of_a_technique_is_passed_on(axis, technique, option):
    value = non_default_value(technique, option)
    assert value != option.default
    chosen = REQUIRED.get((technique, option.name), {}) | {option.name: value}
    args = [word for name, value in chosen.items() for word in option_words(axis, name, value)]
    assert getattr(free(axis, technique, *args), axis) == technique(**chosen)


REQUIRED = {
    (ETCLabels, "outside"): {"segment": 4},
    (Longformer, "plain_heads"): {"dilation": 2},
    (RoPE, "original_length"): {"scaling": "dynamic"},
    (RoPE, "beta_fast"): {"scaling": "yarn", "original_length": 64},
    (RoPE, "beta_slow"): {"scaling": "yarn", "original_length": 64},
    (RoPE, "truncate"): {"scaling": "yarn", "original_length": 64},
    (RoPE, "attention_factor"): {"scaling": "yarn", "original_length": 64},
}
"""Options without which another option has no effect and is refused."""


def option_words(axis: str, name: str, value: object) -> list[str]:
    """Return an option of a technique as words of the command line."""
    name = name.replace("_", "-")
    return [f"--core.{axis}.no-{name}"] if value is False else [f"--core.{axis}.{name}", *to_words(value)]


def test_nested_options_can_be_given_as_json():
    pattern = BigBird(block=2, random=1, given_blocks=(((), (), (0,)), ((), (), (0,))))
    text = json.dumps(technique_to_json(pattern))
    assert core("--core.memory", "none", "--core.heads", "2", "--core.pattern", text).pattern == pattern


def to_words(value: object) -> list[str]:
    """Return a value as words of the command line; a flag without a value is True."""
    if value is True:
        return []
    return [word for item in value for word in to_words(item)] if isinstance(value, tuple) else [str(value)]


VALUES = {
    ("LRU", "min_radius"): 0.5,
    ("LRU", "max_radius"): 0.99,
    ("Local2D", "width"): 64,
    ("Differential", "initial_lambda"): 0.5,
    ("Local2D", "columns"): 4,
    ("Blockwise", "permutations"): ((1, 0, 3, 2, 5, 4, 7, 6),),
    ("BigBird", "window"): 5,
    ("BigBirdETC", "window"): 5,
    ("Routing", "decay"): 0.9,
    ("ACT", "epsilon"): 0.5,
    ("KNN", "layer"): 1,
    ("CALM", "threshold"): 0.5,
}
"""Values of options for which the rule of `non_default_value` gives an invalid one."""


def non_default_value(technique: type, option: Field[Any]) -> Any:
    """Return a valid value of the option that is not its default."""
    if (technique.__name__, option.name) in VALUES:
        return VALUES[technique.__name__, option.name]
    if isinstance(option.default, str):
        words = get_args(get_type_hints(technique)[option.name])
        return next(word for word in words if word != option.default)
    if option.default is None:
        return 3
    return not option.default if isinstance(option.default, bool) else 2 * option.default + 2


def test_options_can_be_none():
    assert core("--core.position", "tupe", "--core.position.buckets", "None").position == Tupe(buckets=None)


@pytest.mark.parametrize("text", ["GRUGate", "gru-gate", "gru_gate", "GRUGATE", "grugate"])
def test_names_ignore_case_dashes_and_underscores(text):
    assert core(f"--core.residual={text}", "--core.residual.bias", "1").residual == GRUGate(bias=1.0)


def test_options_of_the_default_technique_do_not_need_its_name():
    assert core("--core.residual.bias", "0.5") == replace(gtrxl(), residual=GRUGate(bias=0.5))


def test_default_pattern_fits_the_memory():
    assert core("--core.memory.length", "7") == gtrxl(7)
    assert core("--core.memory", "none").pattern == Full()
    named = core("--core.memory.length", "7", "--core.pattern", "window", "--core.pattern.size", "4")
    assert named.pattern == Window(4)


def test_sizes_and_other_options_are_passed_on():
    args = "--core.width 32 --core.layers 3 --core.heads 2 --core.feed-forward 40 --core.norm post"
    spec = core(
        *args.split(), "--core.no-final-norm", "--core.activation", "gelu", "--core.position", "alibi"
    )
    expected = gtrxl(width=32, layers=3, heads=2, feed_forward=40)
    assert spec == replace(expected, norm="post", final_norm=False, activation="gelu", position=ALiBi())


def test_options_of_attention_and_blocks_are_passed_on():
    attention = "--core.kv-heads 1 --core.qk-norm rms --core.attention-gate headwise"
    blocks = "--core.norm-type rms_norm --core.activation swiglu"
    chosen = replace(gtrxl(), kv_heads=1, qk_norm="rms", attention_gate="headwise")
    assert core(*attention.split(), *blocks.split()) == replace(
        chosen, norm_type="rms_norm", activation="swiglu"
    )


@pytest.mark.parametrize(("axis", "technique"), ALL, ids=value_id)
def test_each_technique_can_be_combined_with_the_defaults(axis, technique):
    """Default positions may be replaced, and patterns are bounded by the memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = getattr(core(f"--core.{axis}", technique.__name__), axis)
    assert axis == "pattern" or type(chosen) is technique


@pytest.mark.parametrize("kernel", ["RFA", "Performer", "Linformer"])
def test_incompatible_default_position_is_replaced_with_a_warning(kernel):
    message = r"default position is incompatible .*; RoPE\(.* is used instead.*--core.position"
    with pytest.warns(UserWarning, match=message):
        assert core("--core.kernel", kernel).position == RoPE()


def test_default_position_is_replaced_for_an_odd_width():
    message = r"XLRelative needs an even width, got 9; ALiBi\(\) is used instead"
    with pytest.warns(UserWarning, match=message):
        assert core("--core.width", "9", "--core.heads", "3").position == ALiBi()


@pytest.mark.parametrize("named", [["--core.position", "xlrelative"], ["--core.position.base", "100"]])
def test_chosen_positions_are_not_replaced(named, capsys):
    shown = wrong_usage(capsys, "train", "gtrxl", "--env", "x", "--core.kernel", "rfa", *named)
    assert "choose another position or kernel" in shown


def test_help_shows_the_options_of_the_chosen_techniques(capsys):
    for name, shown in (("rope", True), ("alibi", False)):
        with pytest.raises(SystemExit):
            core("--core.position", name, "--help")
        assert ("--core.position.base" in capsys.readouterr().out) is shown


@pytest.mark.parametrize("axis", TECHNIQUES)
def test_help_lists_the_techniques(axis, capsys):
    with pytest.raises(SystemExit):
        core("--help")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{', '.join(TECHNIQUES[axis])}. " in shown


@pytest.mark.parametrize("words", ["train gtrxl", "train dt", "pretrain"])
def test_help_explains_defaults_of_the_command(words, capsys):
    with pytest.raises(SystemExit):
        parse([*words.split(), "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "features. PPO requires 0. (default: 0." in shown
    assert "The pattern named fitting lets a token attend to itself and to as many earlier tokens as" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--core.position rop", "unknown position 'rop'; did you mean RoPE? Choose one of None, Sinusoidal"),
        ("--core.position", "--core.position"),
        ("--core.position alibi --core.position.base 3", "unknown option --core.position.base"),
        ("--core.pattern zigzag|window", "unknown pattern 'zigzag'; choose one of fitting, Full"),
        ("--core.pattern etc&window", "has separate projections for global tokens"),
        ("--core.pattern full|full --core.pattern.size 3", "unknown option --core.pattern.size"),
        ('--core.kernel {"name":"RFA","gate":"no"}', "RFA gate must be True or False, got 'no'"),
        ('--core.memory {"name":', "is not valid JSON"),
        ("--core.heads 7", "heads must divide width, got 7 heads and width 64"),
        ("--core.width 0", "width must be at least 1, got 0"),
        ("--core.memory.length 0", "memory length must be at least 1, got 0"),
        ("--core.residual.bias nan", "bias must be finite, got nan"),
        ("--core.kernel lsh --core.kernel.chunk 4", "causal=True hides later tokens; set chunk=None"),
        ("--core.kernel routing --core.kernel.window 4", "causal=True hides later tokens; set window=None"),
    ],
)
def test_errors_of_invalid_choices(args, message, capsys, tmp_path):
    assert message in wrong_usage(capsys, "train", "gtrxl", "--env", "x", *args.split())
    assert list(tmp_path.iterdir()) == []


@BOUNDED
@pytest.mark.parametrize(("axis", "technique"), ALL, ids=value_id)
def test_agents_support_each_technique(axis, technique):
    lengthless = technique in (Compressive, RMT, RATE) or axis == "recurrence"
    sizes = without_length(TINY) if lengthless else TINY
    parse(["train", "gtrxl", *TASK, *sizes, f"--core.{axis}", technique.__name__]).prepare()


def without_length(args: list[str]) -> list[str]:
    """Return the arguments without ``--core.memory.length``, which not all cores have."""
    place = args.index("--core.memory.length")
    return args[:place] + args[place + 2 :]


def test_error_of_an_incompatible_combination(capsys):
    odd = ["--core.position", "rope", "--core.heads", "64"]
    assert "RoPE needs an even width per head" in wrong_usage(capsys, "train", "gtrxl", *TASK, *odd)
