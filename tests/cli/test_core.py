"""The options of the transformer: every technique by name, every one of its options."""

import json
import warnings
from dataclasses import Field, fields, replace
from typing import Any, get_args, get_type_hints

import pytest

from rlxf.agents.gtrxl import gtrxl
from rlxf.attention import (
    LSH,
    ALiBi,
    Compressive,
    Dilated,
    Full,
    GRUGate,
    RoPE,
    Routing,
    Strided,
    TransformerSpec,
    Tupe,
    Window,
)
from rlxf.attention.patterns.window import bounded
from rlxf.attention.techniques import OPTIONAL, TECHNIQUES, technique_to_json
from rlxf.cli.core import SIZES
from rlxf.cli.mistakes import BUILDING, in_one_line
from rlxf.cli.pattern_picture import read_pattern
from rlxf.cli.program import parse
from tests.cli.running import TASK, TINY, wrong_usage

ALL = [(axis, technique) for axis, techniques in TECHNIQUES.items() for technique in techniques.values()]
CUT = pytest.mark.filterwarnings("ignore:pattern .* sees farther back than memory")
AHEAD = {(LSH, "chunk"), (Routing, "window")}
"""Options that no agent can have: they look at what is ahead."""
OPTIONS = [
    (axis, technique, option)
    for axis, technique in ALL
    for option in fields(technique)
    if (technique, option.name) not in AHEAD
]


def core(*args: str) -> TransformerSpec:
    return parse(["train", "gtrxl", "--env", "x", *args]).core


def in_words(value: object) -> str:
    return getattr(value, "name", None) or getattr(value, "__name__", str(value))


def test_the_default_core_is_the_agents():
    assert core() == gtrxl()


def test_every_choice_of_a_spec_is_offered_but_those_that_no_agent_has():
    every = {field.name for field in fields(TransformerSpec)}
    assert {*SIZES, *TECHNIQUES, "causal", "cross_attention"} == every


@pytest.mark.parametrize(("axis", "technique"), ALL, ids=in_words)
def test_every_technique_can_be_named(axis, technique):
    assert getattr(free(axis, technique), axis) == technique()


def free(axis: str, technique: type, *args: str) -> TransformerSpec:
    """A core with that technique; without memory, which would bound a pattern, or positions of pairs."""
    without = {"pattern": ["--core.memory", "none"], "kernel": ["--core.position", "none"]}
    return core(*without.get(axis, []), f"--core.{axis}", technique.__name__, *args)


@CUT
@pytest.mark.parametrize("pattern", TECHNIQUES["pattern"].values(), ids=in_words)
def test_a_pattern_is_kept_within_the_memory(pattern):
    chosen = core("--core.memory.length", "9", "--core.pattern", pattern.__name__).pattern
    assert chosen == bounded(pattern(), 9)
    assert chosen.reach <= 9


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            "window --core.pattern.size 500",
            r"Window\(size=500\) .* is cut to .*=129\).* --core.memory.length 499",
        ),
        ("full", r"Full\(\).* memory XL\(length=128\).* cut to Window\(size=129\).* give a longer memory"),
    ],
)
def test_a_pattern_that_is_cut_is_told(args, told):
    with pytest.warns(UserWarning, match=told):
        assert core("--core.pattern", *args.split()).pattern == Window(129)


@pytest.mark.parametrize("args", [[], ["--core.memory", "none"], ["--core.memory.length", "499"]])
def test_a_pattern_that_is_not_cut_is_not_told(args, recwarn):
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
def test_patterns_are_described_and_joined(text, pattern):
    assert core("--core.memory", "none", "--core.pattern", text).pattern == pattern
    assert read_pattern(text) == pattern


@pytest.mark.parametrize("axis", TECHNIQUES)
def test_a_technique_may_be_described(axis):
    technique = list(TECHNIQUES[axis].values())[-1]()
    without = {"pattern": ["--core.memory", "none"], "kernel": ["--core.position", "none"]}.get(axis, [])
    text = json.dumps(technique_to_json(technique))
    assert getattr(core(*without, f"--core.{axis}", text), axis) == technique


