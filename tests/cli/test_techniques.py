"""``rlxf techniques``."""

from rlxf.attention import ALiBi
from rlxf.attention.techniques import TECHNIQUES
from rlxf.cli import main
from rlxf.cli.questions import QUESTIONS
from rlxf.cli.techniques import with_memory


def test_techniques_are_listed_by_question(capsys):
    main(["techniques"])
    shown = capsys.readouterr().out
    for axis, techniques in TECHNIQUES.items():
        assert f"{axis}: {QUESTIONS[axis]}" in shown
        assert all(f"{name}(" in shown for name in techniques)


def test_each_says_whose_causal_form_it_is_what_it_costs_and_whether_it_goes_with_memory(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    main(["techniques"])
    shown = capsys.readouterr().out
    for name, technique in ((name, one) for table in TECHNIQUES.values() for name, one in table.items()):
        row = shown.split(f"│ {name}(")[1].split(technique.paper)[0]
        assert f"causal form: {technique.causal}; cost: {technique.cost}; with memory: yes" in row


class Forgetful:
    """A position that no memory goes with."""

    def build(self, width, heads):
        raise ValueError("no")

    build_embedding = build


def test_what_goes_with_no_memory_is_told(monkeypatch):
    monkeypatch.setitem(TECHNIQUES["position"], "Forgetful", Forgetful)
    assert with_memory("position", Forgetful()) == "no"
    assert with_memory("position", ALiBi()) == "yes"
