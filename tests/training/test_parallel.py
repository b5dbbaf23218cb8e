"""Several processes compute what one does, whoever shares the work; and who is named when one of them fails.

What needs no other process stands first. `make test` forks the processes; the whole matrix, which is slow, starts them
by torchrun.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from maelm_fast import ops
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, ModelConfig, RuntimeConfig
from maelm_fast.data.loader import TrainingBatches
from maelm_fast.data.masking import pack
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training import heartbeat
from maelm_fast.training.heartbeat import Watch
from maelm_fast.training.job import pretrain
from maelm_fast.training.parallel import Processes, processes, untouched
from maelm_fast.training.rundir import RunDir
from maelm_fast.training.step import check_recordable
from maelm_fast.training.trainer import Trainer
from tests.processes import ended, started, together
from tests.training.cases import main, run, seen
from tests.training.runs import SEED, config, rows
from tests.waiting import HANG, wait_until

ROOT = Path(__file__).parents[2]
VOCABULARY = Vocabulary(300, 299, (0, 1, 2, 3, 299))
MASKER = Masker(MaskingConfig(count="stochastic"), VOCABULARY, SEED, False)


def digest(batch: PackedBatch) -> list[Any]:
    return [batch.lengths, [tensor.tolist() for tensor in batch.tensors]]


@pytest.mark.parametrize("device_masks", [False, True])
@pytest.mark.parametrize(("world", "micro"), [(2, 3), (3, 3), (4, 5), (3, 12)])
def test_ranks_read_and_mask_each_their_own_micro_batches(
    world: int, micro: int, device_masks: bool, document_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together those of the whole update, in turn; as many on every rank, the last of them empty where there are too
    few."""
    store = TokenStore.open(document_store)
    whole = TrainingBatches(store, MASKER, 12, micro)[1]
    read, tokens = TokenStore.read, []
    monkeypatch.setattr(TokenStore, "read", lambda self, ids: tokens.extend(ids.tolist()) or read(self, ids))
    rounds, found = -(-len(whole) // world), {}
    for rank in range(world):
        share = TrainingBatches(store, MASKER, 12, micro, device_masks, rank=rank, world=world)[1]
        assert len(share) == rounds
        for i, batch in enumerate(share):
            if not isinstance(batch, PackedBatch):
                keys = torch.from_numpy(batch.samples), torch.from_numpy(batch.epochs)
                batch = ops.mask_and_pack(batch.ids, batch.lengths.tolist(), *keys, MASKER)
            found[rank + i * world] = digest(batch)
    assert [found[place] for place in range(len(whole))] == [digest(batch) for batch in whole]
    assert all(found[place][0] == ((), (), ()) for place in range(len(whole), rounds * world))
    assert sorted(tokens) == sorted(store_samples(store))


def store_samples(store: TokenStore) -> list[int]:
    ids: list[int] = TrainingBatches(store, MASKER, 12, 5).samples(1)[0].tolist()
    return ids


KINDS = ["self", "cross", "self_cross", "causal_cross", "none"]


@pytest.mark.parametrize("backend", ["auto", "reference", "grouped"])
@pytest.mark.parametrize("decoder", KINDS)
def test_an_empty_batch_gives_every_parameter_a_gradient_of_zeros(decoder: Any, backend: str) -> None:
    """None would leave DDP waiting for it."""
    size = {"vocab_size": 300, "max_positions": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 32}
    model = MaeLm(ModelConfig(**size, decoder=decoder, decoder_layers=1, decoder_relative_bias=decoder != "none"))
    nobody = np.empty(0, np.int64)
    batch = pack([], nobody, nobody, Masker(MaskingConfig(), VOCABULARY, 0, model.encoder_sees_mask))
    every = "reference" if backend == "reference" else "auto"
    with ops.backends(attention=backend, embed_packed=every, add_norm=every, scatter_to_decoder=every):
        loss, correct = model.train()(batch, dropout_seed=3)
        loss.backward()
    assert (loss.item(), correct.item()) == (0, 0)
    assert not [name for name, p in model.named_parameters() if p.grad is None or p.grad.count_nonzero()]


@pytest.mark.parametrize(
    ("world", "micro", "idle", "better"), [(3, 5, 0.2, 4), (4, 6, 0.5, 3), (2, 6, 0, 6), (5, 4, 0.4, 3)]
)
def test_what_share_of_the_ranks_is_idle(world: int, micro: int, idle: float, better: int, store: Path) -> None:
    batches = TrainingBatches(TokenStore.open(store), MASKER, 12, micro, world=world)
    assert batches.idle(micro) == pytest.approx(idle)
    assert batches.better_size(micro) == better
    assert batches.idle(better) <= idle


def test_several_processes_record_no_graph() -> None:
    with pytest.raises(UserError, match=r"needs a run of one process; or set runtime\.cuda_graph=false"):
        check_recordable(torch.device("cuda"), MASKER, [64], world=2)


def test_only_who_asks_for_it_joins_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`maelm-fast paper` under torchrun: each process has units of work of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    runtime = RuntimeConfig(device="cpu")
    with processes(runtime, several=False) as group:
        assert (group.rank, group.world) == (0, 1)
    said = "cannot reach the other processes: .* RANK .*; start them with torchrun"
    with pytest.raises(UserError, match=said), processes(runtime):
        pass


def test_a_later_start_finds_nothing_of_an_earlier_one_in_the_store() -> None:
    """torchrun's outlives the processes that it starts again: the addresses in it are those of the dead."""
    store = HashStore()
    for world in (3, 3, 2, 4):
        with ThreadPoolExecutor(world) as pool:  # rank 0 is the last to come
            coming = [pool.submit(untouched, store, rank, world, 20.0) for rank in reversed(range(world))]
        parts = [part.result() for part in coming]
        assert not any(part.check(["address"]) for part in parts)
        parts[0].set("address", "here")
        assert all(part.check(["address"]) for part in parts)


def test_a_process_that_does_not_start_is_named() -> None:
    with pytest.raises(RuntimeError, match="no word from rank 1, 2 within 0 s"):
        untouched(HashStore(), 0, 3, 0.0)


class Flags:
    """In the place of torchrun's store."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.values.keys()


class Clock:
    """In the place of the module `time`: while one sleeps, the threads of those that live write their heartbeats."""

    def __init__(self) -> None:
        self.now, self.living = 1000.0, list[Watch]()

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for watch in self.living:
            watch.beat()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heartbeat, "time", made)
    return made


@pytest.fixture
def watches(clock: Clock, tmp_path: Path) -> list[Watch]:
    """Of four processes that have come as far as step 7."""
    flags = Flags()
    for rank in range(4):
        watch = Watch(rank, 4, flags, timeout_s=100.0)
        watch.directory = tmp_path
        watch.at("waiting for data", 7)
        clock.living.append(watch)
    return list(clock.living)


def test_who_is_behind_is_named(watches: list[Watch], clock: Clock) -> None:
    clock.sleep(80)
    for watch in (watches[0], watches[1], watches[3]):
        watch.at("computing")
        watch.at("computing")  # the same phase again is none
    assert watches[0].missing() == "rank 2: last seen at step 7, waiting for data, 95 s ago"
    watches[2].at("computing")
    watches[2].at("waiting for data", 8)
    assert (watches[3].missing() or "").count("last seen at step 7, computing") == 3


def test_who_is_dead_is_named_wherever_it_was(watches: list[Watch], clock: Clock) -> None:
    watches[1].at("computing")  # further than the others
    clock.sleep(1)
    clock.living.remove(watches[1])
    assert watches[0].missing() == "rank 1: last seen at step 7, computing, 16 s ago"


def test_who_was_never_seen_is_named(watches: list[Watch], clock: Clock) -> None:
    clock.living.remove(watches[3])
    assert watches[0].missing() == "rank 3: never seen"


def test_one_of_them_says_it(watches: list[Watch]) -> None:
    assert watches[2].first_to_fail()
    assert not watches[0].first_to_fail()
    assert not watches[2].first_to_fail()
    assert watches[1].missing() is None


def test_a_store_that_says_nothing_is_not_waited_for(watches: list[Watch], clock: Clock) -> None:
    """The machine that has it stands still, and is named."""
    thawed = threading.Event()
    silent = SimpleNamespace(check=lambda _: thawed.wait(HANG), add=lambda *_: thawed.wait(HANG))
    clock.sleep(1)
    clock.living.remove(watches[0])
    clock.sleep(20)
    watches[1].flags, watches[1].interval = silent, 0.05  # seconds of this thread's
    assert watches[1].missing() == "rank 0: last seen at step 7, waiting for data, 21 s ago"
    assert watches[1].first_to_fail()
    thawed.set()


def test_the_last_to_end_leaves_nothing(watches: list[Watch], tmp_path: Path) -> None:
    """Also of a run that was over before a heartbeat was due."""
    directory = tmp_path / "heartbeats"
    for watch in watches:
        watch.directory = directory
    watches[0].clear(directory)
    for watch in watches:
        watch.end()
    assert not directory.exists()


def written(plan: list[dict[str, Any]], directory: Path, timeout_s: float = HANG) -> str:
    file = directory / "plan.json"
    file.write_text(json.dumps([timeout_s, plan]))
    return str(file)


def torchrun(count: int, plan: str, *options: str) -> tuple[int, str]:
    """Its exit status and what all printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *options]
    done = subprocess.run(
        [*launch, str(ROOT / "tests" / "training" / "cases.py"), plan],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG,
        check=False,
    )
    return done.returncode, done.stdout