@pytest.mark.parametrize("axis", OPTIONAL)
def test_nothing_can_be_named_where_it_is_a_choice(axis):
    assert getattr(core(f"--core.{axis}", "none"), axis) is None


@pytest.mark.parametrize(("axis", "technique", "option"), OPTIONS, ids=in_words)
def test_every_option_of_a_technique_arrives(axis, technique, option):
    value = another(technique, option)
    assert value != option.default
    name = option.name.replace("_", "-")
    given = [f"--core.{axis}.no-{name}"] if value is False else [f"--core.{axis}.{name}", *spelled(value)]
    assert getattr(free(axis, technique, *given), axis) == technique(**{option.name: value})


def spelled(value: object) -> list[str]:
    """A value in words of the command line; an option that is there is True."""
    if value is True:
        return []
    return [word for one in value for word in spelled(one)] if isinstance(value, tuple) else [str(value)]


UNUSUAL = {
    ("Local2D", "width"): 64,
    ("Local2D", "columns"): 4,
    ("Blockwise", "permutations"): ((1, 0, 3, 2, 5, 4, 7, 6),),
    ("BigBird", "window"): 5,
    ("BigBirdETC", "window"): 5,
    ("Routing", "decay"): 0.9,
    ("ACT", "epsilon"): 0.5,
    ("KNN", "layer"): 1,
    ("CALM", "threshold"): 0.5,
}
"""Options whose values have to fit."""


def another(technique: type, option: Field[Any]) -> Any:
    """A value that the option may have and that is not its default."""
    if (technique.__name__, option.name) in UNUSUAL:
        return UNUSUAL[technique.__name__, option.name]
    if isinstance(option.default, str):
        words = get_args(get_type_hints(technique)[option.name])
        return next(word for word in words if word != option.default)
    if option.default is None:
        return 3
    return not option.default if isinstance(option.default, bool) else 2 * option.default + 2


def test_an_option_may_be_none():
    assert core("--core.position", "tupe", "--core.position.buckets", "None").position == Tupe(buckets=None)


@pytest.mark.parametrize("text", ["GRUGate", "gru-gate", "gru_gate", "GRUGATE", "grugate"])
def test_a_name_may_be_written_in_several_ways(text):
    assert core(f"--core.residual={text}", "--core.residual.bias", "1").residual == GRUGate(bias=1.0)


def test_options_of_the_default_technique_need_no_name():
    assert core("--core.residual.bias", "0.5") == replace(gtrxl(), residual=GRUGate(bias=0.5))


def test_the_pattern_fits_the_memory_unless_it_is_named():
    assert core("--core.memory.length", "7") == gtrxl(7)
    assert core("--core.memory", "none").pattern == Full()
    named = core("--core.memory.length", "7", "--core.pattern", "window", "--core.pattern.size", "4")
    assert named.pattern == Window(4)


def test_sizes_and_words_arrive():
    given = "--core.width 32 --core.layers 3 --core.heads 2 --core.feed-forward 40 --core.norm post"
    spec = core(
        *given.split(), "--core.no-final-norm", "--core.activation", "gelu", "--core.position", "alibi"
    )
    wanted = gtrxl(width=32, layers=3, heads=2, feed_forward=40)
    assert spec == replace(wanted, norm="post", final_norm=False, activation="gelu", position=ALiBi())


