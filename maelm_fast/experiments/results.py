"""The finished parts of a plan, as the tables and figures want them: by row, over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maelm_fast.config import RunConfig
from maelm_fast.experiments.catalogue import Row
from maelm_fast.experiments.ledger import Ledger
from maelm_fast.experiments.plan import PRETRAINING, Cell, Plan, rank_stage

REAL = "without_mask"
"""The input whose tokens are all real, as downstream."""


@dataclass(frozen=True)
class Results:
    plan: Plan
    ledger: Ledger

    def pretraining(self, cell: Cell) -> dict[str, Any] | None:
        return self.ledger.result(cell.key, PRETRAINING, cell.stages[PRETRAINING])

    def ranks(self, cell: Cell, step: int | None = None) -> dict[str, Any] | None:
        """Of a checkpoint, the last one by default: see run.py for what it holds."""
        stage = rank_stage(cell.rank_steps[-1] if step is None else step)
        return self.ledger.result(cell.key, stage, cell.stages[stage])

    def errors(self) -> list[tuple[Cell, str, str]]:
        """(cell, stage, error) of what failed when last tried."""
        return [
            (cell, stage, error)
            for cell in self.plan.runs
            for stage, config in cell.stages.items()
            if (error := self.ledger.error(cell.key, stage, config))
        ]

    def unfinished(self) -> list[Cell]:
        return [
            cell
            for cell in self.plan.runs
            if any(self.ledger.result(cell.key, stage, config) is None for stage, config in cell.stages.items())
        ]

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


def predicts_all(config: RunConfig) -> bool:
    """Whether the loss is over every token, each predicted from those before it: not to be compared with the others."""
    return config.model.decoder == "causal_cross"


def median_by_layer(seeds: Sequence[Sequence[int]]) -> list[float]:
    return [statistics.median(layer) for layer in zip(*seeds, strict=True)]


def pretraining_input(config: RunConfig) -> str | None:
    """Which of the inputs that ranks are measured on is the one the encoder was pretrained on; None: none of them."""
    if config.model.decoder == "none" or config.masking.shown == 1.0:
        return "with_mask"
    return "visible" if config.masking.shown == 0.0 and config.masking.policy == "mask" else None
