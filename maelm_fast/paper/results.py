"""The finished parts of a plan as rows, one per measured number, and the questions that tables and figures ask them.

Columns: model, its pretraining seed; kind: "pretraining" (at its end), "evaluation" (during it), "rank", "finetuning",
a way of prompting, or "baseline", whose model is none; step: of the checkpoint; task, split, metric; cell: of the grid;
draw: the seed of fine-tuning or of the examples drawn; input, layer: of an effective rank; tokens, seconds: of
pretraining so far; value.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from maelm_fast.config import RunConfig
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.catalogue import GLUE, Row
from maelm_fast.paper.downstream import Prompting
from maelm_fast.paper.plan import PRETRAINING, Cell, Plan, rank_stage
from maelm_fast.paper.prompting.run import METRICS
from maelm_fast.paper.scores import AVERAGE, averages, best_cells, own_scores
from maelm_fast.reporting import frame, measured, where
from maelm_fast.work import Ledger

REAL = "without_mask"
"""The input whose tokens are all real, as downstream."""
BASELINES = "baselines"
"""The ledger's stage of what no model was needed for; its key is the task."""
RANDOM = "random initialisation"
_COLUMNS = "model seed kind step task split metric cell draw input layer tokens seconds value".split()


@dataclass(frozen=True)
class Results:
    """A snapshot: the ledger is read once."""

    plan: Plan
    ledger: Ledger

    @cached_property
    def _found(self) -> dict[tuple[str, str, str], dict[str, Any]]:
        """The ledger's last row of each part of the work."""
        return {(row["key"], row["stage"], row["config"]): row for row in self.ledger.rows()}

    def stage(self, cell: Cell, stage: str) -> dict[str, Any] | None:
        """The result of one of the cell's stages, if it is finished."""
        return self._found.get((cell.key, stage, cell.stages[stage]), {}).get("result")

    def pretraining(self, cell: Cell) -> dict[str, Any] | None:
        return self.stage(cell, PRETRAINING)

    def errors(self) -> list[tuple[Cell, str, str]]:
        """(cell, stage, error) of what failed when last tried."""
        return [
            (cell, stage, error)
            for cell in self.plan.runs
            for stage, config in cell.stages.items()
            if (error := self._found.get((cell.key, stage, config), {}).get("error"))
        ]

    def unfinished(self, units: bool = True) -> list[Cell]:
        """units: whether work on downstream tasks counts."""
        left = []
        for cell in self.plan.runs:
            downstream = {unit.stage for unit in cell.units}
            stages = [stage for stage in cell.stages if units or stage not in downstream]
            if any(self.stage(cell, stage) is None for stage in stages):
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

    @property
    def glue(self) -> list[Task]:
        return [task for task in self.plan.tasks if task.name in GLUE]

    @property
    def average_name(self) -> str:
        """What the mean over the tasks that are there may be called: the paper's AVG is over all eight, with both
        halves of MNLI."""
        tasks, found = self.glue, self.plan.found
        assert found is not None
        if len(tasks) < len(GLUE):
            return f"mean of {', '.join(task.title for task in tasks)}"
        both = all(len(found.data[task.name].validation) == len(task.validation) for task in tasks)
        return AVERAGE if both else "mean of the 8 tasks, MNLI matched only"

    # Rows

    @cached_property
    def rows(self) -> Any:
        cells = (row for cell in self.plan.cells for row in self._of_cell(cell))
        return frame([*cells, *self._baselines()], _COLUMNS)

    @cached_property
    def finetuned(self) -> Any:
        """The rows of fine-tuning in the best cells of the grid."""
        return best_cells(where(self.rows, kind="finetuning"), self.plan.tasks, ["model", "task", "step"])

    def _of_cell(self, cell: Cell) -> Iterator[dict[str, Any]]:
        base: dict[str, Any] = {"model": cell.row.title, "seed": cell.config.seed}
        if found := self.pretraining(cell):
            end = {**base, "kind": "pretraining", "step": found["step"], "tokens": found["tokens"]}
            for metric in ("val_loss", "val_accuracy", "unigram_nats"):
                yield {**end, "seconds": found["seconds"], "metric": metric, "value": found[metric]}
            for point in found["curve"]:
                at = {key: point[key] for key in ("step", "tokens", "seconds")}
                yield {**base, "kind": "evaluation", **at, "metric": "val_loss", "value": point["val_loss"]}
        for step in cell.rank_steps:
            for name, ranks in (self.stage(cell, rank_stage(step)) or {"ranks": {}})["ranks"].items():
                yield from _by_layer({**base, "kind": "rank", "step": step, "input": name}, ranks)
        controls = self.plan.controls
        for unit in cell.units:
            found = self.stage(cell, unit.stage)
            if found is None or (unit.step == 0 and cell not in controls):
                continue
            about = {**base, "step": unit.step, "task": unit.task}
            if isinstance(unit, Prompting):
                about |= {"kind": unit.mode, "draw": unit.seed}
            else:
                about |= {"kind": "finetuning", "cell": unit.setting, "draw": unit.config.seed}
            if unit.step == 0:
                about["model"] = untrained(cell)
            yield from measured(about, found.get("test", found.get("metrics", {})))
            for when, of in found.get("ranks", {}).items():
                yield from _by_layer({**about, "input": f"{when} fine-tuning"}, of["ranks"])

    def _baselines(self) -> Iterator[dict[str, Any]]:
        for task in self.plan.tasks:
            assert self.plan.found is not None
            row = self._found.get((task.name, BASELINES, self.plan.found.data[task.name].fingerprint), {})
            for split, found in row.get("result", {}).items():
                for name, metrics in found.items():
                    yield from measured({"model": name, "kind": "baseline", "task": task.name}, {split: metrics})

    # Questions

    def of_row(self, row: Row, metric: str) -> list[float]:
        """A quantity of the finished pretraining of every seed."""
        found: list[float] = where(self.rows, model=row.title, kind="pretraining", metric=metric)["value"].tolist()
        return found

    def layers(self, row: Row, name: str) -> list[list[int]]:
        """Effective ranks by layer of the last checkpoint under an input, a list for every seed."""
        last = self.plan.of_row(row)[0].rank_steps[-1]
        return _lists(where(self.rows, model=row.title, kind="rank", step=last, input=name))

    def last_layer(self, row: Row, name: str) -> list[int]:
        return [layers[-1] for layers in self.layers(row, name)]

    def finetuned_layers(self, row: Row, task: Task, when: str) -> list[list[int]]:
        """Likewise on the development inputs of a task. when: "before fine-tuning" or "after fine-tuning"."""
        return _lists(where(self.finetuned, model=row.title, task=task.name, input=when))

    def curve(self, cell: Cell) -> list[dict[str, Any]]:
        """The evaluations of a run: "step", "tokens", "seconds" of training, "val_loss", and the last layer's "rank" on
        real tokens at that checkpoint, None if it is not there."""
        mine = where(self.rows, model=cell.row.title, seed=cell.config.seed)
        ranks = where(mine, kind="rank", input=REAL).set_index("step")["value"]
        points = where(mine, kind="evaluation").rename(columns={"value": "val_loss"})
        found: list[dict[str, Any]] = points[["step", "tokens", "seconds", "val_loss"]].to_dict("records")
        last = ranks.groupby(level=0).last().to_dict()  # the layers are in order
        return [{**point, "rank": last.get(point["step"])} for point in found]

    def accuracy_curve(self, row: Row, task: Task) -> list[dict[str, Any]]:
        """The row's checkpoints after fine-tuning: "step", "tokens", "seconds" of pretraining, "score" and the "seeds"
        that it is the median of. Over pretraining seeds the seconds are the median."""
        scores = own_scores(where(self.finetuned, model=row.title), task)
        passed = where(self.rows, model=row.title, kind="evaluation")
        points = []
        for step in self.plan.of_row(row)[0].rank_steps:
            seeds, at = where(scores, step=step)["value"].tolist(), where(passed, step=step)
            if seeds and len(at):
                points.append(
                    {
                        "step": step,
                        "tokens": int(at["tokens"].iloc[0]),
                        "seeds": seeds,
                        "seconds": at["seconds"].median(),
                        "score": statistics.median(seeds),
                    }
                )
        return points

    def end(self, row: Row, task: Task) -> dict[str, Any] | None:
        """The last point of the accuracy curve; None as long as the last checkpoint is not fine-tuned."""
        curve, last = self.accuracy_curve(row, task), self.plan.of_row(row)[0].rank_steps[-1]
        return curve[-1] if curve and curve[-1]["step"] == last else None

    def control(self, cell: Cell, task: Task) -> list[float]:
        """Of the cell's encoder fine-tuned untrained, the task's own metric with every seed."""
        found: list[float] = own_scores(where(self.finetuned, model=untrained(cell)), task)["value"].tolist()
        return found

    def means(self, kind: str = "finetuning") -> dict[str, float]:
        """By model, the mean over GLUE's tasks of medians over the seeds; of a way of prompting, of means over the
        draws."""
        return self._means(kind, self.finetuned if kind == "finetuning" else where(self.rows, kind=kind))

    def means_by_seed(self, kind: str = "finetuning") -> dict[str, list[float]]:
        """Likewise with the scores of one seed of fine-tuning, or one draw, of one pretraining seed at a time."""
        rows = self.finetuned if kind == "finetuning" else where(self.rows, kind=kind)
        found: dict[str, list[float]] = {}
        for _, of_seed in rows.groupby(["seed", "draw"], dropna=False):
            for model, mean in self._means(kind, of_seed).items():
                found.setdefault(model, []).append(mean)
        return found

    def _means(self, kind: str, rows: Any) -> dict[str, float]:
        if kind == "finetuning":
            return averages(rows, {task.name: task.metric for task in self.glue})
        return averages(rows, {task.name: METRICS.get(task.name, task.metric) for task in self.glue}, statistics.mean)


def _by_layer(about: dict[str, Any], ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    for layer, rank in enumerate(ranks):
        yield {**about, "metric": "rank", "layer": layer, "value": rank}


def _lists(rows: Any) -> list[list[int]]:
    return [[int(v) for v in of["value"]] for _, of in rows.groupby(["seed", "draw"], sort=False, dropna=False)]


def untrained(cell: Cell) -> str:
    """What the rows call the cell's encoder without pretraining."""
    return f"{RANDOM}, {cell.row.setting}"


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


def pretraining_input(config: RunConfig) -> str | None:
    """Which of the inputs that ranks are measured on is the one the encoder was pretrained on; None: none of them."""
    masking = config.masking
    if masking.policy != "random" and (config.model.decoder == "none" or masking.shown == 1.0):
        return "with_mask"
    return "visible" if masking.shown == 0.0 else None
