"""Several processes on this machine that torchrun might have started, without the seconds that it and imports take."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

from tests.waiting import HANG


def started(world: int, function: Callable[[], object]) -> list[multiprocessing.process.BaseProcess]:
    """`world` forks of this process that call it, as processes of one group if there are several."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_one, args=(rank, world, port, function)) for rank in range(world)]
    for child in children:
        child.start()
    return list(children)


def together(world: int, function: Callable[[], object], codes: tuple[int, ...] | None = None) -> None:
    """Calls it in `world` forks of this process; each must end with the status that `codes` says, 0 without."""
    assert ended(started(world, function)) == (codes or (0,) * world)


def ended(children: list[multiprocessing.process.BaseProcess], limit: float = HANG) -> tuple[int | None, ...]:
    """Their exit codes, when they have ended by themselves, together within so many seconds."""
    deadline = time.monotonic() + limit
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    alive = [rank for rank, child in enumerate(children) if child.is_alive()]
    for rank in alive:
        children[rank].kill()
    assert not alive, f"rank {', '.join(map(str, alive))} of {len(children)} has not ended within {limit:.0f} s"
    return tuple(child.exitcode for child in children)


def _one(rank: int, world: int, port: int, function: Callable[[], object]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        function()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
