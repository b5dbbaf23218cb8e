"""make chaos: a small run is killed, damaged and starved at random, and must end as if nothing had been.

    python -m tests.chaos [--kills 100] [--seed 0]

One process ends bit for bit as uninterrupted, with each update once in metrics.jsonl; several with the same samples,
masks and hits, and losses within 1e-5. What a seed draws are the places, in updates or in shares of the time that an
uninterrupted run takes; the machine decides what is hit there. The last line has the counts, also of one that fails or
that takes longer than `--minutes`: exit status 1 then.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from maelm_fast.config import ParallelConfig
from maelm_fast.data.prepare import PrepareConfig, prepare
from maelm_fast.errors import UserError
from maelm_fast.training.job import pretrain
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.trainer import MaeLm, Trainer
from tests.conftest import generated_text
from tests.processes import ended, started
from tests.training import cases
from tests.training.test_run import config, rows

STEPS, SAVE_EVERY = 24, 3
LIMIT = 100.0
"""Seconds in which whatever is waited for must have ended."""
TIMEOUT = 15.0
"""runtime.parallel.timeout_s of the runs of several processes."""
LOST = ["a loader process was killed by SIGKILL"]
NEAR = ("loss", "grad_norm", "val_loss", "val_perplexity")


def asked(**runtime: Any) -> dict[str, dict[str, Any]]:
    changes = {"save_every": SAVE_EVERY, "eval_every": 8, "keep_checkpoints": 3, **runtime}
    return {"optim": {"max_steps": STEPS}, "runtime": changes, "metrics": {"rank_every": 0}}


class Chaos:
    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.draw, self.counts = place, random.Random(seed), collections.Counter[str]()
        self.text, self.said = place / "corpus.txt", place / "said.txt"
        self.mark = f"CHAOS={place}"
        os.environ["CHAOS"] = str(place)  # by which programs that were started here are known
        self.text.write_text(generated_text(400), encoding="utf-8")
        self.store, self.whole, self.small = (place / name for name in ("store", "whole", "small"))

    def begin(self) -> None:
        """What all else is compared with."""
        self.prepare_s = self.timed(lambda: self.prepare(self.store))
        self.run_s = self.timed(lambda: self.pretrain(self.whole))

    def prepare(self, out: Path) -> None:
        options = {"vocab_size": 300, "seq_len": 32, "validation": 0.1, "workers": 1}
        prepare(PrepareConfig(inputs=(str(self.text),), out=out, **options), log=lambda _: None)

    def pretrain(self, out: Path, store: Path | None = None, **runtime: Any) -> None:
        with cases.Watched({"out": out}):
            pretrain(config(**asked(**runtime)), str(store or self.store), str(out), several=True)

    def fork(self, function: Callable[[], object], world: int = 1) -> list[Any]:
        """In processes of their own, which say what they say into a file."""

        def quietly() -> None:
            said = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            try:
                function()
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(2)

        return started(world, quietly)

    def torchrun(self, out: Path) -> None:
        """Becomes the torchrun of a run of two processes."""
        case = {"strategy": "ddp", "out": str(out), "store": str(self.store), "sections": asked()}
        plan = out.with_suffix(".json")
        plan.write_text(json.dumps([LIMIT, [case]]))
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        os.execv(sys.executable, [sys.executable, *module, cases.__file__, str(plan)])

    def programs(self, word: str = "") -> list[int]:
        """Processes that were not forked but started, with that word in their command, and live."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = self.mark.encode() in (process / "environ").read_bytes().split(b"\0")
                if ours and word.encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, f"not within {LIMIT:.0f} s: {what}"
            time.sleep(0.005)

    def some_updates(self, child: Any, out: Path) -> None:
        """Until a drawn number of them is done."""
        file, lines = RunDir(out).metrics_file, self.draw.randrange(1, STEPS - 4)
        done = lambda: file.exists() and file.read_bytes().count(b"\n") >= lines  # noqa: E731
        self.wait(lambda: done() or not child.is_alive(), f"{lines} rows in {file}")

    def errors(self, since: int) -> list[str]:
        """Their lines among what has been said since then, and that no traceback was."""
        said = self.said.read_bytes()[since:].decode(errors="replace")
        assert "Traceback" not in said
        return re.findall("^error: (.*)", said, re.MULTILINE)

    def end(self, children: list[Any]) -> tuple[int | None, ...]:
        return ended(children, LIMIT)

    def timed(self, function: Callable[[], object]) -> float:
        begin = time.monotonic()
        assert self.end(self.fork(function)) == (0,)
        return time.monotonic() - begin

    def killed(self, function: Callable[[], object], seconds: float, kills: int, what: str) -> None:
        """Calls it again and again until it has been killed so often, or ends; it is allowed to end in between."""
        for _ in range(kills):
            torn = self.torn()
            (child,) = self.fork(function)
            child.join(self.draw.uniform(0.0, 1.1) * seconds)
            if child.is_alive():
                child.kill()
                self.counts[what] += 1
            code = self.end([child])[0]
            assert code in (0, -signal.SIGKILL), f"{what}: status {code}"
            self.counts["of them in a save"] += bool(self.torn() - torn)
            if code == 0:
                return

    def torn(self) -> set[int]:
        """Checkpoints that were not written to their end."""
        return {path.stat().st_ino for path in self.place.glob("run*/checkpoints/.step_*.tmp")}

    def same(self, run: Path, whole: Path | None = None) -> None:
        """Bit for bit, and each update once."""
        whole = whole or self.whole
        assert [row["step"] for row in rows(run) if row["kind"] == "train"] == list(range(1, STEPS + 1))
        assert rows(run) == rows(whole)
        for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
            assert RunDir(run).checkpoint(STEPS).joinpath(name).read_bytes() == (
                RunDir(whole).checkpoint(STEPS).joinpath(name).read_bytes()
            ), name
        self.counts["runs compared bit for bit"] += 1

    def near(self, run: Path) -> None:
        """The samples and masks are those of the uninterrupted run, also where an update was computed twice."""
        assert {*cases.seen(run)} == {*cases.seen(self.whole)}
        for mine, theirs in zip(rows(run), rows(self.whole), strict=True):
            for key, value in theirs.items():
                assert abs(mine[key] - value) < 1e-5 * abs(value) if key in NEAR else mine[key] == value, (key, mine)
        self.counts["runs of several processes compared"] += 1

    # What is done to it

    def kills_of_a_run(self, kills: int, number: int = 0) -> None:
        """At any time, also while it saves, in the step or in a thread."""
        out = self.place / f"run{number}"
        saves = {"async_save": bool(number % 2), "save_every": self.draw.choice((1, SAVE_EVERY))}

        def run() -> None:
            self.pretrain(out, **saves)

        self.killed(run, self.run_s, kills - self.counts["kills of a run"], "kills of a run")
        assert self.end(self.fork(run)) == (0,)
        self.same(out)
        shutil.rmtree(out)
        if self.counts["kills of a run"] < kills:
            self.kills_of_a_run(kills, number + 1)

    def kills_of_prepare(self, kills: int) -> None:
        expected = {path.name: path.read_bytes() for path in self.store.iterdir()}
        out, what = self.place / "again", "kills of data prepare"
        while self.counts[what] < kills:
            self.killed(lambda: self.prepare(out), self.prepare_s, kills - self.counts[what], what)
            assert self.end(self.fork(lambda: self.prepare(out))) == (0,)
            assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
            shutil.rmtree(out)
            self.counts["stores compared byte for byte"] += 1

    def damaged_checkpoint(self, cut: bool) -> None:
        run = Path(shutil.copytree(self.whole, self.place / "damaged"))
        shutil.rmtree(run / "checkpoints" / f"step_{STEPS}")
        newest = run / "checkpoints" / f"step_{STEPS - SAVE_EVERY}"
        self.damage(self.draw.choice(sorted(newest.iterdir())), cut)
        assert self.end(self.fork(lambda: self.pretrain(run))) == (0,)
        self.same(run)
        shutil.rmtree(run)
        self.counts["damaged checkpoints"] += 1

    def damaged_store(self, cut: bool, begun: bool) -> None:
        """Exit code 2, at a first start and at a later one."""
        store, run = Path(shutil.copytree(self.store, self.place / "flipped")), self.place / "refused"
        if begun:
            (child,) = self.fork(lambda: self.pretrain(run, store))
            child.join(self.draw.uniform(0.3, 1.0) * self.run_s)
            child.kill()
            child.join()
        self.damage(self.draw.choice(sorted(store.glob("*.arrow"))), cut)
        assert self.end(self.fork(lambda: self.pretrain(run, store))) == (2,)
        shutil.rmtree(store)
        shutil.rmtree(run, ignore_errors=True)
        self.counts["damaged stores refused"] += 1

    def damage(self, path: Path, cut: bool) -> None:
        content = bytearray(path.read_bytes())
        place = self.draw.randrange(len(content))
        if cut:
            content = content[:place]
        else:
            content[place] ^= 1 << self.draw.randrange(8)
        path.write_bytes(content)

    def full_file_system(self, what: str, function: Callable[[Path], None], room: float) -> Path | None:
        """In one of its own, of whose last bytes a drawn share of `room` is free, the function ends with one line or
        does without what it cannot save; when all is free, as if nothing had been. Returns a copy of what it made."""
        free, size, copy = int(self.draw.uniform(0.0, 1.0) * room), int(room) + (1 << 20), self.place / f"full_{what}"

        def inside() -> None:
            try:
                mount_tmpfs(self.small, size)
            except OSError as error:
                print(f"no tmpfs can be mounted here: {error}")
                sys.exit(11)
            out, filler, before = self.small / "out", self.small / "filler", self.said.stat().st_size
            filler.write_bytes(bytes(size - free))
            (code,) = self.end(self.fork(lambda: function(out)))
            assert code in (0, 2), code
            errors = self.errors(before)
            assert len(errors) == bool(code), errors
            assert all("No space left on device" in error for error in errors), errors
            filler.unlink()
            assert self.end(self.fork(lambda: function(out))) == (0,)
            shutil.copytree(out, copy)
            sys.exit(10 if code else 0)

        self.small.mkdir(exist_ok=True)
        (code,) = self.end(self.fork(inside))
        if code == 11:
            self.counts[f"full file systems for {what} NOT tried, since none can be mounted here"] += 1
            return None
        assert code in (0, 10), f"{what} in a full file system: status {code}"
        self.counts[f"full file systems for {what}"] += 1
        self.counts["of them ended it"] += code == 10
        return copy

    def full_file_systems(self) -> None:
        expected = {path.name: path.read_bytes() for path in self.store.iterdir()}
        made = self.full_file_system("data prepare", self.prepare, 3 * sum(map(len, expected.values())))
        if made is not None:
            assert {path.name: path.read_bytes() for path in made.iterdir()} == expected
            shutil.rmtree(made)
        saved = sum(file.stat().st_size for file in RunDir(self.whole).checkpoint(STEPS).iterdir())
        made = self.full_file_system("a run", self.pretrain, 4.5 * saved)
        if made is not None:
            self.same(made)
            shutil.rmtree(made)

    def dead_loader(self, number: int) -> None:
        """The run says so in one line, and the next start goes on."""
        out, before = self.place / f"loader{number}", self.said.stat().st_size
        (child,) = self.fork(lambda: self.pretrain(out, workers=1))
        self.some_updates(child, out)
        for process in self.programs("spawn_main"):
            os.kill(process, signal.SIGKILL)
            self.counts["loaders killed"] += 1
        (code,) = self.end([child])
        assert code in (0, 2), f"a loader was killed: status {code}"
        assert [error.partition(";")[0] for error in self.errors(before)] == LOST[:code]
        self.counts["of them ended the run"] += code == 2
        assert self.end(self.fork(lambda: self.pretrain(out))) == (0,)
        self.same(out)

    def dead_parent(self, number: int, of: str) -> None:
        """The parent alone is killed, of a loader or, as torchrun, of two processes: nothing is left running, and the
        next start goes on."""
        out = self.place / f"orphans{number}"
        (child,) = self.fork(lambda: self.torchrun(out) if of == "ranks" else self.pretrain(out, workers=1))
        self.some_updates(child, out)
        if child.is_alive():
            child.kill()
            self.counts[f"parents of {of} killed"] += 1
        child.join()
        self.wait(lambda: not self.programs(), f"the end of processes whose parent was killed, {self.programs()}")
        assert self.end(self.fork(lambda: self.pretrain(out))) == (0,)
        self.near(out) if of == "ranks" else self.same(out)

    def under(self, what: str, change: Callable[[], contextlib.AbstractContextManager], **runtime: Any) -> Path:
        """A run with something changed in its process, to its end."""
        out = self.place / what.replace(" ", "_")

        def changed() -> None:
            with change():
                self.pretrain(out, **runtime)

        assert self.end(self.fork(changed)) == (0,), what
        self.counts[what] += 1
        return out

    def several(self, number: int) -> None:
        """One of some processes is killed, or stands still: the others end too, and another number of them goes on."""
        out = self.place / f"several{number}"
        for world, strategy in ((2, "ddp"), (3, "fsdp")):
            asked_of = ParallelConfig(strategy=strategy, timeout_s=TIMEOUT)
            before = self.said.stat().st_size
            self.damage_newest(out)
            children = self.fork(functools.partial(self.pretrain, out, parallel=asked_of), world)
            children[0].join(self.draw.uniform(0.5, 3.0) * self.run_s)
            rank, stands = self.draw.randrange(world), self.draw.random() < 0.5
            victim, others = children[rank], [child for child in children if child is not children[rank]]
            hit = victim.is_alive()
            if hit:
                os.kill(victim.pid, signal.SIGSTOP if stands else signal.SIGKILL)
            begin = time.monotonic()
            codes = self.end(others)
            seconds, errors = time.monotonic() - begin, self.errors(before)
            victim.kill()
            victim.join()
            what = f"rank {rank} of {world} ({strategy}) {'stands still' if stands else 'was killed'}"
            assert set(codes) <= {0, 2}, f"{what}: the others ended with {codes}"
            if hit:
                self.counts[f"{'stops' if stands else 'kills'} of one of several"] += 1
                assert seconds < TIMEOUT + 30, f"{what}: the others ended {seconds:.0f} s later"
            if hit and stands and 2 in codes:
                assert any(f"rank {rank}: " in error for error in errors), f"{what}: it is not named, but {errors}"
                self.counts["named"] += 1
        self.damage_newest(out)
        assert self.end(self.fork(lambda: self.pretrain(out))) == (0,)
        self.near(out)

    def damage_newest(self, run: Path) -> None:
        """If there is another one to go back to."""
        *before, newest = [0, *RunDir(run).steps()]
        if len(before) > 1:
            self.damage(self.draw.choice(sorted(RunDir(run).checkpoint(newest).iterdir())), self.draw.random() < 0.5)
            self.counts["damaged checkpoints of several"] += 1


