"""Hyperparameter grids for fine-tuning, as data: the paper's Tables 4 and 5, a small one for small models, YAML files.

A grid says for each task which values each field of FinetuneConfig takes; a cell is one combination. What a grid does
not name keeps FinetuneConfig's default, which for the paper's single-valued rows is the paper's value.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from maelm_fast.config import require
from maelm_fast.data.files import read_yaml
from maelm_fast.data.order import permutation
from maelm_fast.errors import UserError, unknown
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.tasks import TASKS, Group, Task

Values = Mapping[str, tuple[Any, ...]]
"""Field of FinetuneConfig -> its values."""

GROUPS = get_args(Group)
NOT_SEARCHED = {
    "seed": "every cell runs with seeds 0 to N-1: --seeds N",
    "device": "use --device",
    "micro_batch_tokens": "use --micro-batch-tokens",
}
_BUDGET_SEED = 0


@dataclass(frozen=True)
class Cell:
    """One combination of a task's grid."""

    number: int
    """From 1, in the order of the whole grid, also where a budget leaves cells out."""
    values: dict[str, Any]
    """Of the fields that the grid names."""
    searched: tuple[str, ...]
    """Those of them that have more than one value in the task's grid: what sets its cells apart."""
    config: FinetuneConfig
    """All fields; its seed is 0."""

    @property
    def title(self) -> str:
        """ "lr 3e-05, epochs 3": what is searched; of a grid of one cell all that it names."""
        names = self.searched or tuple(self.values)
        return ", ".join(f"{name} {shown(self.values[name])}" for name in names) or "defaults"


def shown(value: Any) -> str:
    """ "2e-05" of 0.00002, "0.06" of 0.06, "32" of 32."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Grid:
    name: str
    about: str
    common: Values = field(default_factory=dict)
    """For every task."""
    sections: Mapping[str, Values] = field(default_factory=dict)
    """For a group ("small", "large", "squad") or a task, by name, the user's own being "custom"; a task's override its
    group's, these `common`."""

    def values(self, task: Task) -> dict[str, tuple[Any, ...]]:
        own = task.name if task.name in TASKS else "custom"
        return {**self.common, **self.sections.get(task.group, {}), **self.sections.get(own, {})}

    def size(self, task: Task) -> int:
        """Cells of the task's whole grid."""
        return math.prod(len(values) for values in self.values(task).values())

    def cells(self, task: Task, base: FinetuneConfig | None = None, budget: int | None = None) -> list[Cell]:
        """The task's cells in order, the last field varying fastest; with a budget below their number, that many of
        them, drawn by a fixed permutation (the same ones for every model and every call).

        Raises UserError for a combination that FinetuneConfig refuses."""
        values = self.values(task)
        searched = tuple(name for name, several in values.items() if len(several) > 1)
        combinations = list(itertools.product(*values.values()))
        chosen: Sequence[int] = range(len(combinations))
        if budget is not None and budget < len(combinations):
            drawn = permutation(np.arange(budget, dtype=np.int64), len(combinations), _BUDGET_SEED, 0)
            chosen = sorted(drawn.tolist())
        cells = []
        for i in chosen:
            named = dict(zip(values, combinations[i], strict=True))
            try:
                config = dataclasses.replace(base or FinetuneConfig(), **named, seed=0)
            except UserError as error:
                raise UserError(f"grid {self.name}, task {task.name}: {error}") from None
            cells.append(Cell(i + 1, named, searched, config))
        return cells


def _paper(name: str, about: str, small: tuple[float, ...], large: tuple[float, ...]) -> Grid:
    """Tables 4 and 5: the learning rates differ between base and large++ models, the rest does not. Table 5's rates are
    Table 4's of the small tasks."""
    both: Values = {"batch_size": (16, 32), "warmup": (0.06, 0.1)}
    return Grid(
        name,
        about,
        {"max_length": (512,)},
        {
            "small": {"epochs": (2, 3, 5, 10), "lr": small, **both},
            "large": {"epochs": (2, 3, 5), "lr": large, "batch_size": (32,), "warmup": (0.06,)},
            "squad": {"epochs": (2, 3), "lr": small, **both},
        },
    )


