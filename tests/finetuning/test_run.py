"""The loop: what it learns, that it equals a plain one, that it goes on bit for bit, and the job around it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from maelm_fast.errors import UserError
from maelm_fast.finetuning import job
from maelm_fast.finetuning import run as module
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.job import finetune, make_problem
from maelm_fast.finetuning.problem import Problem, SentenceProblem, token_batch, update_order
from maelm_fast.finetuning.run import Result, evaluation_steps, total_updates, train
from maelm_fast.stop import Stopped
from maelm_fast.training.files import newest_whole
from maelm_fast.work import Ledger
from tests.finetuning import toys
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
FAST = FinetuneConfig(
    lr=3e-3, epochs=4, batch_size=16, dropout=0.0, evaluations_per_epoch=1, device="cpu", precision="fp32"
)
SHORT = replace(FAST, epochs=2, batch_size=8, dropout=0.1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def quiet(text: str) -> None:
    pass


def numbers(result: Result) -> list[tuple[Any, ...]]:
    """What must be equal of two runs that are the same: no times."""
    return [(row["step"], row["loss"], row["metrics"]) for row in result.curve]


@pytest.mark.parametrize("make", [toys.order_rows, toys.content_rows, toys.pair_rows, toys.score_rows])
def test_a_tiny_random_encoder_learns(make: Callable[..., Any]) -> None:
    """From the order of words alone, from one word among others, from which text it is in, a score."""
    data, encoder = toys.toy(make), toys.tiny_encoder()
    result, _, _ = train(make_problem(data, encoder, FAST), encoder, FAST)
    assert result.best > 95.0
    assert result.last > 90.0


def test_order_cannot_be_learnt_without_positions() -> None:
    """The order task needs positions: where the encoder has none, it stays at chance."""
    data, encoder = toys.toy(toys.order_rows, 200), toys.tiny_encoder(relative_bias="none")
    table = encoder.encoder.position_table
    del encoder.encoder.position_table
    encoder.encoder.register_buffer("position_table", torch.zeros_like(table))
    config = replace(FAST, epochs=2)
    result, _, _ = train(make_problem(data, encoder, config), encoder, config)
    assert result.best < 70.0


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_loop_equals_a_plain_one(clip: float) -> None:
    """AdamW of PyTorch, unfused, with a schedule written down anew, on single inputs."""
    data, encoder = toys.toy(toys.content_rows, 30, 10), toys.tiny_encoder()
    config = replace(SHORT, dropout=0.0, warmup=0.25, weight_decay=0.1, clip_norm=clip, betas=(0.7, 0.9), eps=1e-4)
    problem = make_problem(data, encoder, config)
    assert isinstance(problem, SentenceProblem)
    _, model, _ = train(problem, encoder, config, keep_best=False)

    plain = problem.model(toys.tiny_encoder(), config).train()
    plain.encoder.load_state_dict(encoder.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), betas=config.betas, eps=config.eps, weight_decay=0.1)
    step, steps, warmup = 0, 8, 2
    for epoch in range(2):
        for indices in update_order(30, 8, config.seed, epoch):
            rate = config.lr * (step / warmup if step < warmup else (steps - step) / (steps - warmup))
            for group in optimizer.param_groups:
                group["lr"] = rate
            logits = torch.cat([plain(token_batch(problem.train, [i])) for i in indices])
            F.cross_entropy(logits, torch.from_numpy(data.train.labels[indices])).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    assert step == steps
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5, msg=name)


def test_micro_batches_change_only_rounding() -> None:
    """Of unequal size, so that a mean of their means would differ."""
    data, encoder = toys.toy(toys.content_rows, 40, 10), toys.tiny_encoder()
    config = replace(SHORT, dropout=0.0)
    problem = make_problem(data, encoder, config)
    whole, _, _ = train(problem, encoder, config)
    parts, _, _ = train(problem, encoder, replace(config, micro_batch_tokens=25))
    assert [row["loss"] for row in parts.curve] == pytest.approx([row["loss"] for row in whole.curve], rel=1e-4)


def test_updates_are_divided_by_tokens() -> None:
    data, encoder = toys.toy(toys.content_rows, 40, 10), toys.tiny_encoder()
    config = replace(SHORT, micro_batch_tokens=25)
    loop = module.FineTuning(make_problem(data, encoder, config), encoder, config, print, None, False)
    indices = np.arange(20)
    parts = loop._micro_batches(indices)
    assert np.concatenate(parts).tolist() == indices.tolist()
    sizes = [int(loop.lengths[part].sum()) for part in parts]
    assert max(sizes) <= 25
    assert len(parts) > 4
    loop.config = replace(config, micro_batch_tokens=1)
    assert [len(part) for part in loop._micro_batches(indices)] == [1] * 20


def test_when_is_evaluated() -> None:
    config = FinetuneConfig(epochs=2, batch_size=10, evaluations_per_epoch=2)
    assert total_updates(95, config) == 20
    assert evaluation_steps(95, config) == [5, 10, 15, 20]
    assert evaluation_steps(75, config) == [4, 8, 12, 16]
    assert evaluation_steps(5, config) == [1, 2]
    assert evaluation_steps(25, replace(config, evaluations_per_epoch=7)) == [1, 2, 3, 4, 5, 6]


def test_a_seed_decides_the_run_and_the_encoder_stays_as_it_was() -> None:
    data, encoder = toys.toy(toys.content_rows, 40, 20), toys.tiny_encoder()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    problem = make_problem(data, encoder, SHORT)
    torch.manual_seed(1)
    first, _, _ = train(problem, encoder, SHORT)
    torch.manual_seed(2)
    again, _, _ = train(problem, encoder, SHORT)
    other, _, _ = train(problem, encoder, replace(SHORT, seed=1))
    assert numbers(first) == numbers(again)
    assert numbers(first) != numbers(other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    assert first.seed == 0
    assert first.config["lr"] == SHORT.lr
    assert first.steps == first.curve[-1]["step"] == 10
    assert json.loads(json.dumps(first.to_dict())) == first.to_dict() | {"config": first.config}


class Watched(SentenceProblem):
    """Notes the seed of dropout of every forward pass in training, and whether dropout was on."""

    seeds: list[int]

    def loss(self, model: Any, indices: Any, device: torch.device, dropout_seed: Tensor | int | None) -> Tensor:
        assert dropout_seed is not None
        assert model.training
        self.seeds.append(int(dropout_seed))
        return super().loss(model, indices, device, dropout_seed)


def test_every_micro_batch_has_dropout_of_its_own() -> None:
    """Of each update and within it, after evaluations too; another seed has others."""
    data, encoder = toys.toy(toys.content_rows, 40, 10), toys.tiny_encoder()
    seeds = []
    for seed in (0, 0, 1):
        config = replace(SHORT, micro_batch_tokens=30, seed=seed)
        problem = Watched(data, encoder, config)
        problem.seeds = []
        train(problem, encoder, config)
        seeds.append(problem.seeds)
    assert len(set(seeds[0])) == len(seeds[0]) > 2 * 10
    assert seeds[1] == seeds[0]
    assert not set(seeds[0]) & set(seeds[2])


class Scripted(SentenceProblem):
    """Evaluations with given values; `broken`: updates whose loss is not a number."""

    def __init__(self, data: TaskData, encoder: Any, config: FinetuneConfig, values: list[float]) -> None:
        super().__init__(data, encoder, config)
        self.values, self.weights = iter(values), list[Tensor]()
        self.broken: set[int] = set()
        self.calls = 0

    def loss(self, *arguments: Any) -> Tensor:
        self.calls += 1
        loss = super().loss(*arguments)
        return loss * float("nan") if self.calls - 1 in self.broken else loss

    def evaluate(self, model: Any, *arguments: Any) -> Any:
        found = super().evaluate(model, *arguments)
        self.weights.append(model.head.out.weight.detach().clone())
        found.metrics["validation"]["accuracy"] = next(self.values)
        return found


def test_the_best_evaluation_is_kept_and_of_equals_the_first() -> None:
    data, encoder = toys.toy(toys.content_rows, 40, 20), toys.tiny_encoder()
    problem = Scripted(data, encoder, FAST, [50.0, 70.0, 70.0, 60.0])
    result, model, evaluation = train(problem, encoder, FAST)
    assert (result.best, result.last, result.best_step) == (70.0, 60.0, 6)
    assert result.metrics == evaluation.metrics
    assert torch.equal(model.head.out.weight, problem.weights[1])  # type: ignore[union-attr, arg-type]
    assert not model.training
    problem = Scripted(data, encoder, FAST, [50.0, 70.0, 70.0, 60.0])
    result, model, evaluation = train(problem, encoder, FAST, keep_best=False)
    assert (result.best, evaluation.metrics["validation"]["accuracy"]) == (70.0, 70.0)
    assert torch.equal(model.head.out.weight, problem.weights[3])  # type: ignore[union-attr, arg-type]


def test_updates_without_finite_gradient_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.FineTuning, "max_nonfinite", 3)  # in a row, not in all
    data, encoder = toys.toy(toys.content_rows, 40, 20), toys.tiny_encoder()
    problem = Scripted(data, encoder, SHORT, [1.0] * 9)
    problem.broken = {2, 3, 7}
    result, model, _ = train(problem, encoder, SHORT)
    assert result.skipped == 3
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert all(np.isfinite(row["loss"]) for row in result.curve)
    monkeypatch.setattr(module.FineTuning, "max_nonfinite", 2)
    problem.calls = 0
    with pytest.raises(UserError, match=r"2 updates in a row .* step 3"):
        train(problem, encoder, SHORT)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("loss", r"out of memory with \d+ tokens in a forward pass: lower --micro-batch-tokens"),
        ("evaluate", "out of memory in an evaluation: lower --max-length"),
    ],
)
def test_out_of_memory_is_one_line(where: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    data, encoder = toys.toy(toys.content_rows, 40, 20), toys.tiny_encoder()
    problem = make_problem(data, encoder, SHORT)
    monkeypatch.setattr(problem, where, full)
    with pytest.raises(UserError, match=message):
        train(problem, encoder, SHORT)


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.0)
    data, encoder = toys.toy(toys.content_rows, 40, 20), toys.tiny_encoder()
    rows: list[dict[str, Any]] = []
    result, _, _ = train(make_problem(data, encoder, SHORT), encoder, SHORT, watch=rows.append)
    training = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in training] == list(range(1, 11))
    assert all(row["examples_per_s"] > 0 for row in training)
    evaluations = [{k: v for k, v in row.items() if k != "kind"} for row in rows if row["kind"] == "evaluation"]
    assert evaluations == result.curve


def stopping_at(step: int) -> Callable[[], bool]:
    calls = iter(range(1, 10_000))
    return lambda: next(calls) >= step


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    data, encoder = toys.toy(toys.content_rows, 40, 20), toys.tiny_encoder()
    problem = make_problem(data, encoder, SHORT)
    whole, whole_model, whole_evaluation = train(problem, encoder, SHORT)
    for step in (3, 4):  # in all at 3 and at 7, the second time after the first evaluation
        with pytest.raises(Stopped):
            train(problem, encoder, SHORT, resume=tmp_path, stop=stopping_at(step))
    assert [path.name for path in tmp_path.iterdir()] == ["step_7"]
    with pytest.raises(UserError, match="another configuration"):
        train(problem, encoder, replace(SHORT, lr=1e-3), resume=tmp_path)
    with pytest.raises(UserError, match="another configuration or other data"):
        train(make_problem(toys.toy(toys.content_rows, 39, 20), encoder, SHORT), encoder, SHORT, resume=tmp_path)
    with pytest.raises(UserError, match=r"computed in fp32: go on with --precision fp32, or remove .* again in bf16"):
        train(problem, encoder, replace(SHORT, precision="bf16"), resume=tmp_path)
    result, model, evaluation = train(problem, encoder, SHORT, resume=tmp_path)
    assert numbers(result) == numbers(whole)
    assert evaluation == whole_evaluation
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole_model.parameters(), strict=True))


def test_a_damaged_state_is_not_gone_on_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, encoder = toys.toy(toys.content_rows, 40, 20), toys.tiny_encoder()
    problem = make_problem(data, encoder, SHORT)
    whole, _, _ = train(problem, encoder, SHORT)
    with pytest.raises(Stopped):
        train(problem, encoder, SHORT, resume=tmp_path, stop=stopping_at(3))
    assert newest_whole(tmp_path) == tmp_path / "step_3"
    spoil(tmp_path / "step_3" / "model.safetensors")
    assert newest_whole(tmp_path) is None
    assert numbers(train(problem, encoder, SHORT, resume=tmp_path)[0]) == numbers(whole)
    assert "step_3 is damaged: model.safetensors" in caplog.text


def spoil(file: Path) -> None:
    """One bit of its last byte."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_damaged_weights_of_a_finished_seed_are_not_saved_as_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, data = toys.make_run(tmp_path / "run"), tmp_path / "out", toys.toy(toys.content_rows, 16, 8)
    config = replace(SHORT, epochs=1)

    def killed(*_: Any) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_report", killed)
        with pytest.raises(SystemExit):
            finetune(model, data, config, out, [3], say=quiet)
    spoil(out / "seeds" / "seed_3" / "model.safetensors")
    with pytest.raises(UserError, match=r"seed_3 is damaged: model.safetensors .* remove .*out and run again"):
        finetune(model, data, config, out, [3], say=quiet)
    assert not (out / "report.json").exists()


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files of more bytes cannot be written; what a library makes of the system's refusal is its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_save_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, encoder = toys.toy(toys.content_rows, 40, 20), toys.tiny_encoder()
    problem = make_problem(data, encoder, SHORT)
    whole, _, _ = train(problem, encoder, SHORT)
    with pytest.raises(Stopped):
        train(problem, encoder, SHORT, resume=tmp_path, stop=stopping_at(2))
    with full_disk(50_000):
        with pytest.raises(Stopped) as stopped:
            train(problem, encoder, SHORT, resume=tmp_path, stop=stopping_at(3))
        assert stopped.value.step == 2  # not 5: that is not on the disk
        assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
        monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
        result, _, _ = train(problem, encoder, SHORT, resume=tmp_path)
    assert numbers(result) == numbers(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_job_goes_on_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out, data = toys.make_run(tmp_path / "run"), tmp_path / "out", toys.toy(toys.content_rows, 16, 8)
    config = replace(SHORT, epochs=1)
    with full_disk(50_000), pytest.raises(UserError, match=r"seed_3: .*the same command resumes"):
        finetune(model, data, config, out, [3], say=quiet)

    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_json", no_room)
        with pytest.raises(UserError, match=r"cannot write .*new: No space left"):
            finetune(model, data, config, tmp_path / "new", [3], say=quiet)
    for place in (out, tmp_path / "new"):
        assert numbers(finetune(model, data, config, place, [3], say=quiet)[0])
        assert (place / "report.json").exists()


def test_a_directory_that_another_process_took_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, config = toys.make_run(tmp_path / "run"), toys.toy(toys.content_rows, 16, 8), replace(SHORT, epochs=1)

    def meanwhile(*arguments: Any) -> Problem:
        monkeypatch.setattr(job, "make_problem", make_problem)
        finetune(model, data, replace(config, lr=1e-3), tmp_path / "out", [0], say=quiet)
        return make_problem(*arguments)

    monkeypatch.setattr(job, "make_problem", meanwhile)
    with pytest.raises(UserError, match=r"was started with lr=0.001"):
        finetune(model, data, config, tmp_path / "out", [0], say=quiet)


CHILD = """
import torch
torch.set_num_threads(1)
from tests.finetuning import test_run, toys
from maelm_fast.finetuning import job, run
run.SAVE_SECONDS = 0.0
data = toys.toy(toys.content_rows, 40, 20)
job.finetune({model!r}, data, test_run.SHORT, {out!r}, [0, 1], say=lambda text: print(text, flush=True))
"""


def test_killed_terminated_and_finished_equals_uninterrupted(tmp_path: Path) -> None:
    model, out = toys.make_run(tmp_path / "run"), tmp_path / "killed"
    data = toys.toy(toys.content_rows, 40, 20)
    whole = finetune(model, data, SHORT, tmp_path / "whole", [0, 1], say=quiet)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(model=str(model), out=str(out))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: list(out.glob("state/seed_0/step_*")), child)
    child.kill()
    child.communicate()
    assert not (out / "report.json").exists()

    told: list[str] = []

    def hear(line: str) -> None:
        told.append(line)
        if line == "[2/2] seed 1":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as stopped:
        finetune(model, data, SHORT, out, [0, 1], say=hear)
    assert stopped.value.code == 143
    assert [numbers(Result(**row["result"])) for row in Ledger(out).rows()] == [numbers(whole[0])]
    assert told[-1] == "[2/2] SIGTERM: stopped at step 1; the same command resumes from there"
    assert [path.name for path in (out / "state").glob("*/*")] == ["step_1"]
    results = finetune(model, data, SHORT, out, [0, 1], say=quiet)
    assert [numbers(result) for result in results] == [numbers(result) for result in whole]
    assert (out / "predictions.jsonl").read_text() == (tmp_path / "whole" / "predictions.jsonl").read_text()
    for name in ("model.safetensors", "config.json"):
        assert (out / "model" / name).read_bytes() == (tmp_path / "whole" / "model" / name).read_bytes()
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 2
    assert len(json.loads((out / "env.json").read_text())) == 3
    assert not (out / "state").exists()
    assert not (out / "seeds").exists()


