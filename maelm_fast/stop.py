"""A stop by signal. SIGTERM and SIGINT only ask for one: the loop in hand looks for it after each update, saves, and
raises Stopped, which ends whatever else the program was going to do."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

Stop = Callable[[], signal.Signals | bool | None]
"""Asked again and again whether to stop: StopSignals, or any function."""


class Stopped(SystemExit):
    """The work was asked to stop, and can be resumed by the same call. step: where it resumes, if it trained.

    A SystemExit: where nobody catches it, the program ends with the status that the signal would have given it, 128 and
    its number, so that of `pretrain && export` the second does not run."""

    def __init__(self, step: int | None = None, received: signal.Signals | bool | None = None) -> None:
        """received: what asked for it; SIGTERM unless it is a signal."""
        self.step = step
        self.received = received if isinstance(received, signal.Signals) else signal.SIGTERM
        super().__init__(128 + self.received)

    def __str__(self) -> str:
        return f"{self.received.name}: stopped" + (f" at step {self.step:,}" if self.step is not None else "")


class StopSignals:
    """Within the block, `received` is the signal that asked for a stop, if one did; calling the object returns it. A
    second SIGINT interrupts at once. A block inside another tells the outer one. Outside the main thread signals stay
    the host program's business."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._ask)
        except ValueError:  # not the main thread
            pass
        return self

    def __call__(self) -> signal.Signals | None:
        return self.received

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        outer = self._previous[self.received]
        if isinstance(getattr(outer, "__self__", None), StopSignals):
            outer(number, frame)


def end_with_parent() -> None:
    """From here on this process, which multiprocessing has started, gets SIGTERM when its parent is gone. Even a parent
    that was killed and could say nothing takes it along; what waits for work would wait for ever."""
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