GRIDS = {
    grid.name: grid
    for grid in (
        _paper(
            "paper-base",
            "the paper's Tables 4 and 5 for base and base++ models: 336 cells over all tasks",
            (2e-5, 3e-5, 4e-5, 5e-5),
            (1e-5, 2e-5, 3e-5, 4e-5),
        ),
        _paper(
            "paper-large",
            "the paper's Tables 4 and 5 for large++ models: 336 cells over all tasks",
            (7e-6, 1e-5, 2e-5, 3e-5),
            (5e-6, 7e-6, 1e-5, 2e-5),
        ),
        Grid(
            "quick",
            "ours, for small models and a CPU: 3 cells per task (6 for small tasks), with higher learning rates",
            {"lr": (1e-4, 3e-4, 1e-3), "epochs": (3,), "batch_size": (32,), "max_length": (128,)},
            {"small": {"epochs": (3, 10)}, "squad": {"epochs": (2,), "max_length": (384,)}},
        ),
    )
}


def get(name_or_file: str) -> Grid:
    """A grid by name, or read from a YAML file. Raises UserError that lists the names, or says what is wrong where."""
    if name_or_file in GRIDS:
        return GRIDS[name_or_file]
    path = Path(name_or_file)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        raise UserError(f"{unknown('grid', name_or_file, GRIDS)}; or a YAML file")
    return read(path)


def read(path: Path) -> Grid:
    """A grid from YAML: `field: [values]`, or `field: value`, over FinetuneConfig's fields; and sections of the same
    under the name of a task, of a group (small, large, squad) or "custom". Raises UserError."""
    data = read_yaml(path)
    require(
        isinstance(data, dict) and bool(data), f"{path}: a grid is a mapping of fields to values, as 'lr: [1e-5, 2e-5]'"
    )
    sections = {key: value for key, value in data.items() if isinstance(value, dict) or key in (*GROUPS, *TASKS)}
    for key, value in sections.items():
        known = (*GROUPS, *TASKS, "custom")
        require(key in known, f"{path}: unknown section '{key}': use a task or a group of tasks ({', '.join(known)})")
        require(isinstance(value, dict), f"{path}: '{key}' is a section: put fields and their values under it")
    return Grid(
        path.name,
        f"from {path.name}",
        _values({key: value for key, value in data.items() if key not in sections}, str(path)),
        {key: _values(value, f"{path}, {key}") for key, value in sections.items()},
    )


def _values(data: dict[Any, Any], where: str) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(FinetuneConfig)
    result = {}
    for name, value in data.items():
        require(name not in NOT_SEARCHED, f"{where}: {name} is not searched over; {NOT_SEARCHED.get(name)}")
        if name not in hints:
            known = [field for field in hints if field not in NOT_SEARCHED]
            raise UserError(f"{where}: {unknown('field', str(name), known)}")
        values = value if isinstance(value, list) else [value]
        require(bool(values), f"{where}: {name} has no value: give at least one, or remove it")
        typed = tuple(_typed(name, one, hints[name], where) for one in values)
        for one in typed:
            require(typed.count(one) == 1, f"{where}: {name} has the value {one} twice: every cell runs once")
            try:
                FinetuneConfig(**{name: one})
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        require(
            name != "precision" or len(typed) == 1,
            f"{where}: precision takes one value: it is not searched over, for it does not tell one run from another",
        )
        result[name] = typed
    return result


def _typed(name: str, value: Any, hint: Any, where: str) -> Any:
    """The value as the field's type has it. YAML reads 1e-5, without a point, as text."""
    if get_origin(hint) is tuple:
        if isinstance(value, list) and len(value) == len(get_args(hint)):
            return tuple(_typed(name, one, kind, where) for one, kind in zip(value, get_args(hint), strict=True))
        raise UserError(f"{where}: each value of {name} is {len(get_args(hint))} numbers: {name}: [[0.9, 0.98]]")
    if get_origin(hint) is Literal:
        require(value in get_args(hint), f"{where}: {name} is one of {', '.join(get_args(hint))}, not {value!r}")
        return value
    if hint is float and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        require(math.isfinite(number), f"{where}: {name} takes numbers, not {value!r}")
        return number
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    raise UserError(f"{where}: {name} takes {'whole ' if hint is int else ''}numbers, not {value!r}")