def test_a_finished_job_is_not_done_again_and_another_is_refused(tmp_path: Path) -> None:
    model, out = toys.make_run(tmp_path / "run"), tmp_path / "out"
    data = toys.toy(toys.content_rows, 16, 8)
    config = replace(SHORT, epochs=1)
    first = finetune(model, data, config, out, [3], say=quiet)
    told: list[str] = []
    (out / "seeds" / "seed_3").mkdir(parents=True)  # as a kill between the report and the last removal leaves it
    again = finetune(model, data, config, out, [3], say=told.append)
    assert not (out / "seeds").exists()
    assert [result.to_dict() for result in again] == [result.to_dict() for result in first]
    assert any("already finished" in line for line in told)
    record = yaml.safe_load((out / "config.yaml").read_text())
    assert (record["step"], record["seeds"], record["config"]["lr"]) == (5, [3], config.lr)
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    other = toys.toy(toys.content_rows, 17, 8)
    torch.manual_seed(5)
    stranger = toys.make_run(tmp_path / "stranger")
    with pytest.raises(UserError, match=r"was started with lr=0.003; use the same"):
        finetune(model, data, replace(config, lr=1e-3), out, [3], say=quiet)
    with pytest.raises(UserError, match="other data"):
        finetune(model, other, config, out, [3], say=quiet)
    with pytest.raises(UserError, match="another model"):
        finetune(stranger, data, config, out, [3], say=quiet)
    with pytest.raises(UserError, match=r"seeds=\[3\]"):
        finetune(model, data, config, out, [3, 4], say=quiet)
    with pytest.raises(UserError, match="random_init=False"):
        finetune(model, data, config, out, [3], random_init=True, say=quiet)
    with pytest.raises(UserError, match=r"not the config.yaml of a fine-tuning job"):
        finetune(model, data, config, model, [3], say=quiet)
    with pytest.raises(UserError, match="not empty and is not a fine-tuning job"):
        finetune(model, data, config, model / "checkpoints", [3], say=quiet)
    changed = {p for p in files if p.name not in (".lock", "env.json") and p.stat().st_mtime_ns != files[p]}
    assert not changed
    # where and how fast may change
    finetune(model, data, replace(config, device="auto", micro_batch_tokens=64), out, [3], say=quiet)


