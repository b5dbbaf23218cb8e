"""The job behind `maelm-fast finetune`: seeds, files, going on after a kill, report. Nothing is written before what can
be checked has been.

What lies in its directory:

config.yaml        task, model, data, seeds and the full configuration
env.json           versions, hardware, commit of each start
ledger.jsonl       a row per finished seed
state/, seeds/     of the seed in hand, to go on from; weights of finished ones. Both are removed at the end
report.json, results.csv, REPORT.md, curves.png, confusion.png, predictions.jsonl, model/     see report.py
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file

from maelm_fast.config import require
from maelm_fast.data.files import writing
from maelm_fast.encoders import Engine, TextEncoder
from maelm_fast.errors import UserError
from maelm_fast.export.library import require_transformers
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.fingerprint import Origin, deciding, digest
from maelm_fast.finetuning.metrics import baselines
from maelm_fast.finetuning.problem import Evaluation, Problem, SentenceProblem
from maelm_fast.finetuning.report import REPORT_FILE, effective_ranks, median_of, terminal_lines, write_report
from maelm_fast.finetuning.run import Result, device_of, on_host, total_updates, train
from maelm_fast.finetuning.saving import save
from maelm_fast.finetuning.spans import SpanProblem
from maelm_fast.stop import StopSignals
from maelm_fast.training.files import damage, newest_whole, write_directory, write_json, write_text
from maelm_fast.training.hardware import device_name, environment
from maelm_fast.training.runlog import Display
from maelm_fast.work import Identity, Ledger, Unit, Worker, lock, work

CONFIG_FILE = "config.yaml"


def make_problem(data: TaskData, encoder: TextEncoder, config: FinetuneConfig) -> Problem:
    """The task tokenised for the encoder. Depends on its tokenizer and longest input and, of the configuration, on
    max_length and SQuAD's lengths; not on weights or seed."""
    if data.task.kind == "spans":
        return SpanProblem(data, encoder, config)
    return SentenceProblem(data, encoder, config)


