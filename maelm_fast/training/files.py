"""Files that are complete or absent, and read back only if they are what was written.

A file is written aside, flushed to disk and renamed; a directory likewise, with the checksum of every file in it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from maelm_fast.data.files import checksum, sync, written_aside

log = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"


def write_text(path: Path, text: str) -> None:
    """Replace a file's text in one step."""
    with written_aside(path) as file:
        file.write(text.encode())


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Create a directory in one step: fill(aside) writes its files, checksums are added, then it is renamed.

    Whatever goes wrong, `path` is not created and the part written so far is removed. A full disk is an OSError, also
    where safetensors wrote."""
    aside = begin_directory(path)
    try:
        fill(aside)
        finish_directory(path, sums_of(sorted(aside.iterdir())))
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, SafetensorError):
            raise OSError(str(error)) from None
        raise


def begin_directory(path: Path) -> Path:
    """An empty directory aside, to be filled; several processes may do that."""
    aside = path.with_name("." + path.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def sums_of(files: Iterable[Path]) -> dict[str, str]:
    """The files' checksums by name; the files are on the disk afterwards."""
    sums = {}
    for file in files:
        sums[file.name] = checksum(file)
        sync(file)
    return sums


def finish_directory(path: Path, sums: dict[str, str]) -> None:
    """What was filled becomes `path`."""
    aside = path.with_name("." + path.name + ".tmp")
    write_json(aside / CHECKSUMS, sums)
    sync(aside)
    os.rename(aside, path)
    sync(path.parent)


def read_checksums(path: Path) -> dict[str, str]:
    """By file name. Raises OSError, ValueError."""
    sums = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
    plain = isinstance(sums, dict) and all(Path(name).name == name for name in sums)
    if not sums or not plain:
        raise ValueError
    return dict(sums)


def damage(path: Path) -> str | None:
    """What is wrong with a directory made by write_directory, or None."""
    try:
        expected = read_checksums(path)
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read ({error.__class__.__name__})"
    for file in sorted(path.glob("*.safetensors")):
        if file.name not in expected:
            return f"{file.name} is not in {CHECKSUMS}"
    for name, digest in expected.items():
        try:
            if checksum(path / name) != digest:
                return f"{name} does not match its checksum"
        except OSError:
            return f"{name} is missing"
    return None


def steps(directory: Path) -> list[int]:
    """Those with a directory step_N, ascending; whether they are whole is not looked at."""
    names = [path.name[5:] for path in directory.glob("step_*")] if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def newest_whole(directory: Path) -> Path | None:
    """The newest step_N whose checksums agree; damaged ones are passed over with a warning."""
    for step in reversed(steps(directory)):
        path = directory / f"step_{step}"
        if (fault := damage(path)) is None:
            return path
        log.warning("checkpoint %s is damaged: %s; going back to the one before", path, fault)
    return None
