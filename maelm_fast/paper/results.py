"""The finished parts of a plan, as the tables and figures want them: by row, over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from maelm_fast.config import RunConfig
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.catalogue import Row
from maelm_fast.paper.downstream import Prompting
from maelm_fast.paper.plan import PRETRAINING, Cell, Plan, rank_stage
from maelm_fast.work import Ledger

REAL = "without_mask"
"""The input whose tokens are all real, as downstream."""
BASELINES = "baselines"
"""The ledger's stage of what no model was needed for; its key is the task."""


@dataclass(frozen=True)
class Results:
    """A snapshot: the ledger is read once."""

    plan: Plan
    ledger: Ledger

    @cached_property
    def _rows(self) -> dict[tuple[str, str, str], dict[str, Any]]:
        """The last row of each part of the work."""
        return {(row["key"], row["stage"], row["config"]): row for row in self.ledger.rows()}

    def stage(self, cell: Cell, stage: str) -> dict[str, Any] | None:
        """The result of one of the cell's stages, if it is finished."""
        return self._rows.get((cell.key, stage, cell.stages[stage]), {}).get("result")

    def pretraining(self, cell: Cell) -> dict[str, Any] | None:
        return self.stage(cell, PRETRAINING)

    def ranks(self, cell: Cell, step: int | None = None) -> dict[str, Any] | None:
        """Of a checkpoint, the last one by default: see run.py for what it holds."""
        return self.stage(cell, rank_stage(cell.rank_steps[-1] if step is None else step))

    def errors(self) -> list[tuple[Cell, str, str]]:
        """(cell, stage, error) of what failed when last tried."""
        return [
            (cell, stage, error)
            for cell in self.plan.runs
            for stage, config in cell.stages.items()
            if (error := self._rows.get((cell.key, stage, config), {}).get("error"))
        ]

    def unfinished(self, units: bool = True) -> list[Cell]:
        """units: whether work on downstream tasks counts."""
        left = []
        for cell in self.plan.runs:
            downstream = {unit.stage for unit in cell.units}
            stages = [stage for stage in cell.stages.items() if units or stage[0] not in downstream]
            if any("result" not in self._rows.get((cell.key, *stage), {}) for stage in stages):
                left.append(cell)
        return left

    def equal_losses(self) -> list[tuple[Cell, Cell]]:
        """Runs of one seed whose configurations differ but whose validation losses do not, to the last bit: whatever
        sets them apart had no effect."""
        seen: dict[tuple[int, float], Cell] = {}
        pairs = []
        for cell in self.plan.runs:
            if (result := self.pretraining(cell)) is not None:
                first = seen.setdefault((cell.config.seed, result["val_loss"]), cell)
                if first is not cell:
                    pairs.append((first, cell))
        return pairs

    def of_row(self, row: Row, key: str) -> list[float]:
        """A quantity of the finished pretraining of every seed."""
        return [float(r[key]) for cell in self.plan.of_row(row) if (r := self.pretraining(cell)) is not None]

    def layers(self, row: Row, name: str) -> list[list[int]]:
        """Effective ranks by layer under an input, a list for every seed."""
        return [r["ranks"][name] for cell in self.plan.of_row(row) if (r := self.ranks(cell)) is not None]

    def curve(self, cell: Cell) -> list[dict[str, Any]]:
        """The evaluations of a run: "step", "tokens", "seconds" of training, "val_loss", and the last layer's "rank" on
        real tokens at that checkpoint, None if it is not there."""
        pretraining = self.pretraining(cell)
        points = []
        for point in pretraining["curve"] if pretraining else []:
            ranks = self.ranks(cell, point["step"]) if point["step"] in cell.rank_steps else None
            points.append({**point, "rank": ranks["ranks"][REAL][-1] if ranks else None})
        return points

    def last_layer(self, row: Row, name: str) -> list[int]:
        return [layers[-1] for layers in self.layers(row, name)]

    # Downstream

    def finetuned(self, cells: Iterable[Cell], task: Task, step: int | None = None) -> list[dict[str, Any]]:
        """Results on a task of all seeds, of the grid's cell whose median is best by the task's own metric, among those
        with the most seeds: one lucky seed of a cell whose others failed must not win. step: the checkpoint's, the last
        by default. See finetune.py for what they hold."""
        settings: dict[int, list[dict[str, Any]]] = {}
        for cell in cells:
            for unit in cell.finetunings(task.name, step):
                if (result := self.stage(cell, unit.stage)) is not None:
                    settings.setdefault(unit.setting, []).append(result)
        selecting = task.validation[0]

        def merit(some: list[dict[str, Any]]) -> tuple[int, float]:
            return len(some), median(scores(some, selecting, task.metric))

        return max(settings.values(), key=merit, default=[])

    def score(self, cells: Iterable[Cell], task: Task, step: int | None = None) -> float | None:
        """Median over the seeds, by the task's own metric; of MNLI the mean of its halves, as in the paper's AVG."""
        results = self.finetuned(cells, task, step)
        halves = [median(values) for split in task.validation if (values := scores(results, split, task.metric))]
        return statistics.mean(halves) if halves else None

    def average(self, cells: Iterable[Cell], tasks: Sequence[Task], step: int | None = None) -> float | None:
        """Mean of the tasks' scores, None if one of them is not there: it would not compare with another row's."""
        cells = list(cells)
        values = [self.score(cells, task, step) for task in tasks]
        found = [value for value in values if value is not None]
        return statistics.mean(found) if found and len(found) == len(values) else None

    def finetuned_ranks(self, cells: Iterable[Cell], task: Task, when: str = "after") -> list[list[int]]:
        """Effective ranks by layer on the development inputs, of every seed. when: "before" fine-tuning or "after"."""
        return [result["ranks"][when]["ranks"] for result in self.finetuned(cells, task) if "ranks" in result]

    def accuracy_curve(self, row: Row, task: Task) -> list[dict[str, Any]]:
        """The row's checkpoints after fine-tuning: "step", "tokens", "seconds" of pretraining, "score" and the "seeds"
        that it is the median of. Over pretraining seeds the seconds are the median."""
        cells = self.plan.of_row(row)
        points = []
        for step in cells[0].rank_steps:
            results = self.finetuned(cells, task, step)
            at = [p for cell in cells for p in self.curve(cell) if p["step"] == step]
            if results and at:
                values = scores(results, task.validation[0], task.metric)
                seconds = median([p["seconds"] for p in at])
                points.append({"step": step, "tokens": at[0]["tokens"], "seconds": seconds, "score": median(values),
                               "seeds": values})  # fmt: skip
        return points

    def end(self, row: Row, task: Task) -> dict[str, Any] | None:
        """The last point of the accuracy curve; None as long as the last checkpoint is not fine-tuned."""
        curve, last = self.accuracy_curve(row, task), self.plan.of_row(row)[0].rank_steps[-1]
        return curve[-1] if curve and curve[-1]["step"] == last else None

    def prompted(self, row: Row, task: Task, mode: str) -> list[dict[str, Any]]:
        """Results of a prompting mode on a task, one for zero-shot, one for each split otherwise."""
        return [
            result
            for cell in self.plan.of_row(row)
            for unit in cell.units
            if isinstance(unit, Prompting) and (unit.task, unit.mode) == (task.name, mode)
            if (result := self.stage(cell, unit.stage)) is not None
        ]

    def baselines(self, task: Task) -> dict[str, dict[str, dict[str, float]]]:
        """Split -> name of a baseline -> metric -> value; empty if they are not made."""
        assert self.plan.found is not None
        row = self._rows.get((task.name, BASELINES, self.plan.found.fingerprints[task.name]), {})
        found: dict[str, dict[str, dict[str, float]]] = row.get("result", {})
        return found


