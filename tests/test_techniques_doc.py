"""The table of docs/techniques.md lists the techniques that there are, with their papers."""

import re

from rlxf.agents.contexts import WAYS
from rlxf.attention.techniques import HEADS, OPTIONAL, TECHNIQUES
from rlxf.cli.technique_pairs import pairs
from tests.sources import ROOT

ROW = re.compile(
    r"^\| (?:\*\*(?P<axis>\w+)\*\*: (?P<question>[^|]+\?) )?\| `(?P<name>\w+)` \|"
    r" (?P<paper>[^|]*?) ?\| (?P<causal>[^|]*?) ?\| (?P<cost>[^|]*?) ?\|",
    re.M,
)


def listed() -> list[tuple[str, ...]]:
    """(axis, name, paper, causal form, cost) of each row; an empty first cell means the axis above."""
    rows, axis = [], ""
    for row in ROW.finditer((ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")):
        axis = row["axis"] or axis
        rows.append((axis, *row.group("name", "paper", "causal", "cost")))
    return rows


def test_the_table_lists_every_technique_with_what_it_says_of_itself_and_no_other():
    there_are = [
        (axis, name, technique.paper, technique.causal, technique.cost)
        for axis, techniques in (TECHNIQUES | {"head": HEADS, "context": WAYS}).items()
        for name, technique in techniques.items()
    ]
    none = [(axis, "None", "", "", "") for axis in OPTIONAL]
    assert sorted(listed()) == sorted(there_are + none)


def test_the_page_counts_techniques_and_pairs():
    page = " ".join((ROOT / "docs" / "techniques.md").read_text(encoding="utf-8").split())
    assert f"There are {sum(map(len, TECHNIQUES.values()))} of them." in page
    for causal, told in (
        (True, "{} make a causal transformer and {} are refused"),
        (False, "{} and {} for one"),
    ):
        built = [pair.refusal is None for pair in pairs(causal)]
        assert told.format(sum(built), len(built) - sum(built)) in page
