"""Rows of parquet, jsonl, json, csv and tsv files, and of datasets on the hub, as columns of Python values.

A tsv file is split at tabs and nothing else, as GLUE's are: a quotation mark is text. csv files have quotes. A .json
file holds a list of objects, {"data": [...]}, one object per line, or SQuAD's own nesting of articles.

A file called plainly after its split is taken for that split. Anything else that is taken is noted, and what is not
clear is asked for.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maelm_fast.config import require
from maelm_fast.errors import UserError
from maelm_fast.finetuning.download import as_on_the_hub, task_folder
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
    places: list[int]
    """Of each row: its number from 1, or the line it starts at."""
    unit: str
    """"row" or "line"."""
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of columns that the file describes as ClassLabel (the hub's parquet files do)."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.places)

    def where(self, row: int) -> str:
        return f"{self.source}: {self.unit} {self.places[row]}"


Wanted = Mapping[str, bool]
"""Column -> whether it must be there."""
Reader = Callable[[Path, Wanted], Table]


def read_table(path: Path, wanted: Wanted, task: Task) -> Table:
    """The columns of a file. Raises UserError if it is damaged or empty or lacks a column that must be there."""
    require(path.suffix in FORMATS, f"{path}: unknown kind of file: use one of {', '.join(FORMATS)}")
    tsv: Reader = partial(_tsv, task=task)
    readers = (_parquet, _json_lines, _json, _csv, tsv)
    try:
        table = dict(zip(FORMATS, readers, strict=True))[path.suffix](path, wanted)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {_first_line(error)}") from None
    require(len(table) > 0, f"{path} has no rows: give a file with examples")
    return table


class HubUnreachable(UserError):
    """Nor will another data set of the hub be read; to try takes half a minute each."""


def read_hub(name: str, config: str | None, split: str, wanted: Wanted) -> Table:
    """A split of a dataset on the hub, or of a folder that `datasets` understands. Raises UserError in one line."""
    source = f"hub:{name}{f':{config}' if config else ''}"
    try:
        from datasets import ClassLabel, load_dataset

        rows = load_dataset(name, config, split=split)
        names = _present(source, rows.column_names, wanted)
        arrow = rows.select_columns(names).with_format("arrow")[:]
        features = {column: rows.features[column] for column in names}
        classes = {column: tuple(kind.names) for column, kind in features.items() if isinstance(kind, ClassLabel)}
    except UserError:
        raise
    except Exception as error:  # datasets raises whatever its network, file system and parsers raise
        reason = _first_line(error)
        kind = HubUnreachable if isinstance(error, ConnectionError) else UserError
        raise kind(
            f"{source}, split {split}, cannot be read: {reason} "
            f"(splits are named with --train and --validation; without a network give --data a directory)"
        ) from None
    require(len(arrow) > 0, f"{source}, split {split}, has no rows: choose another")
    return _of_arrow(f"{source} {split}", arrow, classes)


def _of_arrow(source: str, arrow: pa.Table, classes: dict[str, tuple[str, ...]]) -> Table:
    columns = {column: arrow.column(column).to_pylist() for column in arrow.column_names}
    return Table(source, columns, list(range(1, len(arrow) + 1)), "row", classes)


def _parquet(path: Path, wanted: Wanted) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = _present(str(path), file.schema_arrow.names, wanted)
            return _of_arrow(str(path), file.read(columns=names), _class_names(file.schema_arrow, names))
    except UnicodeDecodeError:
        raise UserError(f"{path} holds text that is not UTF-8: rewrite the file") from None
    except pa.ArrowException as error:
        raise UserError(f"{path} cannot be read as parquet: {_first_line(error)}: get the file again") from None


def _class_names(schema: pa.Schema, columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Class names from the description of features that `datasets` writes into a parquet file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: tuple(str(name) for name in features[column]["names"])
            for column in columns
            if features.get(column, {}).get("_type") == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError):  # no description, or of another kind
        return {}


def _json_lines(path: Path, wanted: Wanted) -> Table:
    rows, places = [], []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                raise UserError(f"{path}: line {number} is not JSON: write one object per line") from None
            places.append(number)
    return _objects(path, rows, places, "line", wanted)


def _json(path: Path, wanted: Wanted) -> Table:
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":  # after a whole first object: there is one per line
            return _json_lines(path, wanted)
        raise UserError(f"{path} is not JSON: {_first_line(error)}: mend it, or get it again") from None
    if isinstance(content, dict) and "data" in content:
        content = content["data"]
    elif isinstance(content, dict):
        content = [content]  # one object on one line
    require(isinstance(content, list), f"{path} is neither a list of objects nor one object per line: rewrite it")
    if content and all(isinstance(article, dict) and "paragraphs" in article for article in content):
        content = _squad_rows(path, content)
    return _objects(path, content, list(range(1, len(content) + 1)), "row", wanted)


def _squad_rows(path: Path, articles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per question of the nesting in which SQuAD itself is published."""
    rows = []
    for number, article in enumerate(articles, start=1):
        try:
            for paragraph in article["paragraphs"]:
                rows += [
                    {
                        "id": question["id"],
                        "title": article.get("title", ""),
                        "context": paragraph["context"],
                        "question": question["question"],
                        "answers": question["answers"],
                    }
                    for question in paragraph["qas"]
                ]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path}: article {number} is not as in SQuAD's files ({_first_line(error)}): it needs paragraphs with "
                f"context and qas, and these id, question and answers"
            ) from None
    return rows