def scores(results: Iterable[dict[str, Any]], split: str, metric: str) -> list[float]:
    """A metric on a validation split at each run's best evaluation; of the runs that have the split."""
    return [result["metrics"][split][metric] for result in results if split in result["metrics"]]


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def passes(points: Sequence[dict[str, Any]], target: float, key: str) -> float | None:
    """Where along `key` ("tokens", "seconds") the score first reaches the target, on straight lines between the points;
    None if it never does. The first point's own place if it is there already."""
    before = None
    for point in points:
        if point["score"] >= target:
            if before is None:
                return float(point[key])
            share = (target - before["score"]) / (point["score"] - before["score"])
            return float(before[key] + share * (point[key] - before[key]))
        before = point
    return None


def predicts_all(config: RunConfig) -> bool:
    """Whether the loss is over every token, each predicted from those before it: not to be compared with the others."""
    return config.model.decoder == "causal_cross"


def median_by_layer(seeds: Sequence[Sequence[int]]) -> list[float]:
    return [statistics.median(layer) for layer in zip(*seeds, strict=True)]


def pretraining_input(config: RunConfig) -> str | None:
    """Which of the inputs that ranks are measured on is the one the encoder was pretrained on; None: none of them."""
    masking = config.masking
    if masking.policy != "random" and (config.model.decoder == "none" or masking.shown == 1.0):
        return "with_mask"
    return "visible" if masking.shown == 0.0 else None