def finetune(
    model: str | Path,
    data: TaskData,
    config: FinetuneConfig,
    out: str | Path,
    seeds: Sequence[int],
    *,
    engine: Engine = "auto",
    step: int | None = None,
    random_init: bool = False,
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Fine-tune `model` on a task once per seed (config.seed is not used) and report in `out`; goes on with what an
    earlier call with the same arguments left there.

    model, engine, step, random_init: as encoders.load_encoder. Each seed has a head, an order and dropout of its own,
    with random_init an encoder too. Raises UserError, before anything is written, for what does not fit together;
    Stopped after SIGTERM or SIGINT, when the state is saved."""
    require(bool(seeds) and len(set(seeds)) == len(seeds), "the seeds must be one or more, no two the same")
    out = Path(out)
    origin = Origin.of(model, step, engine, random_init)
    device, precision = device_of(config)
    require_transformers()  # to save the model with, in the end
    record = _record(origin, data, config, seeds)
    _check_out(out, record)
    floor = baselines(data)
    encoder = origin.load(config.dropout, seeds[0])
    problem = make_problem(data, encoder, config)
    with lock(out / ".lock") as ours:
        require(ours, f"{out} is in use by another process")
        _check_out(out, record)  # again: another process may have been here meanwhile
        _start_files(out, record, environment(device, precision))
        say(_banner(encoder, problem, config, seeds, f"{device_name(device)} in {precision}"))
        for note in data.notes:
            say(f"note: {note}")
        units = [_Seed(seed, digest(record)) for seed in seeds]
        worker = _Worker(problem, origin, None if random_init else encoder, config, out, say)
        work(units, worker, out, keep_going=False, say=say)
        results = [Result(**Ledger(out).ended()[0][unit.identity]) for unit in units]
        if (out / REPORT_FILE).exists():
            say(f"{out}: already finished")
        else:
            _finish(origin, problem, config, out, results, floor, say)
        for name in ("seeds", "state", "locks"):
            shutil.rmtree(out / name, ignore_errors=True)
    say("\n".join(terminal_lines(data, results, floor)))
    say(f"written: {out}")
    return results


@dataclass(frozen=True)
class _Seed(Unit):
    seed: int
    config: str

    @property
    def identity(self) -> Identity:
        return f"seed {self.seed}", "finetune", self.config

    @property
    def title(self) -> str:
        return f"seed {self.seed}"


@dataclass
class _Worker(Worker[_Seed]):
    problem: Problem
    origin: Origin
    encoder: TextEncoder | None
    """None: random weights, others for each seed."""
    config: FinetuneConfig
    out: Path
    say: Callable[[str], None]

    def do(self, unit: _Seed, stop: StopSignals) -> dict[str, Any]:
        """Trains, and leaves weights and evaluation in seeds/. Returns Result.to_dict()."""
        encoder = self.encoder or self.origin.load(self.config.dropout, unit.seed)
        config, task, state = replace(self.config, seed=unit.seed), self.problem.data.task, self._state(unit)
        steps = total_updates(self.problem.train_size, config)
        items = "windows" if task.kind == "spans" else "examples"
        done = int(path.name[5:]) if (path := newest_whole(state)) else 0
        if done:
            self.say(f"resuming from step {done:,}")
        with Display(done, steps) as display:

            def watch(row: dict[str, Any]) -> None:
                loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
                place = f"step {row['step']:,}"
                if row["kind"] == "train":
                    speed = f"{row['examples_per_s']:,.1f} {items}/s"
                    display.show(row["step"], f"{place}/{steps:,}  loss {loss}  {speed}")
                    return
                values = (f"{split} {task.metric} {found[task.metric]:.2f}" for split, found in row["metrics"].items())
                display.say(f"{place} (epoch {row['epoch']:.2f}): loss {loss}; {', '.join(values)}")

            result, model, evaluation = train(self.problem, encoder, config, watch=watch, resume=state, stop=stop)

        def fill(aside: Path) -> None:
            save_file(on_host(model), aside / "model.safetensors")
            write_json(aside / "evaluation.json", dataclasses.asdict(evaluation))

        kept = _kept(self.out, unit.seed)
        shutil.rmtree(kept, ignore_errors=True)
        with writing(kept, "the same command resumes"):
            write_directory(kept, fill)
        return result.to_dict()

    def after(self, unit: _Seed, row: dict[str, Any]) -> str:
        shutil.rmtree(self._state(unit), ignore_errors=True)
        return ""

    def _state(self, unit: _Seed) -> Path:
        return self.out / "state" / f"seed_{unit.seed}"


def _kept(out: Path, seed: int) -> Path:
    return out / "seeds" / f"seed_{seed}"


def _finish(
    origin: Origin,
    problem: Problem,
    config: FinetuneConfig,
    out: Path,
    results: list[Result],
    floor: dict[str, dict[str, float]],
    say: Callable[[str], None],
) -> None:
    """The model of the median seed, and the report."""
    chosen = median_of(results)
    kept = _kept(out, chosen.seed)
    if fault := damage(kept):
        raise UserError(f"{kept} is damaged: {fault}; remove {out} and run again")
    say(f"report and model of seed {chosen.seed}, the median")
    device, precision = device_of(config)
    encoder = origin.load(config.dropout, chosen.seed).to(device)
    before = effective_ranks(encoder, problem.validation_inputs, device, precision)
    model: Any = problem.model(encoder, replace(config, seed=chosen.seed)).to(device)
    model.load_state_dict(load_file(kept / "model.safetensors"))
    after = effective_ranks(encoder, problem.validation_inputs, device, precision)
    shutil.rmtree(out / "model", ignore_errors=True)
    saved = save(model.cpu().eval(), problem.data.task, out / "model")
    say(f"model: {saved.note}")
    evaluation = Evaluation(**json.loads((kept / "evaluation.json").read_text(encoding="utf-8")))
    write_report(out, origin, saved.note, problem.data, results, evaluation, floor, before, after, say)


def _record(origin: Origin, data: TaskData, config: FinetuneConfig, seeds: Sequence[int]) -> dict[str, Any]:
    """config.yaml: everything that decides the results."""
    fields = deciding(config)
    del fields["seed"]
    return {
        "task": data.task.name,
        "model": origin.path,
        "step": origin.step,
        "engine": origin.engine,
        "random_init": origin.random_init,
        "model_fingerprint": origin.fingerprint,
        "data": {name: split.source for name, split in data.splits.items()},
        "data_fingerprint": data.fingerprint,
        "seeds": list(seeds),
        "config": fields,
    }


def _check_out(out: Path, record: dict[str, Any]) -> None:
    """A job may only be gone on with as it was started."""
    file = out / CONFIG_FILE
    require(not out.is_file(), f"{out} is a file; choose another --out")
    if not file.exists():
        empty = not out.exists() or not any(path.name != ".lock" for path in out.iterdir())
        require(empty, f"{out} exists, is not empty and is not a fine-tuning job; choose another --out")
        return
    try:
        old = yaml.safe_load(file.read_text(encoding="utf-8"))
        before, now = {**old, **old["config"]}, {**record, **record["config"]}
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        raise UserError(f"{file}: not the config.yaml of a fine-tuning job; choose another --out") from None
    told = {
        "model_fingerprint": f"another model ({before.get('model')})",
        "data_fingerprint": f"other data ({before.get('data')})",
    }
    different = [
        told.get(key, f"{key}={before.get(key)!r}")
        for key, value in now.items()
        if key not in ("config", "model", "data") and before.get(key) != value
    ]
    require(not different, f"{out} was started with {', '.join(different)}; use the same, or choose another --out")


def _start_files(out: Path, record: dict[str, Any], env: dict[str, Any]) -> None:
    file = out / "env.json"
    with writing(out, "choose another --out"):
        starts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        if not (out / CONFIG_FILE).exists():  # first: without it the directory is not known as a job's
            write_text(out / CONFIG_FILE, yaml.safe_dump(record, sort_keys=False, allow_unicode=True))
        write_json(file, [*starts, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **env}])


def _banner(encoder: TextEncoder, problem: Problem, config: FinetuneConfig, seeds: Sequence[int], place: str) -> str:
    data, parameters = problem.data, sum(p.numel() for p in encoder.parameters())
    windows = f" in {problem.train_size:,} windows" if problem.train_size != len(data.train) else ""
    dev = ", ".join(f"{len(split):,} of {name}" for name, split in data.validation.items())
    return (
        f"{data.task.title}: {len(data.train):,} training examples{windows}, {dev}; at most {max(problem.lengths)} "
        f"tokens\n{encoder.name}: {parameters:,} parameters, engine {encoder.engine}, on {place}\n"
        f"{total_updates(problem.train_size, config):,} steps of {config.batch_size}, lr {config.lr:g}, seeds "
        f"{', '.join(map(str, seeds))}"
    )
