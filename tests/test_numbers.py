"""Tests that tables of docs/benchmarks.md agree with the runs in docs/numbers."""

from benchmarks.techniques import kept, rows, subjects

from tests.sources import ROOT

NUMBERS = ROOT / "docs" / "numbers"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()


def test_table_of_techniques():
    trials = list(kept(NUMBERS / "techniques.jsonl").values())
    lines = ["| " + " | ".join(row) + " |" for row in rows(list(subjects()), trials)]
    first = PAGE.index(lines[0])
    assert PAGE[first : first + len(lines)] == lines
    assert not PAGE[first + len(lines)].startswith("|")
