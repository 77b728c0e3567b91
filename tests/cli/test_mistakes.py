"""A user's mistake is one line; a bug keeps its traceback."""

import os
import signal
import threading
import warnings

import pytest

from rlxf.cli import program
from rlxf.cli.mistakes import in_one_line
from rlxf.envs import FaultyEnvironmentError


def left_with(capsys, error: BaseException, *mistakes: type[Exception]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leaving, in_one_line(*mistakes):
        raise error
    return leaving.value.code, capsys.readouterr().err


def test_a_mistake_is_told_in_one_line(capsys):
    assert left_with(capsys, ValueError("7 is\n odd"), ValueError) == (2, "rlxf: 7 is odd\n")


def test_markup_in_a_message_is_left_alone(capsys):
    assert left_with(capsys, ValueError("[bold]x"), ValueError) == (2, "rlxf: [bold]x\n")


def test_ctrl_c_is_no_mistake(capsys):
    assert left_with(capsys, KeyboardInterrupt()) == (130, "rlxf: interrupted\n")


def test_anything_else_passes():
    with pytest.raises(ValueError, match="slip"), in_one_line(OSError):
        raise ValueError("slip")


class Fails:
    """A command that fails while it is prepared, or later."""

    def __init__(self, early: Exception | None = None, late: Exception | None = None):
        self.early, self.late = early, late

    def prepare(self):
        if self.early:
            raise self.early
        return self.work

    def work(self):
        raise self.late


def run(monkeypatch, command: Fails) -> None:
    monkeypatch.setattr(program, "parse", lambda args: command)
    program.main([])


@pytest.mark.parametrize("kind", [ValueError, TypeError, OSError, ImportError, NotImplementedError])
def test_what_cannot_be_built_was_asked_for_wrongly(kind, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, Fails(early=kind("no such thing")))
    assert capsys.readouterr().err == "rlxf: no such thing\n"


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AssertionError])
def test_what_goes_wrong_later_is_a_bug(kind, monkeypatch):
    with pytest.raises(kind, match="slip"):
        run(monkeypatch, Fails(late=kind("slip")))


@pytest.mark.parametrize("kind", [FaultyEnvironmentError, OSError])
def test_unless_it_comes_from_outside(kind, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, Fails(late=kind("reward is nan")))
    assert capsys.readouterr().err == "rlxf: reward is nan\n"


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGUSR1", 138)])
@pytest.mark.parametrize("early", [True, False])
def test_a_signal_ends_a_command_and_what_it_holds_is_cleaned_up(monkeypatch, capsys, name, status, early):
    held = []

    class Holds:
        def prepare(self):
            if early:
                self.work()
            return self.work

        def work(self):
            held.append("a temporary file")
            try:
                os.kill(os.getpid(), getattr(signal, name))
            finally:
                held.clear()

    before = signal.getsignal(getattr(signal, name))
    with pytest.raises(SystemExit) as leaving:
        run(monkeypatch, Holds())
    assert (leaving.value.code, held) == (status, [])
    assert capsys.readouterr().err == f"rlxf: stopped by {name}\n"
    assert signal.getsignal(getattr(signal, name)) is before


class Warns:
    """A command that says the same twice, in two places, and something to programmers."""

    def prepare(self):
        warnings.warn("far\n out", stacklevel=1)
        return self.work

    def work(self):
        warnings.warn("far\n out", stacklevel=1)
        warnings.warn("old", FutureWarning, stacklevel=1)


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line_once(monkeypatch, capsys):
    before = warnings.showwarning
    with pytest.warns(FutureWarning, match="old"):
        run(monkeypatch, Warns())
    assert capsys.readouterr().err == "rlxf: warning: far out\n"
    assert warnings.showwarning is before


class InAThread:
    """A command whose work ends with the error of a thread, as a writer of events does."""

    def __init__(self, error: Exception):
        self.error = error

    def prepare(self):
        return self.work

    def work(self):
        thread = threading.Thread(target=self.fail)
        thread.start()
        thread.join()
        self.fail()

    def fail(self):
        raise self.error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_once_and_not_by_the_thread_that_found_it(monkeypatch, capsys):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    before = threading.excepthook
    with pytest.raises(SystemExit):
        run(monkeypatch, InAThread(OSError("full")))
    assert (told, capsys.readouterr().err) == ([], "rlxf: full\n")
    with pytest.raises(KeyError):
        run(monkeypatch, InAThread(KeyError("slip")))
    assert [thrown.exc_type for thrown in told] == [KeyError]
    assert threading.excepthook is before