def case(
    store: Path, out: Path, micro: int, steps: int, strategy: str = "ddp", average: float = 0.0, **wrong: list[int]
) -> dict[str, Any]:
    """A run with dropout, of updates of 12 samples, of whose tokens as many are masked as chance will have it."""
    sections = {
        "masking": {"count": "stochastic"},
        "optim": {"max_steps": steps, "average": average},
        "runtime": {"micro_batch_size": micro},
        "metrics": {"rank_every": 4},
    }
    return {"store": str(store), "out": str(out), "strategy": strategy, "sections": sections, "wrong": wrong}


def by_one(there: dict[str, Any], out: Path) -> Path:
    """The same run by this process alone."""
    here = {
        **there,
        "out": str(out),
        "wrong": {"nan": [0, there["wrong"]["nan"][1]]} if "nan" in there["wrong"] else {},
    }
    run(Processes(torch.device("cpu")), here)
    return out


def assert_alike(run: Path, whole: Path, again: bool = False) -> None:
    """The same samples and masks, each once, unless some were computed `again`; equal hits; losses within 1e-5."""
    assert ({*seen(run)} if again else seen(run)) == ({*seen(whole)} if again else seen(whole))
    mine, theirs = rows(run), rows(whole)
    assert [(row["kind"], row["step"]) for row in mine] == [(row["kind"], row["step"]) for row in theirs]
    for a, b in zip(mine, theirs, strict=True):
        for name, value in b.items():
            tolerance = TOLERANCES.get(name, 0.0)
            assert a[name] == value or abs(a[name] - value) <= tolerance, (name, a, b)


