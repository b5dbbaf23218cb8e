"""What is done with a pretrained model downstream: the tasks that are at hand, and the units of work on them.

A unit is a stage of a cell's work (plan.py), known by the hash of all that decides its result: the cell, the
checkpoint, the examples, the hyperparameters. Step 0 is the encoder as it was before pretraining, the control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from maelm_fast.config import to_dict
from maelm_fast.errors import UserError
from maelm_fast.finetuning import tasks
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData, read_task
from maelm_fast.finetuning.fingerprint import deciding, digest
from maelm_fast.finetuning.tables import HubUnreachable
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper.grids import Grid
from maelm_fast.paper.prompting.fewshot import SPLIT_SEEDS, FewShotConfig, base_config
from maelm_fast.paper.prompting.plan import MODES, Mode
from maelm_fast.paper.prompting.templates import TEMPLATES
from maelm_fast.paper.scales import Downstream

_YES = (("yes", "no"), ("true", "false"))
_NO = tuple((no, yes) for yes, no in _YES)
LABEL_WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sst2": (("bad", "good"), *_NO),
    "cola": (("wrong", "right"), *_NO),
    "mnli": (("yes", "perhaps", "no"), ("true", "or", "false")),
    "qnli": _YES,
    "rte": _YES,
    "mrpc": _NO,
    "qqp": _NO,
    "stsb": _NO,
}
"""What takes the place of the paper's label words, in the order of the classes, if a small vocabulary does not have
each of them as one token (ours): the first line of words that it has."""


def label_words(task: str) -> list[tuple[str, ...]]:
    """The paper's words for the classes of a task, then those that may take their place."""
    return [tuple(TEMPLATES[task].words.values()), *LABEL_WORDS[task]]


@dataclass(frozen=True)
class FineTuning:
    """One training on a task from one checkpoint."""

    task: str
    data: str
    """Fingerprint of the examples, those of the scale's limits."""
    step: int
    """Of the checkpoint; 0 is the encoder before pretraining."""
    setting: int
    """Number of the grid's cell."""
    config: FinetuneConfig
    ranks: bool
    """Whether effective ranks on the development inputs are measured afterwards."""

    @property
    def stage(self) -> str:
        return f"finetune {self.task} setting {self.setting} seed {self.config.seed} at {self.step}"

    def hash(self, cell: str) -> str:
        """cell: its key."""
        return digest(cell, self.step, self.data, deciding(self.config), self.ranks)


@dataclass(frozen=True)
class Prompting:
    """One prompting mode on a task; of the few-shot modes one of the splits."""

    task: str
    data: str
    step: int
    mode: Mode
    seed: int | None
    """Of the draw of examples; None for zero-shot."""
    few: FewShotConfig

    @property
    def stage(self) -> str:
        draw = "" if self.seed is None else f" draw {self.seed}"
        return f"prompt {self.task} {self.mode}{draw} at {self.step}"

    def hash(self, cell: str) -> str:
        """cell: its key."""
        few = None if self.seed is None else [to_dict(self.few), self.seed]
        words = None if self.mode == "head" else [TEMPLATES[self.task].text, label_words(self.task)]
        base = deciding(base_config())
        return digest(cell, self.step, self.data, self.mode, few, words, base)


Unit = FineTuning | Prompting


Files = Mapping[str, Sequence[str]]
"""Of a task, the "train" and "validation" arguments of read_task that are needed: files not named after their split."""


@dataclass(frozen=True)
class Found:
    """The tasks of an experiment that are at hand."""

    sources: tuple[str, ...]
    """Directories, or hub."""
    left_out: dict[str, str]
    """Task -> why it is not there."""
    data: dict[str, TaskData] = field(compare=False, repr=False)
    """In the order in which the experiment wants them."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(of.task for of in self.data.values())


def find_tasks(
    names: Sequence[str], sources: Sequence[str], amount: Downstream, one: bool, files: Mapping[str, Files]
) -> Found:
    """Reads each task from the first of the sources (each read_task's `data`) that has it, as much as the scale takes;
    with `one` only the first task that is there. files: of the tasks that need them.

    A task that none of them has, or has in order, is left out with the reason; the plan and the report name it.
    Raises UserError if not one task is there, if one whose files were named is not read, or without a network for the
    hub."""
    data: dict[str, TaskData] = {}
    left_out: dict[str, str] = {}
    for name in names:
        if one and data:
            break
        named, reasons = files.get(name, {}), dict[str, str]()
        for source in sources:
            try:
                read = read_task(tasks.get(name), source, named.get("train", ()), named.get("validation", ()))
            except HubUnreachable:
                raise
            except UserError as error:
                reasons[source] = str(error)
            else:
                data[name] = read.limited(*amount.limits(read.task))
                break
        else:
            having = [source for source in sources if (Path(source) / name).is_dir()]
            left_out[name] = reasons[(having or list(sources))[0]]
    for name in files:
        if name not in data:
            why = left_out.get(name) or f"one task is enough here, and {next(iter(data))} comes first"
            raise UserError(f"files of {name} are named, but it is not read: {why}")
    if not data:
        shown = " ".join(sources)
        raise UserError(f"--tasks {shown}: none of {', '.join(names)} can be read; {names[0]}: {left_out[names[0]]}")
    return Found(tuple(sources), left_out, data)


def finetunings(
    found: Found, grid: Grid, amount: Downstream, steps: Sequence[int], ranked: str | None
) -> list[FineTuning]:
    """Every task from every one of these checkpoints, every cell of its grid with every seed. ranked: the task whose
    effective ranks are wanted, from the last checkpoint."""
    return [
        FineTuning(
            task.name,
            found.data[task.name].fingerprint,
            step,
            cell.number,
            replace(cell.config, seed=seed),
            task.name == ranked and step == steps[-1],
        )
        for task in found.tasks
        for step in steps
        for cell in grid.cells(task)
        for seed in range(amount.seeds)
    ]


def promptings(found: Found, amount: Downstream, step: int) -> list[Prompting]:
    return [
        Prompting(task.name, found.data[task.name].fingerprint, step, mode, seed, amount.few)
        for task in found.tasks
        for mode in MODES
        for seed in ((None,) if mode == "zero-shot" else SPLIT_SEEDS[: amount.draws])
    ]
