"""Rows of parquet, jsonl, json, csv and tsv files, and of datasets on the hub, as columns of Python values.

How a file becomes rows is data/readers.py's to say; a .json file may also have SQuAD's own nesting of articles. A file
called plainly after its split is taken for that split. Anything else that is taken is noted, and what is not clear is
asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maelm_fast.config import require
from maelm_fast.data.readers import first_line, read_rows
from maelm_fast.errors import UserError
from maelm_fast.finetuning.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
_COLUMN_REMEDY = "(rename it in the file; for files of your own, --text-columns and --label-column name the columns)"


@dataclass(frozen=True)
class Table:
    source: str
    columns: dict[str, list[Any]]
    """The columns asked for, those optional that are there."""
    places: Sequence[str]
    """Where each row stands: "row 3", "line 7"."""
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of columns that the file describes as ClassLabel (the hub's parquet files do)."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.places)

    def where(self, row: int) -> str:
        return f"{self.source}: {self.places[row]}"


Wanted = Mapping[str, bool]
"""Column -> whether it must be there."""


def read_table(path: Path, wanted: Wanted) -> Table:
    """The columns of a file. Raises UserError if it is damaged or empty or lacks a column that must be there."""
    require(path.suffix in FORMATS, f"{path}: unknown kind of file: use one of {', '.join(FORMATS)}")
    try:
        table = (_parquet if path.suffix == ".parquet" else _text)(path, wanted)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    require(len(table) > 0, f"{path} has no rows: give a file with examples")
    return table


class HubUnreachable(UserError):
    """Nor will another data set of the hub be read; to try takes half a minute each."""


def read_hub(name: str, config: str | None, split: str, wanted: Wanted) -> Table:
    """A split of a dataset on the hub, or of a folder that `datasets` understands. Raises UserError in one line."""
    source = f"hub:{name}{f':{config}' if config else ''}"
    try:
        from datasets import load_dataset

        rows = load_dataset(name, config, split=split)
        arrow = rows.select_columns(_present(source, rows.column_names, wanted)).with_format("arrow")[:]
    except UserError:
        raise
    except Exception as error:  # datasets raises whatever its network, file system and parsers raise
        kind = HubUnreachable if isinstance(error, ConnectionError) else UserError
        raise kind(
            f"{source}, split {split}, cannot be read: {first_line(error)} "
            f"(splits are named with --train and --validation; without a network give --data a directory)"
        ) from None
    require(len(arrow) > 0, f"{source}, split {split}, has no rows: choose another")
    return _of_arrow(f"{source} {split}", arrow, rows.features)


def _of_arrow(source: str, arrow: pa.Table, features: Mapping[str, Any]) -> Table:
    """features: as `datasets` describes the columns."""
    columns = {column: arrow.column(column).to_pylist() for column in arrow.column_names}
    classes = {column: tuple(names) for column in columns if (names := getattr(features[column], "names", None))}
    return Table(source, columns, [f"row {number}" for number in range(1, len(arrow) + 1)], classes)


def _parquet(path: Path, wanted: Wanted) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    try:
        with pq.ParquetFile(path) as file:
            names = _present(str(path), file.schema_arrow.names, wanted)
            return _of_arrow(str(path), file.read(columns=names), Features.from_arrow_schema(file.schema_arrow))
    except UnicodeDecodeError:
        raise UserError(f"{path} holds text that is not UTF-8: rewrite the file") from None
    except pa.ArrowException as error:
        raise UserError(f"{path} cannot be read as parquet: {first_line(error)}: get the file again") from None


def _text(path: Path, wanted: Wanted) -> Table:
    found = list(read_rows(str(path), path.suffix))
    if found and all(isinstance(article, dict) and "paragraphs" in article for _, article in found):
        found = _squad_rows(path, [article for _, article in found])
    for where, row in found:
        require(isinstance(row, dict), f"{path}: {where} is not an object with named fields: write {{...}}")
        _present(f"{path}: {where}", list(row), wanted, "field")
    columns = {name: [row.get(name) for _, row in found] for name in wanted if any(name in row for _, row in found)}
    cells = [cell for _, row in found for cell in row.values()] if path.suffix == ".tsv" else []
    quoted = sum(cell[:1] == '"' == cell[-1:] and '""' in cell[1:-1] for cell in cells)
    note = f"{path}: {quoted:,} fields in quotation marks, which tsv keeps as text: if not meant to be there, use .csv"
    return Table(str(path), columns, [where for where, _ in found], notes=(note,) if quoted else ())


def _squad_rows(path: Path, articles: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """One row per question of the nesting in which SQuAD itself is published."""
    rows: list[tuple[str, Any]] = []
    for number, article in enumerate(articles, start=1):
        try:
            for paragraph in article["paragraphs"]:
                shared = {"title": article.get("title", ""), "context": paragraph["context"]}
                for question in paragraph["qas"]:
                    own = {name: question[name] for name in ("id", "question", "answers")}
                    rows.append((f"article {number}", shared | own))
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path}: article {number} is not as in SQuAD's files ({first_line(error)}): it needs paragraphs with "
                f"context and qas, and these id, question and answers"
            ) from None
    return rows


def _present(where: str, names: Sequence[str], wanted: Wanted, what: str = "column") -> list[str]:
    """The wanted ones among the names. Raises UserError if one that must be there is not."""
    for name, required in wanted.items():
        if required and name not in names:
            raise UserError(f"{where} has no {what} '{name}', only {', '.join(names) or 'none'} {_COLUMN_REMEDY}")
    return [name for name in names if name in wanted]


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
