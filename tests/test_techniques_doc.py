"""The table of docs/techniques.md lists the techniques that there are, with their papers."""

import re

from rlxf.attention.techniques import OPTIONAL, TECHNIQUES
from tests.sources import ROOT

ROW = re.compile(
    r"^\| (?:\*\*(?P<axis>\w+)\*\*: (?P<question>[^|]+\?) )?\| `(?P<name>\w+)` \| (?P<paper>[^|]*?) ?\|", re.M
)


def listed() -> list[tuple[str, str, str]]:
    """(axis, name, paper) of each row; an empty first cell means the axis above."""
    rows, axis = [], ""
    for row in ROW.finditer((ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")):
        axis = row["axis"] or axis
        rows.append((axis, row["name"], row["paper"]))
    return rows


def test_the_table_lists_every_technique_with_its_paper_and_no_other():
    there_are = [
        (axis, name, technique.paper)
        for axis, techniques in TECHNIQUES.items()
        for name, technique in techniques.items()
    ]
    none = [(axis, "None", "") for axis in OPTIONAL]
    assert sorted(listed()) == sorted(there_are + none)
