"""Which files, or which splits of a dataset on the hub, a task's examples come from.

A file called plainly after its split is taken for that split. Anything else that is taken is noted, and what is not
clear is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.finetuning.tables import FORMATS, Table, Wanted, read_hub, read_table
from maelm_fast.finetuning.tasks import Task

HUB = "hub"
TRAIN = "train"
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_NAMES_SHOWN = 10


def find_tables(
    task: Task, data: str, train: Sequence[str], validation: Sequence[str]
) -> tuple[dict[str, list[Table]], list[str]]:
    """(split -> its tables in order, notes), "train" first. Raises UserError if one is missing or several would do.

    A directory may lack a validation split other than the first.
    """
    optional = ("id", "title") if task.kind == "spans" else ("idx", "id")
    wanted = dict.fromkeys(optional, False) | dict.fromkeys((*task.text_columns, task.label_column), True)
    given = {TRAIN: list(train), **_by_split(task, validation)}
    if data == HUB or data.startswith(HUB + ":"):
        return _hub_tables(task, data, given, wanted)
    root = Path(data)
    require(root.exists(), f"--data {data} does not exist: give a directory, or hub")
    require(root.is_dir(), f"--data {data} is a file: give its directory, and the file's name with --train")
    directory = root / task.name if (root / task.name).is_dir() else root
    files: dict[str, list[Path]] = {}
    notes: list[str] = []
    for split, names in given.items():
        if names:
            files[split] = [_named_file(directory, name) for name in names]
            notes.append(f"{split}: {', '.join(names)}, as asked for")
        elif found := _split_files(directory, split, notes):
            files[split] = found
        elif split in (TRAIN, task.validation[0]):
            option = "--train" if split == TRAIN else "--validation"
            folder = f"no folder {task.name} and " if directory == root and task.official else ""
            raise UserError(
                f"{directory} has {folder}no file of the split '{split}' ({split}.parquet, .jsonl, .json, .csv or "
                f".tsv), only {listed(sorted(path.name for path in directory.iterdir())) or 'nothing'}: "
                f"name it with {option}"
            )
        else:
            notes.append(f"{split}: not there, so nothing is said about it")
    _require_once([str(path.resolve()) for paths in files.values() for path in paths])
    return {split: [read_table(path, wanted) for path in paths] for split, paths in files.items()}, notes


def _require_once(places: Sequence[str]) -> None:
    for place in places:
        require(places.count(place) == 1, f"{place} is given twice: what is trained on cannot be evaluated on")


def _by_split(task: Task, validation: Sequence[str]) -> dict[str, list[str]]:
    """The validation files asked for by split: with several splits each goes where its name says, or to the first."""
    result: dict[str, list[str]] = {split: [] for split in task.validation}
    for name in validation:
        stem = Path(name).name
        fitting = [split for split in task.validation for alias in _aliases(split) if stem.startswith(alias)]
        result[fitting[0] if fitting and len(task.validation) > 1 else task.validation[0]].append(name)
    return result


def _aliases(split: str) -> tuple[str, ...]:
    return (split, split.replace("validation", "dev", 1)) if split.startswith("validation") else (split,)


def _named_file(directory: Path, name: str) -> Path:
    for path in (directory / name, Path(name)):
        if path.is_file():
            return path
    raise UserError(f"there is no file {name} in {directory}, nor at that path: check its name")


def _split_files(directory: Path, split: str, notes: list[str]) -> list[Path]:
    """The file, or complete set of shards, of a split; [] if there is none."""
    files = sorted(path for path in directory.iterdir() if path.suffix in FORMATS and path.is_file())
    plain = [path for path in files if path.stem in _aliases(split)]
    if len(plain) == 1:
        return plain
    near = plain or [path for path in files if path.stem.startswith(_aliases(split))]
    if not near:
        return []
    name, names = _SHARD.sub("", near[0].stem), listed([path.name for path in near])
    whole = [path.stem for path in near] == [f"{name}-{i:05d}-of-{len(near):05d}" for i in range(len(near))]
    require(
        whole or len(near) == 1,
        f"{directory} has several files for the split '{split}': {names}: "
        f"name the one, or those, to read with {'--train' if split == TRAIN else '--validation'}",
    )
    if not (whole and name in _aliases(split)):
        notes.append(f"{split}: {names}, for want of a file named {split}{near[0].suffix}")
    return near


def _hub_tables(
    task: Task, data: str, given: dict[str, list[str]], wanted: Wanted
) -> tuple[dict[str, list[Table]], list[str]]:
    if data == HUB:
        require(
            task.hub is not None, f"{task.name} is not a task of the hub: give --data hub:owner/name, or a directory"
        )
        name, config = task.hub or ("", None)
    else:
        name, _, rest = data.removeprefix(HUB + ":").partition(":")
        config = rest or None
        require(bool(name), f"--data {data} names no dataset: write hub:owner/name or hub:owner/name:configuration")
    splits = {split: parts or [split] for split, parts in given.items()}
    _require_once([part for parts in splits.values() for part in parts])
    tables = {split: [read_hub(name, config, part, wanted) for part in parts] for split, parts in splits.items()}
    asked = [f"{split}: {', '.join(parts)} of {data}, as asked for" for split, parts in given.items() if parts]
    return tables, asked


def listed(names: Sequence[str]) -> str:
    """The first ten names for a message, and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
