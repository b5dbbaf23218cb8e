"""Waiting for other processes: for what they do, not for a time, so that a machine under load fails no test."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

HANG = 900.0
"""Seconds after which a process counts as hanging; no test may depend on a shorter time."""


def wait_until(condition: Callable[[], object], child: subprocess.Popen[str] | None = None) -> None:
    """Until it is true; fails at once if the child that is to make it true has ended, with what it printed."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert child is None or child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline, "what is waited for does not happen"
        time.sleep(0.01)
