"""torchrun with --nnodes=1:4: a machine dies, and the same command goes on with those that are left; it comes back, and
goes on with them. Two agents on this machine stand for two machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maelm_fast.training.rundir import RunDir
from tests.training.runs import rows
from tests.training.test_parallel import ROOT, assert_alike, by_one, case, written
from tests.waiting import HANG, wait_until

NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torchrun's agents keep what they agreed on in their first round, and one that comes later waits for it in vain
(torch 2.13: DistStoreError after a minute, in all of them)."""
Agent = subprocess.Popen[str]


@pytest.fixture
def agent(tmp_path: Path) -> Callable[[str], Agent]:
    """Starts one, of one process, that prints into a file of that name. They meet at the one called "first"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    # how long the others wait for more machines, and how soon one counts as dead: 30 and 15 s if not told
    sooner = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"

    def start(name: str) -> Agent:
        options = "--nnodes 1:4 --nproc-per-node 1 --max-restarts 3 --monitor-interval 0.1 "
        options += f"--rdzv-conf {sooner},is_host={int(name == 'first')} "
        options += f"--rdzv-backend c10d --rdzv-endpoint {place} --rdzv-id elastic"
        script = [str(ROOT / "tests" / "training" / "cases.py"), str(tmp_path / "plan.json")]
        with open(tmp_path / name, "w") as file:
            child = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options.split(), *script],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **NO_SHARED_STORE},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        started.append(child)
        return child

    yield start
    for child in started:
        die(child)


def die(agent: Agent) -> None:
    """As with its machine, all at once."""
    if agent.poll() is None:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
        for process in (agent.pid, *map(int, children.split())):
            os.kill(process, signal.SIGKILL)
        agent.wait()


@pytest.mark.slow
def test_a_machine_dies_and_comes_back(agent: Callable[[str], Agent], document_store: Path, tmp_path: Path) -> None:
    there = case(document_store, tmp_path / "run", 3, 30)
    run, until = RunDir(there["out"]), Path(there["out"] + ".until")
    written([there], tmp_path)

    def held_before(step: int, world: int) -> Callable[[], bool]:
        def held() -> bool:
            at_work = [start["processes"] for start in run.starts()][-1:] == [world]
            return at_work and [row["step"] for row in rows(run.path)][-1:] == [step]

        return held

    until.write_text("9")
    first, second = agent("first"), agent("second")
    wait_until(held_before(9, world=2), first)
    die(second)
    until.write_text("19")
    wait_until(held_before(19, world=1), first)
    third = agent("third")
    wait_until(lambda: run.steps()[-1:] == [20], first)
    until.unlink()
    assert (first.wait(HANG), third.wait(HANG)) == (0, 0)

    assert [start["processes"] for start in run.starts()] == [2, 1, 2]
    said = (tmp_path / "first").read_text() + (tmp_path / "third").read_text()
    assert "SIGTERM: saved at step 20; the same command resumes from there\n" in said
    assert_alike(run.path, by_one(there, tmp_path / "whole"), again=True)