TOLERANCES = {"loss": 1e-5, "val_loss": 1e-5, "grad_norm": 1e-4, "val_perplexity": 5e-3} | dict.fromkeys(
    ("rank_input", "rank_middle", "rank_last"), 1
)


def test_three_processes_compute_what_one_does(
    store: Path, document_store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """DDP with more micro-batches than ranks, FSDP2 with fewer; a gradient that is not finite on one rank alone; a stop
    that one rank is asked for, after which the other engine goes on, with its average of the weights."""
    plan = [
        case(document_store, tmp_path / "ddp", 3, 5, "ddp", nan=[1, 2]),
        case(store, tmp_path / "fsdp", 12, 8, "fsdp", average=0.8, stop=[1, 5]),
        case(store, tmp_path / "fsdp", 12, 8, "ddp", average=0.8),
    ]
    together(3, lambda: main(written(plan, tmp_path)))
    output = capfd.readouterr().out
    for rank in range(3):
        assert f"rank {rank} stopped after 7 with status 143\n" in output
    assert output.count("resuming from step 7\n") == 1
    assert re.search(r"on 3 x .* \(fsdp\)", output)
    assert "67% of the 3 processes' time is idle" in output
    assert "--runtime.micro-batch-size 4 it is 0%" in output
    for there in plan[:2]:
        assert_alike(Path(there["out"]), by_one(there, Path(there["out"] + "_alone")))
    assert [row["skipped"] for row in rows(tmp_path / "ddp") if row["kind"] == "train"] == [0, 0, 1, 1, 1]
    assert not RunDir(tmp_path / "fsdp").heartbeats.exists()


def test_a_process_that_raises_says_so_once_and_ends_all(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = written([case(store, tmp_path / "run", 6, 6, **{"raise": [1, 2]})], tmp_path)
    together(3, lambda: sys.exit(main(plan)), codes=(2, 2, 2))
    output = "".join(capfd.readouterr())
    assert re.findall("^error: .*", output, re.MULTILINE) == ["error: rank 1: a damaged shard"]
    assert "Traceback" not in output


@pytest.mark.parametrize("what", ["the store's hash", "optim.lr"])
def test_processes_that_were_started_otherwise_are_refused(
    what: str, store: Path, document_store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A copy of the store on each machine, and one is another; an option that one machine's command lacks."""

    def starts() -> None:
        other = os.environ["RANK"] == "1"
        data = document_store if other and what != "optim.lr" else store
        lr = 1e-3 if other and what == "optim.lr" else 3e-3
        try:
            asked = config(optim={"lr": lr}, runtime={"workers": int(other)})
            pretrain(asked, str(data), str(tmp_path / "run"), several=True)
        except UserError as error:
            print(f"error: {error}", flush=True)
            sys.exit(2)

    together(2, starts, codes=(2, 2))
    errors = re.findall("^error: .*", capfd.readouterr().out, re.MULTILINE)
    assert len(errors) == 1
    assert re.match(rf"error: rank 1: {what} is .* here, but .* for rank 0: start all .* the same command", errors[0])
    assert not (tmp_path / "run").exists()


def test_a_run_is_saved_when_torchrun_is_killed(store: Path, tmp_path: Path) -> None:
    """And ends: a start that finds it alive would be refused."""
    out, (ended_there, lives) = tmp_path / "run", os.pipe()

    def torchrun() -> None:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
        started(1, orphaned)[0].join()

    def orphaned() -> None:
        update, parent = Trainer.update, os.getppid()

        def third(self: Trainer, *rest: Any) -> Any:
            if self.progress.step == 2:
                os.kill(parent, signal.SIGKILL)
                wait_until(lambda: os.getppid() != parent)
            return update(self, *rest)

        Trainer.update = third  # type: ignore[method-assign]
        pretrain(config(), store, out, several=True)

    (agent,) = started(1, torchrun)
    os.close(lives)
    assert ended([agent]) == (-signal.SIGKILL,)
    assert os.read(ended_there, 1) == b""
    os.close(ended_there)
    assert RunDir(out).steps() == [2, 3]
    assert not (out / ".lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_matrix(count: int, store: Path, document_store: Path, tmp_path: Path) -> None:
    """Accumulation, a last micro-batch that is smaller, more ranks than micro-batches; samples of one length and of
    many; over 20 updates."""
    plan = [
        case(samples, tmp_path / f"{strategy}_{samples.name}_{micro}", micro, 20, strategy)
        for strategy in ("ddp", "fsdp")
        for samples in (store, document_store)
        for micro in (2, 5, 12)
    ]
    status, output = torchrun(count, written(plan, tmp_path))
    assert status == 0, output
    for there in plan:
        out = Path(there["out"])
        whole = tmp_path / out.name.removeprefix("ddp").removeprefix("fsdp")
        if not whole.exists():
            by_one(there, whole)
        assert_alike(out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [("ddp", "ddp", "ddp"), ("ddp", "fsdp", "ddp"), ("fsdp", "ddp", "fsdp")])
def test_a_run_of_four_goes_on_as_two_and_as_three(
    strategies: tuple[str, str, str], document_store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for count, strategy, stop in zip((4, 2, 3), strategies, ([2, 5], [0, 11], None), strict=True):
        wrong = {} if stop is None else {"stop": stop}
        there = case(document_store, out, 3, 20, strategy, **wrong)
        status, output = torchrun(count, written([there], tmp_path))
        assert status == 0, output
        assert stop is None or output.count(f"stopped after {stop[1] + 2} with status 143") == count
    assert_alike(out, by_one(case(document_store, out, 3, 20), tmp_path / "whole"))


@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again(store: Path, tmp_path: Path) -> None:
    """From its last checkpoint: the update that was lost is done again."""
    there = case(store, tmp_path / "run", 3, 8, "fsdp", kill=[1, 5])
    status, output = torchrun(2, written([there], tmp_path), "--max-restarts", "1")
    assert status == 0, output
    assert "resuming from step 4\n" in output
    assert_alike(tmp_path / "run", by_one(there, tmp_path / "whole"), again=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("wrong", ["hang", "kill", "crash"])
def test_who_fails_is_named_and_all_end(wrong: str, strategy: str, store: Path, tmp_path: Path) -> None:
    timeout_s, started = 30.0, time.monotonic()  # a machine under load needs some of it to start
    plan = [case(store, tmp_path / "run", 3, 6, strategy, **{wrong: [1, 3]})]
    status, output = torchrun(3, written(plan, tmp_path, timeout_s))
    assert status != 0
    assert time.monotonic() - started < 2 * timeout_s + 30
    said = re.findall("^error: .*", output, re.MULTILINE)
    if wrong == "hang":
        assert len(said) == 1
        assert re.match(r"error: rank 1: last seen at step 4, computing, \d+ s ago", said[0])
    elif wrong == "kill":
        assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9", output.partition("Root Cause")[2])
        assert all(line.startswith("error: rank 1: last seen at step 4") for line in said)
    else:
        assert output.count("[rank1]: ZeroDivisionError: a mistake of ours\n") == 1
        assert not said