@pytest.mark.parametrize(("axis", "technique"), ALL, ids=in_words)
def test_each_technique_goes_with_the_defaults(axis, technique):
    """Named alone, whatever else has to change for it; patterns are cut to what memory holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = getattr(core(f"--core.{axis}", technique.__name__), axis)
    assert axis == "pattern" or type(chosen) is technique


@pytest.mark.parametrize("kernel", ["RFA", "Performer", "Linformer"])
def test_a_position_that_goes_with_the_kernel_is_chosen_and_told(kernel):
    with pytest.warns(UserWarning, match=r"default position does not go .* it is RoPE\(.*--core.position"):
        assert core("--core.kernel", kernel).position == RoPE()


def test_a_position_for_an_odd_width_is_chosen_and_told():
    with pytest.warns(UserWarning, match=r"XLRelative needs an even width, got 9; it is ALiBi\(\) instead"):
        assert core("--core.width", "9", "--core.heads", "3").position == ALiBi()


@pytest.mark.parametrize("named", [["--core.position", "xlrelative"], ["--core.position.base", "100"]])
def test_a_position_that_is_named_is_not_replaced(named, capsys):
    shown = wrong_usage(capsys, "train", "gtrxl", "--env", "x", "--core.kernel", "rfa", *named)
    assert "choose another position or kernel" in shown


def test_help_shows_the_options_of_what_is_named(capsys):
    for name, shown in (("rope", True), ("alibi", False)):
        with pytest.raises(SystemExit):
            core("--core.position", name, "--help")
        assert ("--core.position.base" in capsys.readouterr().out) is shown


@pytest.mark.parametrize("axis", TECHNIQUES)
def test_help_lists_the_names(axis, capsys):
    with pytest.raises(SystemExit):
        core("--help")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{', '.join(TECHNIQUES[axis])}. (default:" in shown


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("--core.position rop", "there is no position named 'rop'; there are None, Sinusoidal"),
        ("--core.position", "--core.position"),
        ("--core.position alibi --core.position.base 3", "unknown option --core.position.base"),
        ("--core.pattern zigzag|window", "there is no pattern named 'zigzag'; there are fitting, Full"),
        (
            "--core.pattern etc&window",
            "ETC(radius=64, global_tokens=4, farthest=None) has separate projections",
        ),
        ("--core.pattern full|full --core.pattern.size 3", "unknown option --core.pattern.size"),
        ('--core.kernel {"name":"RFA","gate":"no"}', "RFA gate must be True or False, got 'no'"),
        ('--core.memory {"name":', "is no JSON"),
        ("--core.heads 7", "heads must divide width, got 7 heads and width 64"),
        ("--core.width 0", "width must be at least 1, got 0"),
        ("--core.memory.length 0", "memory length must be at least 1, got 0"),
        ("--core.residual.bias nan", "bias must be finite, got nan"),
        ("--core.kernel lsh --core.kernel.chunk 4", "causal=True hides later tokens; set chunk=None"),
        ("--core.kernel routing --core.kernel.window 4", "causal=True hides later tokens; set window=None"),
    ],
)
def test_what_cannot_be_chosen_is_told(args, told, capsys, tmp_path):
    assert told in wrong_usage(capsys, "train", "gtrxl", "--env", "x", *args.split())
    assert list(tmp_path.iterdir()) == []


@CUT
@pytest.mark.parametrize(("axis", "technique"), ALL, ids=in_words)
def test_an_agent_is_built_with_it_or_one_sentence_says_why_not(axis, technique, capsys):
    try:
        with in_one_line(*BUILDING):
            sizes = without_length(TINY) if technique is Compressive else TINY
            parse(["train", "gtrxl", *TASK, *sizes, f"--core.{axis}", technique.__name__]).prepare()
    except SystemExit:
        assert capsys.readouterr().err.startswith(f"rlxf: {technique.__name__}(")


def without_length(args: list[str]) -> list[str]:
    """Without the option that not every memory has."""
    place = args.index("--core.memory.length")
    return args[:place] + args[place + 2 :]


def test_a_pair_that_cannot_work_is_one_sentence(capsys):
    odd = ["--core.position", "rope", "--core.heads", "64"]
    assert "RoPE needs an even width per head" in wrong_usage(capsys, "train", "gtrxl", *TASK, *odd)
