"""Signals ask to stop; what they did before comes back."""

import os
import signal
import threading

import pytest

from rlxf.training.stopping import SIGNALS, Stopped, handled, raise_stopped, stop_on_signals


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_asks_to_stop(number):
    with stop_on_signals() as stop:
        assert stop.by is None
        os.kill(os.getpid(), number)
        assert stop.by is number


@pytest.mark.parametrize("first", SIGNALS, ids=lambda number: number.name)
def test_a_second_one_of_the_keyboard_ends_at_once(first):
    with stop_on_signals():
        os.kill(os.getpid(), first)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_they_did_before_comes_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_so_it_does_after_an_error():
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ZeroDivisionError), stop_on_signals():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_another_thread_is_left_alone():
    found = []

    def work():
        with stop_on_signals() as stop:
            found.append(stop.by)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_work_that_can_be_repeated_ends_at_once(number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped, handled(raise_stopped):
        os.kill(os.getpid(), number)
    assert stopped.value.by is number
    assert signal.getsignal(number) is before
