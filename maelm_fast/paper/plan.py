"""An experiment at a scale becomes cells: one pretraining run each, then its measurements, none computed twice.

A cell is known by the hash of all that decides its result. Hence a changed configuration, another store or another
seed is another cell with a run directory of its own, and experiments with a model in common share its run.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from maelm_fast import presets
from maelm_fast.config import RunConfig, require, to_dict
from maelm_fast.errors import UserError
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.fingerprint import digest
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.catalogue import FIRST_CHOICES, Experiment, Row
from maelm_fast.paper.downstream import Found, Unit, finetunings, promptings
from maelm_fast.paper.scales import Corpus, Scale, Setting

PRETRAINING = "pretraining"
_LATER = (
    ("masking", "rate_end"),
    ("optim", "name"),
    ("optim", "muon_lr"),
    ("optim", "muon_momentum"),
    ("optim", "schedule"),
    ("optim", "cooldown_steps"),
    ("optim", "lr_end"),
    ("optim", "average"),
)
"""Fields that came when there were runs already: at their defaults they are no part of a cell's hash."""


@dataclass(frozen=True)
class Cell:
    """One row of an experiment with one seed."""

    row: Row
    config: RunConfig
    rank_steps: tuple[int, ...]
    """Checkpoints whose effective ranks are measured."""
    rank_samples: int
    corpus: Corpus
    data: str = ""
    """The token store; empty, like its fingerprint, where a plan is only shown."""
    fingerprint: str = ""
    units: tuple[Unit, ...] = ()
    """What is done downstream, after the rest."""

    @cached_property
    def key(self) -> str:
        science = {k: v for k, v in to_dict(self.config).items() if k != "runtime"}
        default = to_dict(RunConfig())
        for section, name in _LATER:
            if science[section][name] == default[section][name]:
                del science[section][name]
        return digest(science, self.config.runtime.eval_samples, self.fingerprint)

    @property
    def name(self) -> str:
        """Of a new run directory, before the key."""
        return re.sub(r"[^\w.+-]", "_", "-".join((self.row.setting, *self.row.variants, f"seed{self.config.seed}")))

    @property
    def title(self) -> str:
        return f"{self.row.title}, seed {self.config.seed}"

    @cached_property
    def stages(self) -> dict[str, str]:
        """The parts of the work in order, each with the hash of what decides its result."""
        ranks = {rank_stage(step): digest(self.key, step, self.rank_samples) for step in self.rank_steps}
        return {PRETRAINING: self.key, **ranks, **{unit.stage: unit.hash(self.key) for unit in self.units}}


@dataclass(frozen=True)
class Plan:
    experiment: Experiment
    scale: Scale
    cells: tuple[Cell, ...]
    left_out: tuple[Row, ...]
    """Rows in a setting that this scale does not have."""
    seeds: int
    found: Found | None = None
    """The downstream tasks; None if none were given."""

    @property
    def runs(self) -> tuple[Cell, ...]:
        """The cells without those that repeat another's configuration."""
        return tuple({cell.key: cell for cell in reversed(self.cells)}.values())[::-1]

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        return tuple(dict.fromkeys(cell.corpus for cell in self.cells))

    def of_row(self, row: Row) -> list[Cell]:
        return [cell for cell in self.cells if cell.row == row]

    @property
    def rows(self) -> list[Row]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def not_asked_for(self) -> list[Row]:
        """Rows that --rows did not name."""
        return [row for row in self.experiment.rows if row not in (*self.rows, *self.left_out)]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Those worked on, in the experiment's order."""
        return self.found.tasks if self.found is not None else ()

    @property
    def ranked(self) -> str | None:
        """The task after which effective ranks are measured: the same one in every experiment that has it."""
        return next((name for name in FIRST_CHOICES if name in {task.name for task in self.tasks}), None)

    @property
    def controls(self) -> list[Cell]:
        """The cells whose encoder is fine-tuned untrained too: of every setting MAE-LM's first seed, so that
        experiments share it, or else the first row's."""
        if self.experiment.use not in ("scores", "checkpoints"):
            return []
        cells: dict[str, Cell] = {}
        for cell in self.cells:
            if cell.config.seed == 0 and (cell.row.setting not in cells or not cell.row.variants):
                cells[cell.row.setting] = cell
        return list(cells.values())

    @property
    def missing(self) -> list[str]:
        """What of the paper's figure or table is not made, in sentences."""
        experiment = self.experiment
        if experiment.use == "nothing":
            return []
        if self.found is None:
            remedy = "missing: give --tasks, a directory with the tasks' files or hub."
            return [" ".join(filter(None, (experiment.wanted, remedy, experiment.instead)))]
        lines = [f"{tasks.get(name).title} is left out: {why}." for name, why in self.found.left_out.items()]
        if experiment.one_task and lines:
            lines.append(f"In place of {tasks.get(experiment.tasks[0]).title} stands {self.tasks[0].title}.")
        return lines

    def with_tasks(self, found: Found) -> Plan:
        """The plan with the work on downstream tasks that the experiment is about."""
        plan = dataclasses.replace(self, found=found)
        controls = [cell.key for cell in self.controls]

        def grown(cell: Cell) -> Cell:
            amount, grid = self.scale.downstream, self.scale.settings[cell.row.setting].grid
            if self.experiment.use == "prompting":
                return dataclasses.replace(cell, units=tuple(promptings(found, amount, cell.rank_steps[-1])))
            steps = (0, *cell.rank_steps) if cell.key in controls else cell.rank_steps
            units = finetunings(found, grid, amount, steps, plan.ranked)
            return dataclasses.replace(cell, units=tuple(units))

        return dataclasses.replace(plan, cells=tuple(grown(cell) for cell in self.cells))

    def mae_lm(self, setting: str) -> RunConfig:
        """MAE-LM itself as this plan has it in one of its settings; runtime apart."""
        cell = next(cell for cell in self.cells if cell.row.setting == setting)
        config = dataclasses.replace(self.scale.settings[setting].config, optim=cell.config.optim)
        return presets.change(config, model={"vocab_size": cell.config.model.vocab_size})

    def with_data(self, stores: dict[Corpus, tuple[str, str, int]]) -> Plan:
        """The plan on token stores: (path, fingerprint, vocabulary) of each corpus."""

        def placed(cell: Cell) -> Cell:
            data, fingerprint, vocab_size = stores[cell.corpus]
            config = presets.change(cell.config, model={"vocab_size": vocab_size})
            return dataclasses.replace(cell, data=data, fingerprint=fingerprint, config=config)

        return dataclasses.replace(self, cells=tuple(placed(cell) for cell in self.cells))


