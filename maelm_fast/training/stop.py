"""Signals as a wish: SIGTERM and SIGINT ask for a stop after the update in hand, which the loop looks for."""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any, Self


class StopSignals:
    """Within the block, `received` is the signal that asked for a stop, if one did. A second SIGINT interrupts at once.
    Outside the main thread signals stay the host program's business."""

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