def test_random_initialisations_differ_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toys.make_run(tmp_path / "run")
    seen: list[Tensor] = []

    def spy(problem: Problem, encoder: Any, config: FinetuneConfig, **options: Any) -> Any:
        seen.append(encoder.encoder.token_table.detach().clone())
        return train(problem, encoder, config, **options)

    monkeypatch.setattr(job, "train", spy)
    data = toys.toy(toys.content_rows, 16, 8)
    config = replace(SHORT, epochs=1)
    finetune(model, data, config, tmp_path / "random", [0, 1], random_init=True, say=quiet)
    finetune(model, data, config, tmp_path / "pretrained", [0, 1], say=quiet)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])


def test_transformers_engine_learns_the_same(tmp_path: Path) -> None:
    """The same weights through transformers' MPNet, padded: the same curve up to rounding. (RoBERTa has a token type
    row to train besides.)"""
    pytest.importorskip("transformers")
    from maelm_fast.encoders import load_encoder
    from maelm_fast.export.huggingface import export
    from maelm_fast.training.rundir import load_run

    run = toys.make_run(tmp_path / "run")
    export(load_run(run), tmp_path / "hf", "mpnet")
    data = toys.toy(toys.content_rows, 60, 40)
    config = replace(SHORT, dropout=0.0, lr=1e-3)
    curves = []
    for engine, path in (("packed", run), ("transformers", tmp_path / "hf")):
        encoder = load_encoder(path, engine=engine, dropout=0.0)  # type: ignore[arg-type]
        result, _, _ = train(make_problem(data, encoder, config), encoder, config)
        assert result.engine == engine
        curves.append(result.curve)
    for ours, theirs in zip(*curves, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["value"] == pytest.approx(theirs["value"], abs=2.6)  # one of 40