def _objects(path: Path, rows: list[Any], places: list[int], unit: str, wanted: Wanted) -> Table:
    for row, place in zip(rows, places, strict=True):
        where = f"{path}: {unit} {place}"
        require(isinstance(row, dict), f"{where} is not an object with named fields: write {{...}}")
        _present(where, list(row), wanted, "field")
    names = [name for name in wanted if any(name in row for row in rows)]
    return Table(str(path), {name: [row.get(name) for row in rows] for name in names}, places, unit)


def _csv(path: Path, wanted: Wanted) -> Table:
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    rows, places, line = [], [], 1
    try:
        for row in reader:
            if row:
                rows.append(row)
                places.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}: line {line} is damaged ({error}): close its quotation marks, or give the file as .jsonl"
        ) from None
    return _fields(path, rows, places, wanted)


def _tsv(path: Path, wanted: Wanted, task: Task) -> Table:
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(_text(path).split("\n"), start=1)]
    rows = [line.split("\t") for _, line in lines if line]
    places = [number for number, line in lines if line]
    notes = [f"{path}: {note}" for note in as_on_the_hub(task, rows, places)]
    quoted = sum(any(cell[:1] == '"' == cell[-1:] and '""' in cell[1:-1] for cell in row) for row in rows)
    if quoted:
        notes.append(
            f"{path}: {quoted:,} of {len(rows) - 1:,} rows have fields in quotation marks, which tsv keeps as text: "
            f"if they are not meant to be there, use .csv"
        )
    return _fields(path, rows, places, wanted, tuple(notes))


def _fields(path: Path, rows: list[list[str]], places: list[int], wanted: Wanted, notes: tuple[str, ...] = ()) -> Table:
    """Columns by the names in the first row."""
    if not rows:
        return Table(str(path), {}, [], "line")
    header = [name.strip() for name in rows[0]]
    names = _present(str(path), header, wanted, "column in its first line")
    for name in names:
        require(header.count(name) <= 1, f"{path}: the first line names column '{name}' twice: rename one")
    for row, place in zip(rows, places, strict=True):
        require(
            len(row) == len(header),
            f"{path}: line {place} has {len(row)} fields and the first line {len(header)}: mend or remove the line",
        )
    columns = {name: [row[header.index(name)] for row in rows[1:]] for name in names}
    return Table(str(path), columns, places[1:], "line", notes=notes)


def _present(where: str, names: Sequence[str], wanted: Wanted, what: str = "column") -> list[str]:
    """The wanted ones among the names. Raises UserError if one that must be there is not."""
    for name, required in wanted.items():
        if required and name not in names:
            raise UserError(f"{where} has no {what} '{name}', only {', '.join(names) or 'none'} {_COLUMN_REMEDY}")
    return [name for name in names if name in wanted]


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}: line {line} is not UTF-8: convert the file with iconv") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


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
    directory = task_folder(root, task) or root
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
    return {split: [read_table(path, wanted, task) for path in paths] for split, paths in files.items()}, notes


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
