"""Tests of the table of techniques in docs/reference/techniques.md."""

import re

from rlxf.agents.contexts import CONTEXT_MERGERS
from rlxf.attention.registry import HEADS, OPTIONAL, TECHNIQUES
from rlxf.cli.commands.techniques import CONTEXT_QUESTION, HEAD_QUESTION, pairs
from rlxf.cli.spec_options import QUESTIONS
from tests.sources import ROOT

ROW = re.compile(
    r"^\| (?:\*\*(?P<axis>\w+)\*\*: (?P<question>[^|]+\?) )?\| `(?P<name>\w+)` \|"
    r" (?P<paper>[^|]*?) ?\| (?P<causal>[^|]*?) ?\| (?P<cost>[^|]*?) ?\|",
    re.M,
)


def listed() -> list[tuple[str, ...]]:
    """Return (axis, name, paper, causal form, cost) of each row; an empty axis is that of the row above."""
    rows, axis = [], ""
    for row in ROW.finditer((ROOT / "docs" / "reference" / "techniques.md").read_text(encoding="utf-8")):
        axis = row["axis"] or axis
        rows.append((axis, *row.group("name", "paper", "causal", "cost")))
    return rows


def test_table_lists_all_techniques_with_their_metadata():
    expected = [
        (axis, name, technique.paper, technique.causal_form, technique.cost)
        for axis, techniques in (TECHNIQUES | {"head": HEADS, "context": CONTEXT_MERGERS}).items()
        for name, technique in techniques.items()
    ]
    none = [(axis, "None", "", "", "") for axis in OPTIONAL]
    assert sorted(listed()) == sorted(expected + none)


def test_questions_of_the_axes_are_those_of_the_help_texts():
    page = (ROOT / "docs" / "reference" / "techniques.md").read_text(encoding="utf-8")
    questions = {row["axis"]: row["question"] for row in ROW.finditer(page) if row["axis"]}
    assert questions == QUESTIONS | {"head": HEAD_QUESTION, "context": CONTEXT_QUESTION}


def test_page_has_the_numbers_of_techniques_and_pairs():
    page = " ".join((ROOT / "docs" / "reference" / "techniques.md").read_text(encoding="utf-8").split())
    assert f"There are {sum(map(len, TECHNIQUES.values()))} techniques." in page
    for causal, sentence in (
        (True, "{} can be combined in a causal transformer, and {} raise an error"),
        (False, "bidirectional transformer, the numbers are {} and {}."),
    ):
        built = [not error for *_, error in pairs(causal)]
        assert sentence.format(sum(built), len(built) - sum(built)) in page
