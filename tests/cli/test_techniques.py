"""``rlxf techniques``."""

from rlxf.attention.techniques import TECHNIQUES
from rlxf.cli import main
from rlxf.cli.questions import QUESTIONS


def test_techniques_are_listed_by_question(capsys):
    main(["techniques"])
    shown = capsys.readouterr().out
    for axis, techniques in TECHNIQUES.items():
        assert f"{axis}: {QUESTIONS[axis]}" in shown
        assert all(f"{name}(" in shown for name in techniques)
