"""Tests of ``rlxf techniques``."""

import inspect
import math
from itertools import combinations

import pytest
import torch
from PIL import Image

from rlxf.agents.contexts import CONTEXT_MERGERS
from rlxf.attention import ALiBi, Dilated, FixedColumns, Linformer, TransformerSpec, Window
from rlxf.attention.positions.base import Position
from rlxf.attention.registry import HEADS, OPTIONAL, TECHNIQUES
from rlxf.cli import main
from rlxf.cli.commands.techniques import _properties, distinct_masks, mask_image, pairs, read_pattern
from rlxf.cli.spec_options import QUESTIONS, summary
from tests.cli.running import refused


def test_techniques_are_listed_by_axis(capsys):
    main(["techniques"])
    shown = capsys.readouterr().out
    for axis, techniques in TECHNIQUES.items():
        assert f"{axis}: {QUESTIONS[axis]}" in shown
        assert all(f"│ {name} " in shown for name in techniques)


@pytest.mark.parametrize("axis", TECHNIQUES)
def test_an_axis_describes_its_techniques(axis, capsys):
    main(["techniques", axis])
    shown = capsys.readouterr().out
    for name, technique in TECHNIQUES[axis].items():
        description = shown.split(f"{axis} {name}(")[1].partition("\n\n\n")[0]
        assert (
            f"causal form: {technique.causal_form}; cost: {technique.cost}; with memory: yes" in description
        )
        documented = inspect.getdoc(technique).replace("``", "").partition("\n\nRaises:")[0]
        assert documented.replace("\n\nArgs:\n", "\n\nOptions:\n") in description
        assert "``" not in description


