"""Signals ask for a stop, a second Ctrl-C does not ask; afterwards they are the host program's again."""

from __future__ import annotations

import signal
import threading

import pytest

from maelm_fast.stop import Stopped, StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_wish_and_a_second_sigint_an_order(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals() as stop:
        assert stop.received is None
        signal.raise_signal(number)
        assert stop.received == number
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        else:
            signal.raise_signal(number)
            assert stop.received == number
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, received = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopSignals() as stop:
            received.append((stop.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert received == [(None, before)]


def test_who_waits_outside_is_told_too() -> None:
    with StopSignals() as outer:
        with StopSignals() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert inner() == outer() == signal.SIGTERM


@pytest.mark.parametrize(("received", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (True, 143)])
def test_a_stop_that_nobody_catches_ends_the_program_as_its_signal_would(
    received: signal.Signals | bool, code: int
) -> None:
    stopped = Stopped(1234, received)
    assert str(stopped) == f"{signal.Signals(code - 128).name}: stopped at step 1,234"
    with pytest.raises(SystemExit) as ended:
        raise stopped
    assert ended.value.code == code
    assert not isinstance(stopped, Exception), "it is no failure of the work in hand"
