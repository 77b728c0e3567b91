"""Tests of signals that stop a run."""

import os
import signal
import threading

import pytest

from rlxf.utils.signals import SIGNALS, ReceivedSignal, raise_on_signal, signal_handler, stop_on_signals


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signal_sets_the_stop_request(number):
    with stop_on_signals() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal is number


@pytest.mark.parametrize("first", SIGNALS, ids=lambda number: number.name)
def test_second_ctrl_c_interrupts(first):
    with stop_on_signals():
        os.kill(os.getpid(), first)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_previous_handlers_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_previous_handlers_are_restored_after_an_error():
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ZeroDivisionError), stop_on_signals():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_no_effect_in_another_thread():
    observed = []

    def work():
        with stop_on_signals() as stop:
            observed.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert observed == [None]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_raises_at_once(number):
    before = signal.getsignal(number)
    with pytest.raises(ReceivedSignal) as stopped, signal_handler(raise_on_signal):
        os.kill(os.getpid(), number)
    assert stopped.value.signal is number
    assert signal.getsignal(number) is before


def test_a_handler_of_some_signals_leaves_the_others():
    before = signal.getsignal(signal.SIGINT)
    with signal_handler(raise_on_signal, [signal.SIGTERM]):
        assert signal.getsignal(signal.SIGINT) is before
        assert signal.getsignal(signal.SIGTERM) is raise_on_signal
