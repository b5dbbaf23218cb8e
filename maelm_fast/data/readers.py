"""Documents from files, globs, Hugging Face datasets and the embedded corpus, streamed.

A document is a tuple of lines, each stripped and not empty. Text is read as bytes and decoded line by line: a bad byte
is reported with its line and offset, and a file without line ends cannot fill the memory. zstd goes through pyarrow,
which notices a truncated file; the zstandard package takes it for a complete one.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from maelm_fast.config import require
from maelm_fast.data.corpus import Document, corpus_identity, embedded_corpus
from maelm_fast.errors import UserError

EMBEDDED = "embedded"
HUB_PREFIX = "hf:"
FORMATS = (".txt", ".md", ".rst", ".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = (".xz", ".gz", ".zst")
MAX_LINE_BYTES = 1 << 26
MAX_DOCUMENT_CHARS = 1 << 26


def expand_inputs(inputs: Sequence[str]) -> tuple[str, ...]:
    """Inputs as the user gave them to sources that can be read one by one; globs become sorted file names, and so does
    a directory: its files of known kinds, those in directories within it included.

    Besides paths (FORMATS; all but .parquet also .xz, .gz, .zst) an input may be `embedded` or `hf:NAME[:CONFIG]`; a
    file of such a name is given as `./embedded`.
    Raises UserError if a file is missing, of another kind or given twice, or if a glob matches no file.
    """
    sources = [source for item in inputs for source in _expand(item)]
    require(bool(sources), "no input given: name files, globs, hf:DATASET or embedded")
    times_given = Counter(map(os.path.abspath, sources))
    for source in sources:
        require(times_given[os.path.abspath(source)] == 1, f"{source} is given twice: remove one, or narrow the glob")
    return tuple(sources)


def identify(source: str) -> dict[str, Any]:
    """What tells a source apart without reading it: a file's size and time, versions for the embedded corpus, of a
    Hugging Face dataset only its name."""
    if source == EMBEDDED:
        return {"source": source, "versions": corpus_identity()}
    if source.startswith(HUB_PREFIX):
        return {"source": source}
    try:
        status = os.stat(source)
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from None
    return {"source": os.path.abspath(source), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def read_documents(sources: Iterable[str], text_field: str = "text") -> Iterator[Document]:
    """The documents of all sources (as `expand_inputs` gives them), in order. Raises UserError on the first fault.

    Documents of text files end at an empty line.
    text_field: the field of .jsonl and .json, and the column of .csv, .parquet and datasets that holds the text.
    """
    sources = tuple(sources)
    empty = True
    for source in sources:
        for document in _read_source(source, text_field):
            empty = False
            yield document
    require(not empty, f"no text in {', '.join(sources)}: give an input that is not empty")


def _expand(item: str) -> list[str]:
    if item == EMBEDDED or item.startswith(HUB_PREFIX):
        return [item]
    path = Path(item)
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*") if file.is_file() and _is_known(file.name))
        require(bool(files), f"{item} has no file of a known kind: {_KINDS}")
    elif glob.has_magic(item) and not path.exists():
        files = sorted(name for name in glob.glob(item, recursive=True) if os.path.isfile(name))
        require(bool(files), f"no file matches {item}: check the pattern and the working directory")
    else:
        require(path.exists(), f"input {item} does not exist: check the path and the working directory")
        files = [item]
    for name in files:
        _format_of(name)
        require(os.access(name, os.R_OK), f"{name} may not be read: change its permissions")
    return files


def _format_of(name: str) -> tuple[str, str]:
    """(format suffix, compression suffix or '')."""
    path = Path(name)
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    suffix = Path(path.stem).suffix if compression else path.suffix
    known = suffix in FORMATS and not (suffix == ".parquet" and compression)
    require(known, f"{name}: unknown kind of file: use {_KINDS}")
    return suffix, compression


def _is_known(name: str) -> bool:
    try:
        return bool(_format_of(name))
    except UserError:
        return False


_KINDS = f"{', '.join(FORMATS[:-1])} (each also .xz, .gz, .zst) or .parquet"


def _read_source(source: str, text_field: str) -> Iterator[Document]:
    if source == EMBEDDED:
        return iter(embedded_corpus())
    if source.startswith(HUB_PREFIX):
        return _dataset_documents(source, text_field)
    suffix, _ = _format_of(source)
    if suffix == ".parquet":
        return _parquet_documents(source, text_field)
    if suffix in (".jsonl", ".json", ".csv"):
        return _row_documents(source, suffix, text_field)
    return _text_documents(source)


def _text_documents(path: str) -> Iterator[Document]:
    lines: list[str] = []
    size = 0
    for number, text in _read_lines(path):
        line = text.strip()
        if line:
            lines.append(line)
            size += len(line)
            require(
                size <= MAX_DOCUMENT_CHARS,
                f"{path}: line {number}: a document of more than {MAX_DOCUMENT_CHARS >> 20} million characters: "
                f"separate documents by an empty line (if every line is a document: sed G)",
            )
        elif lines:
            yield tuple(lines)
            lines, size = [], 0
    if lines:
        yield tuple(lines)


def _row_documents(path: str, suffix: str, text_field: str) -> Iterator[Document]:
    for where, row in read_rows(path, suffix):
        yield from _row_document(row, text_field, f"{path}: {where}")


def read_rows(path: str, suffix: str) -> Iterator[tuple[str, Any]]:
    """(where it stands in the file, in words, the row) of a .jsonl, .json, .csv or .tsv file, compressed or not; of the
    last two every row is a dict of strings. UserError at the first fault.

    A tsv file is split at tabs and nothing else, as GLUE's are: a quotation mark is text."""
    if suffix == ".json":
        return _json_rows(path)
    return _jsonl_rows(path) if suffix == ".jsonl" else _delimited_rows(path, tabs=suffix == ".tsv")