def mount_tmpfs(place: Path, size: int) -> None:
    """For this process and its children alone, by names of its own for users and file systems, so that nobody need be
    root; it goes when they end. Raises OSError where that is not allowed, in some containers."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()

    def call(status: int) -> None:
        if status:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    for name, value in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(value)
    call(libc.mount(b"tmpfs", bytes(place), b"tmpfs", ctypes.c_ulong(0), f"size={size}".encode()))


CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # linux/sched.h


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 kB for the first half of the run: the disk is full for checkpoints."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    update = Trainer.update

    def relieved(self: Trainer, *rest: Any) -> Any:
        if self.progress.step == STEPS // 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        return update(self, *rest)

    Trainer.update = relieved  # type: ignore[method-assign]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield


@contextlib.contextmanager
def jumping_clock() -> Iterator[None]:
    """The time of day goes back and forth by years."""
    now, draw = time.time, random.Random(0)
    time.time = lambda: now() + draw.uniform(-1e8, 1e8)
    yield


@contextlib.contextmanager
def slow_loader() -> Iterator[None]:
    updates = Trainer.updates

    def slow(self: Trainer) -> Iterator[Any]:
        for batch in updates(self):
            time.sleep(0.02)
            yield batch

    Trainer.updates = slow  # type: ignore[method-assign]
    yield


@contextlib.contextmanager
def one_nan() -> Iterator[None]:
    """The sixth update's loss is NaN, whenever it is computed."""
    update, forward = Trainer.update, MaeLm.forward
    here = [False]

    def noted(self: Trainer, *rest: Any) -> Any:
        here[0] = self.progress.step == 5
        return update(self, *rest)

    def spoilt(self: MaeLm, *rest: Any, **named: Any) -> Any:
        loss, correct = forward(self, *rest, **named)
        return (loss * float("nan") if here[0] and self.training else loss), correct

    Trainer.update, MaeLm.forward = noted, spoilt  # type: ignore[method-assign]
    yield