def test_output_heads_and_context_techniques_are_listed_and_described(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    main(["techniques"])
    heads, contexts = (
        capsys.readouterr().out.split("head: how does a trained agent use")[1].split("context: how")
    )
    main(["techniques", "head", "context"])
    described = capsys.readouterr().out
    for listed, techniques in ((heads, HEADS), (contexts, CONTEXT_MERGERS)):
        for name, one in techniques.items():
            assert f"│ {name} " in listed
            assert one.paper in listed
            assert f"{one()!r}\ncausal form: {one.causal_form}; cost: {one.cost}\n" in described


def test_techniques_are_described_in_the_given_order(capsys):
    main(["techniques", "gru-gate", "DELTANET", "kernel"])
    names = [part.split("(")[0] for part in capsys.readouterr().out.split("\n\n\n")]
    assert names[:3] == ["residual GRUGate", "recurrence DeltaNet", "kernel Softmax"]
    assert len(names) == 2 + len(TECHNIQUES["kernel"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gru-gat", "did you mean GRUGate?"), ("residul", "did you mean residual?"), ("zzz", "see the list")],
)
def test_unknown_names_are_refused(name, hint, capsys):
    assert f"unknown technique or axis {name!r}; {hint}" in refused(capsys, "techniques", "XL", name)


@pytest.mark.parametrize("option", [("--pairs",), ("--draw", "window")])
def test_names_are_not_combined_with_other_options(option, capsys):
    message = "names, --pairs and --draw exclude each other: leave out all but one"
    assert message in refused(capsys, "techniques", "XL", *option)
    assert message in refused(capsys, "techniques", "--pairs", "--draw", "window")


@pytest.mark.parametrize("option", [("--output", "a.png"), ("--length", "9")])
def test_options_of_images_need_a_pattern(option, capsys):
    for words in ([], ["XL"], ["--pairs"]):
        message = refused(capsys, "techniques", *words, *option)
        assert "--output and --length apply to --draw PATTERN: add it, or leave them out" in message


def test_summaries_are_whole_sentences():
    """The first paragraph of each docstring is searched for words that are near to an unknown name."""
    summaries = [summary(technique) for table in TECHNIQUES.values() for technique in table.values()]
    assert [text for text in summaries if not text.endswith(".")] == []


class Forgetful(Position):
    """Position that does not support memory."""

    def build(self, width, heads):
        raise ValueError("no")

    build_embedding = build


def test_missing_memory_support_is_reported(monkeypatch):
    monkeypatch.setitem(TECHNIQUES["position"], "Forgetful", Forgetful)
    assert _properties("position", Forgetful).endswith("with memory: no")
    assert _properties("position", ALiBi).endswith("with memory: yes")


def test_incompatible_pairs_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "800")
    main(["techniques", "--pairs"])
    shown = capsys.readouterr().out
    for causal in (True, False):
        every = list(pairs(causal))
        valid = sum(not error for *_, error in every)
        line = f"causal={causal}: {valid} pairs of techniques are compatible, {len(every) - valid} are not"
        assert line in shown
    sizes = [len(techniques) + (axis in OPTIONAL) for axis, techniques in TECHNIQUES.items()]
    assert len(every) == sum(math.prod(two) for two in combinations(sizes, 2))
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    refused = [list(pair) for pair in pairs(causal=True) if pair[-1]]
    assert ["position XLRelative", "kernel Linformer"] in [names for *names, _ in refused]
    assert [row[1:4] for row in rows if len(row) == 5] == refused


def test_pairs_are_rejected_with_the_message_of_the_spec():
    alibi = {other: error for one, other, error in pairs(causal=False) if one == "position ALiBi"}
    assert alibi["kernel Softmax"] == ""
    with pytest.raises(ValueError, match="Linformer") as refused:
        TransformerSpec(position=ALiBi(), kernel=Linformer(), causal=False)
    assert alibi["kernel Linformer"] == str(refused.value)


@pytest.mark.parametrize("name", TECHNIQUES["pattern"])
def test_every_pattern_can_be_drawn(name, tmp_path, capsys):
    file = tmp_path / "mask.png"
    main(["techniques", "--draw", name.lower(), "--length", "70", "--output", str(file)])
    assert str(file) in capsys.readouterr().out.replace("\n", "")
    with Image.open(file) as image:
        assert image.format == "PNG"
        assert len(image.convert("L").getcolors()) > 2


def test_image_shows_the_mask():
    shown = torch.from_numpy(mask_image(Window(3), 9))
    i, j = torch.arange(9)[:, None], torch.arange(9)
    assert torch.equal(shown > 0, (i - j).abs() < 3)
    assert torch.equal(shown == 2, ((i - j).abs() < 3) & (j <= i))


def test_distinct_masks_of_layers_and_heads_are_drawn_once():
    assert list(distinct_masks(Dilated(3, 2))) == [Dilated(3, 2)]
    assert len(distinct_masks(FixedColumns(8, 1, summaries=3))) == 3
    assert list(distinct_masks(FixedColumns(8, 1, combination="by-layer")).values()) == [
        "layer 0, head 0",
        "layer 1, head 0",
    ]


def test_patterns_can_be_json():
    assert read_pattern('{"name": "Window", "size": 9}') == Window(9)
    joined = '{"name": "Either", "first": {"name": "Window", "size": 9}, "second": {"name": "Dilated"}}'
    assert read_pattern(joined) == Window(9) | Dilated()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["zigzag"], "unknown pattern 'zigzag'; choose one of fitting, Full, Window"),
        (["fitting"], "the fitting pattern depends on the memory"),
        (['{"name": "Window", "size": 0}'], "Window size must be at least 1, got 0"),
        (["{"], "{ is not valid JSON: Expecting property name"),
        (["window", "--output", "a.svg"], "--output must be a file name that ends in .png, got a.svg"),
        (["window", "--output", "b/a.png"], "--output must be in an existing folder, got b/a.png: create b"),
        (["window", "--length", "0"], "length must be at least 1, got 0"),
    ],
)
def test_errors_of_images(args, message, capsys):
    assert message in refused(capsys, "techniques", "--draw", *args)
