"""Tables of docs/benchmarks.md that have their runs beside them in docs/numbers are made from these."""

from benchmarks.techniques import kept, rows, subjects

from tests.sources import ROOT

NUMBERS = ROOT / "docs" / "numbers"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()


def test_which_technique_learns_what():
    trials = list(kept(NUMBERS / "techniques.jsonl").values())
    made = ["| " + " | ".join(row) + " |" for row in rows(list(subjects()), trials)]
    first = PAGE.index(made[0])
    assert PAGE[first : first + len(made)] == made
    assert not PAGE[first + len(made)].startswith("|")
