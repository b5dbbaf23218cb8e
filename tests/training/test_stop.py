"""Signals ask for a stop, a second Ctrl-C does not ask; afterwards they are the host program's again."""

from __future__ import annotations

import signal
import threading

import pytest

from maelm_fast.training.stop import StopSignals


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