def _jsonl_rows(path: str) -> Iterator[tuple[str, Any]]:
    for number, text in _read_lines(path):
        if text.strip():
            try:
                yield f"line {number}", json.loads(text)
            except (ValueError, RecursionError):
                raise UserError(f"{path}: line {number} is not JSON: write one object per line") from None


def _json_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Of a file that is one list of objects, or an object with that list as its "data", which is read whole; or of one
    that is .jsonl by another name, whose first line is an object."""
    first = next((text for _, text in _read_lines(path) if text.strip()), "")
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(first)
        if isinstance(content, dict) and not isinstance(content.get("data"), list):
            yield from _jsonl_rows(path)
            return
    try:
        content = json.loads("".join(text for _, text in _read_lines(path)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {first_line(error)}") from None
    rows = content.get("data", [content]) if isinstance(content, dict) else content
    require(isinstance(rows, list), f"{path} is neither a list of objects nor one object per line: rewrite it")
    yield from ((f"object {number}", row) for number, row in enumerate(rows, 1))


def _delimited_rows(path: str, tabs: bool) -> Iterator[tuple[str, Any]]:
    """The first line names the columns. A row is known by the line it starts at."""
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = (text for _, text in _read_lines(path))
    reader: Any = csv.reader(lines, strict=True)
    rows = (text.rstrip("\n").removesuffix("\r").split("\t") for text in lines) if tabs else reader
    header, line = None, 1
    try:
        for row in rows:
            where, line = f"line {line}", line + 1 if tabs else reader.line_num + 1
            if header is None:
                header = [name.strip() for name in row]
                for name, times in Counter(header).items():
                    require(times == 1 or not name, f"{path}: {where} names column '{name}' twice: rename one")
            elif row not in ([], [""]):  # an empty line
                told = f"{path}: {where} has {len(row)} fields and the first line {len(header)}"
                require(len(row) == len(header), f"{told}: mend or remove the line")
                yield where, dict(zip(header, row, strict=True))
    except csv.Error as error:
        remedy = "close its quotation marks, or give the file as .jsonl"
        raise UserError(f"{path}: line {line} is damaged ({error}): {remedy}") from None


def _parquet_documents(path: str, text_field: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = itertools.count(1)
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            known = ", ".join(names)
            require(text_field in names, f"{path} has no column '{text_field}': set --text-field to one of {known}")
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    yield from _row_document({text_field: text}, text_field, f"{path}: row {next(rows)}")
    except UnicodeDecodeError:
        raise UserError(f"{path}: the text after row {next(rows) - 1} is not UTF-8: rewrite the file") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {first_line(error)}") from None


def _dataset_documents(source: str, text_field: str) -> Iterator[Document]:
    name, _, config = source.removeprefix(HUB_PREFIX).partition(":")
    try:
        from datasets import load_dataset

        rows = load_dataset(name, config or None, split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield from _row_document(row, text_field, f"{source}: row {number}")
    except UserError:
        raise
    except Exception as error:  # datasets raises whatever its network, file system and parsers raise
        raise UserError(f"{source} cannot be read: {first_line(error)}") from None


def _row_document(row: Any, text_field: str, where: str) -> Iterator[Document]:
    """The row's document, or nothing if its text is blank."""
    require(isinstance(row, dict), f"{where} has no field '{text_field}': it is not an object: mend or remove it")
    known = ", ".join(map(str, row))
    require(
        text_field in row, f"{where} has no field '{text_field}': set --text-field to one of {known}, or leave it out"
    )
    text = row[text_field]
    require(isinstance(text, str), f"{where}: field '{text_field}' is not a string: mend or remove the row")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: field '{text_field}' holds half a surrogate pair: mend or remove the row") from None
    if lines := tuple(line for part in text.split("\n") if (line := part.strip())):
        yield lines


def _read_lines(path: str) -> Iterator[tuple[int, str]]:
    """(line number from 1, line with its end). Raises UserError on bad UTF-8, a broken file or an endless line."""
    offset = 0
    try:
        with _open_binary(path) as stream:
            for number in itertools.count(1):
                line = stream.readline(MAX_LINE_BYTES)
                if not line:
                    return
                too_long = f"{path}: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB: break it"
                require(len(line) < MAX_LINE_BYTES, too_long)
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    where = f"{path}: line {number}, byte {offset + error.start} of the text"
                    raise UserError(f"{where}: not UTF-8: convert the file with iconv") from None
                yield number, text.removeprefix("\ufeff") if number == 1 else text
                offset += len(line)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} cannot be read to its end: {first_line(error)}") from None


def _open_binary(path: str) -> BinaryIO | lzma.LZMAFile | gzip.GzipFile | io.BufferedReader:
    compression = Path(path).suffix
    if compression == ".xz":
        return lzma.open(path)
    if compression == ".gz":
        return gzip.open(path)
    if compression == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(path, compression="zstd"))
    return open(path, "rb")


def first_line(error: BaseException) -> str:
    """What it says, for a message of one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
