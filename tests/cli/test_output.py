"""Tests of error reporting: user errors are one line, bugs keep their traceback."""

import io
import os
import signal
import sys
import threading
import warnings

import pytest

from rlxf.cli import entry_point
from rlxf.cli.output import replace_unprintable_characters, report_errors
from rlxf.envs import FaultyEnvironmentError


def exit_status(capsys, error: BaseException, *reported: type[Exception]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as exit_info, report_errors(*reported):
        raise error
    return exit_info.value.code, capsys.readouterr().err


def test_user_errors_are_one_line(capsys):
    assert exit_status(capsys, ValueError("7 is\n odd"), ValueError) == (2, "rlxf: 7 is odd\n")


def test_markup_in_messages_is_not_interpreted(capsys):
    assert exit_status(capsys, ValueError("[bold]x"), ValueError) == (2, "rlxf: [bold]x\n")


def test_control_characters_do_not_reach_the_terminal(capsys):
    assert exit_status(capsys, ValueError("a\x1b[31m\x07b"), ValueError) == (2, "rlxf: a\\x1b[31m\\x07b\n")


def test_other_errors_propagate():
    with pytest.raises(ValueError, match="slip"), report_errors(OSError):
        raise ValueError("slip")


class Fails:
    """Command that fails in ``prepare`` or later."""

    def __init__(self, early: Exception | None = None, late: Exception | None = None):
        self.early, self.late = early, late

    def prepare(self):
        if self.early:
            raise self.early
        return self.work

    def work(self):
        raise self.late


def run(monkeypatch, command: Fails) -> None:
    monkeypatch.setattr(entry_point, "parse", lambda args: command)
    entry_point.main([])


@pytest.mark.parametrize("kind", [ValueError, TypeError, OSError, ImportError, NotImplementedError])
def test_errors_in_prepare_are_user_errors(kind, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, Fails(early=kind("no such thing")))
    assert capsys.readouterr().err == "rlxf: no such thing\n"


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AssertionError])
def test_later_errors_are_bugs(kind, monkeypatch):
    with pytest.raises(kind, match="slip"):
        run(monkeypatch, Fails(late=kind("slip")))


@pytest.mark.parametrize("kind", [FaultyEnvironmentError, OSError])
def test_later_errors_with_external_causes_are_user_errors(kind, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, Fails(late=kind("reward is nan")))
    assert capsys.readouterr().err == "rlxf: reward is nan\n"


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("SIGTERM", 143, "stopped by SIGTERM"),
        ("SIGUSR1", 138, "stopped by SIGUSR1"),
        ("SIGINT", 130, "interrupted"),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_signals_end_a_command_after_cleanup(monkeypatch, capsys, name, status, message, early):
    resources = []

    class Command:
        def prepare(self):
            if early:
                self.work()
            return self.work

        def work(self):
            resources.append("a temporary file")
            try:
                os.kill(os.getpid(), getattr(signal, name))
            finally:
                resources.clear()

    before = signal.getsignal(getattr(signal, name))
    with pytest.raises(SystemExit) as exit_info:
        run(monkeypatch, Command())
    assert (exit_info.value.code, resources) == (status, [])
    assert capsys.readouterr().err == f"rlxf: {message}\n"
    assert signal.getsignal(getattr(signal, name)) is before


class Warns:
    """Command that emits the same `UserWarning` twice, and a `FutureWarning`."""

    def prepare(self):
        warnings.warn("far\n out", stacklevel=1)
        return self.work

    def work(self):
        warnings.warn("far\n out", stacklevel=1)
        warnings.warn("old", FutureWarning, stacklevel=1)


@pytest.mark.filterwarnings("always")
def test_warnings_are_printed_once_in_one_line(monkeypatch, capsys):
    before = warnings.showwarning
    with pytest.warns(FutureWarning, match="old"):
        run(monkeypatch, Warns())
    assert capsys.readouterr().err == "rlxf: warning: far out\n"
    assert warnings.showwarning is before


class InAThread:
    """Command that fails with an error that also occurred in a thread, like that of an event writer."""

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
def test_disk_errors_of_threads_are_reported_once(monkeypatch, capsys):
    hooked = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    before = threading.excepthook
    with pytest.raises(SystemExit):
        run(monkeypatch, InAThread(OSError("full")))
    assert (hooked, capsys.readouterr().err) == ([], "rlxf: full\n")
    with pytest.raises(KeyError):
        run(monkeypatch, InAThread(KeyError("slip")))
    assert [args.exc_type for args in hooked] == [KeyError]
    assert threading.excepthook is before


def test_characters_that_an_encoding_lacks_are_replaced(monkeypatch):
    """A table after a training must not fail it."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    replace_unprintable_characters()
    print("1 \u00b1 2")  # raised an error before
    output.flush()
    assert output.buffer.getvalue() == b"1 ? 2\n"