def make_plan(
    experiment: Experiment, scale: Scale, seeds: int = 1, steps: int | None = None, labels: Sequence[str] = ()
) -> Plan:
    """steps: of every run, instead of the scale's own number. labels: of the only rows wanted; empty: all.

    Raises UserError for labels that are not there, or of an experiment that is about all of its rows."""
    require(seeds >= 1, f"--seeds must be at least 1, not {seeds}")
    require(steps is None or steps >= 2, f"--steps must be at least 2, not {steps}")
    rows = [row for row in experiment.rows if row.setting in scale.settings]
    left_out = tuple(row for row in experiment.rows if row not in rows)
    if labels:
        require(experiment.separable, f"{experiment.name} needs all of its rows: leave out --rows")
        known = [row.label for row in rows]
        unknown = [label for label in labels if label not in known]
        require(not unknown, f"{experiment.name} has no row {shlex.join(unknown)}; its rows: {shlex.join(known)}")
        rows = [row for row in rows if row.label in labels]
    cells = tuple(
        _cell(row, scale, scale.settings[row.setting], seed, steps, experiment.use == "checkpoints")
        for row in rows
        for seed in range(seeds)
    )
    return Plan(experiment, scale, cells, left_out, seeds)


def _cell(row: Row, scale: Scale, setting: Setting, seed: int, steps: int | None, every_checkpoint: bool) -> Cell:
    config = dataclasses.replace(configured(setting.config, row.variants), seed=seed)
    if steps is not None:
        config = presets.change(
            config, optim={"max_steps": steps, "warmup_steps": min(config.optim.warmup_steps, steps // 10)}
        )
    last = config.optim.max_steps
    every = -(-last // scale.checkpoints)
    config = presets.change(
        config,
        runtime={"save_every": every, "eval_every": every, "keep_checkpoints": scale.checkpoints, "early_stop": 0},
    )
    ranked = (*range(every, last, every), last) if every_checkpoint else (last,)
    return Cell(row, config, ranked, scale.rank_samples, setting.corpus)


def configured(config: RunConfig, variants: tuple[str, ...]) -> RunConfig:
    for name in variants:
        config = presets.variant(config, name)
    return config


def rank_stage(step: int) -> str:
    return f"rank at {step}"


def differences(one: RunConfig, other: RunConfig) -> list[tuple[str, Any, Any]]:
    """(field, value, other value) where two configurations differ in what decides the result."""
    a, b = to_dict(one), to_dict(other)
    return [
        (f"{section}.{name}", a[section][name], b[section][name])
        for section in ("model", "masking", "optim")
        for name in a[section]
        if a[section][name] != b[section][name]
    ]


def the_store_fits(plan: Plan, seq_len: int, cased: bool, where: str) -> None:
    """One store was given for all of the plan: raises UserError if the plan wants several, or another one."""
    corpora = plan.corpora
    if len(corpora) > 1:
        wanted = " and ".join(c.name for c in corpora)
        raise UserError(f"{plan.experiment.name} at scale {plan.scale.name} needs stores {wanted}: give the text")
    limit = min(cell.config.model.max_positions for cell in plan.cells)
    require(
        seq_len <= limit and cased == corpora[0].cased,
        f"{where} holds {'cased' if cased else 'uncased'} samples of up to {seq_len} tokens; scale {plan.scale.name} "
        f"takes {'cased' if corpora[0].cased else 'uncased'} ones of at most {limit}: give the text instead",
    )
