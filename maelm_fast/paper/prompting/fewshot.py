"""Few-shot learning as Gao et al. (2021) measure it: K examples of each class to train on and K others to choose by,
drawn five times; the task's whole validation split is the test.

The draws are functions of the seed (data/order.py), so that whoever has the same training file has the same ones; they
are not Gao et al.'s files, whose order came from NumPy. Their settings are the defaults here: AdamW without weight
decay, gradients clipped at 1, linear decay without warm-up, 1,000 steps, evaluated every 100. Of their grid of
learning rates and batch sizes one pair is the default, that at which they compare templates.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from maelm_fast.config import require
from maelm_fast.data.order import permutation
from maelm_fast.encoders import TextEncoder
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.finetuning.problem import Problem
from maelm_fast.finetuning.run import train
from maelm_fast.paper.prompting.templates import POLES
from maelm_fast.stop import Stop

SPLIT_SEEDS = (13, 21, 42, 87, 100)
GRID_LRS = (1e-5, 2e-5, 5e-5)
GRID_BATCH_SIZES = (2, 4, 8)
DEVELOPMENT = "development"
"""The split that chooses; of as many examples as there are to train on."""


@dataclass(frozen=True, kw_only=True)
class FewShotConfig:
    shots: int = 16
    """K: examples per class to train on, and as many to choose by; of a regression task per half of its range."""
    lrs: tuple[float, ...] = (1e-5,)
    """Peak learning rates. With several, or several batch sizes, every pair is tried and the draw's own development
    examples choose."""
    batch_sizes: tuple[int, ...] = (8,)
    steps: int = 1000
    evaluate_every: int = 100
    """Steps between evaluations on the development examples; the best one's weights are tested."""

    def __post_init__(self) -> None:
        for name in ("shots", "steps", "evaluate_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        require(bool(self.lrs) and all(lr > 0 for lr in self.lrs), f"lr must be positive, not {list(self.lrs)}")
        require(
            bool(self.batch_sizes) and all(size >= 1 for size in self.batch_sizes),
            f"batch_size must be at least 1, not {list(self.batch_sizes)}",
        )
        require(
            self.steps % self.evaluate_every == 0,
            f"steps {self.steps} must be a multiple of evaluate_every {self.evaluate_every}",
        )


def base_config(**changes: Any) -> FinetuneConfig:
    """What is the same in all few-shot runs; changes: fields of FinetuneConfig."""
    defaults: dict[str, Any] = {
        "warmup": 0.0,
        "weight_decay": 0.0,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "clip_norm": 1.0,
    }
    return FinetuneConfig(**(defaults | changes))


def draw(examples: Examples, shots: int, seed: int) -> tuple[Examples, Examples]:
    """(training, development) examples: of every class, or half of a regression task's range, the first `shots` of the
    seed's order and the `shots` after them. Raises UserError if a class has too few."""
    task, names = examples.task, examples.task.labels
    if task.kind == "regression":
        groups, names = (task.scale(examples.labels) >= 0.5).astype(np.int64), tuple(POLES)
    else:
        groups = examples.labels
    order = permutation(np.arange(len(examples)), len(examples), seed, 0)
    parts: tuple[list[int], list[int]] = ([], [])
    for group, name in enumerate(names):
        members = order[groups[order] == group]
        require(
            len(members) >= 2 * shots,
            f"{task.name}: {len(members)} training examples of '{name}', but {shots} to train on and {shots} others to "
            "choose by are needed: use fewer --shots",
        )
        parts[0].extend(members[:shots].tolist())
        parts[1].extend(members[shots : 2 * shots].tolist())
    train_part, development = (examples.take(indices) for indices in parts)
    return train_part, replace(development, split=DEVELOPMENT)


MakeProblem = Callable[[TaskData, FinetuneConfig], Problem]


def few_shot(
    data: TaskData,
    encoder: TextEncoder,
    make: MakeProblem,
    few: FewShotConfig,
    base: FinetuneConfig,
    seed: int,
    *,
    resume: Path | None = None,
    stop: Stop = lambda: None,
) -> tuple[dict[str, Any], nn.Module]:
    """Trains on the seed's draw at every learning rate and batch size. Returns what was found, and the model that the
    development examples prefer (of equals the first).

    The result: lr, batch_size, development (value of the task's metric), best_step, and all cells. make: tokenises the
    task for `encoder`. resume: a directory for the state of the training in hand. Raises what `train` raises."""
    assert isinstance(data.train, Examples)
    shown, development = draw(data.train, few.shots, seed)
    cells: list[dict[str, Any]] = []
    best: nn.Module | None = None
    for lr in few.lrs:
        for size in few.batch_sizes:
            # One epoch over the examples repeated is as long as all steps.
            repeated = shown.take(np.arange(few.steps * size) % len(shown))
            config = replace(
                base, lr=lr, batch_size=size, epochs=1, evaluations_per_epoch=few.steps // few.evaluate_every, seed=seed
            )
            problem = make(TaskData(data.task, repeated, {DEVELOPMENT: development}, ()), config)
            state = resume / f"lr{lr:g}-batch{size}" if resume else None
            result, model, _ = train(problem, encoder, config, resume=state, stop=stop)
            cells.append(
                {
                    "lr": lr,
                    "batch_size": size,
                    "development": result.best,
                    "best_step": result.best_step,
                    "skipped": result.skipped,
                    "seconds": result.seconds,
                    "truncation": problem.truncation,
                }
            )
            chosen = max(cells, key=lambda cell: float(cell["development"]))
            best = model if chosen is cells[-1] else best
    assert best is not None
    if resume:
        shutil.rmtree(resume, ignore_errors=True)
    return {**chosen, "examples": len(shown), "cells": cells}, best