def everything(chaos: Chaos, kills: int) -> None:
    chaos.kills_of_a_run(kills)
    chaos.kills_of_prepare(max(1, kills // 5))
    for number in range(max(1, kills // 12)):
        chaos.damaged_checkpoint(cut=bool(number % 2))
        chaos.damaged_store(cut=bool(number % 2), begun=number % 4 < 2)
    full = chaos.under("full disk for half a run", small_files)
    assert min(RunDir(full).steps()) > STEPS // 2
    chaos.same(full)
    for what, change in (("clock jumps", jumping_clock), ("slow loader", slow_loader)):
        chaos.same(chaos.under(what, change))
    nan = chaos.under("update with NaN", one_nan)
    assert [row["skipped"] for row in rows(nan) if row["kind"] == "train"] == [0] * 5 + [1] * (STEPS - 5)
    for number in range(max(1, kills // 25)):
        chaos.full_file_systems()
        chaos.several(number)
    for number in range(max(1, kills // 50)):
        chaos.dead_loader(number)
        chaos.dead_parent(2 * number, "ranks")
        chaos.dead_parent(2 * number + 1, "loaders")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="in which all of it must be done (default: 20)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin, failed = time.monotonic(), ""

    def too_long(*_: object) -> None:
        raise AssertionError(f"not done within {options.minutes:g} minutes")

    signal.signal(signal.SIGALRM, too_long)  # forks do not inherit the alarm
    signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        chaos = Chaos(Path(place), options.seed)
        try:
            chaos.begin()
            everything(chaos, options.kills)
        except Exception:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if chaos.said.exists():
                print("\n".join(chaos.said.read_text(errors="replace").splitlines()[-60:]), file=sys.stderr)
            traceback.print_exc()
            failed = "FAILED after "
        finally:
            for child in multiprocessing.active_children():
                child.kill()
                child.join()
    counts = ", ".join(f"{count} {what}" for what, count in chaos.counts.items()) or "nothing"
    print(f"chaos, seed {options.seed}: {failed}{counts}; {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
