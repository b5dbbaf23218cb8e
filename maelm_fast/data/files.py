"""Files that are complete or absent: written aside, flushed to disk and renamed. Checksums of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from maelm_fast.errors import UserError


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path` when all went well, synced; after an error nothing is left of it."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(place: Path, remedy: str) -> Iterator[None]:
    """Makes what the system says against writing, of a full disk say, one line that ends with the remedy."""
    try:
        yield
    except OSError as error:
        free = "free some space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        reason = f"{error.filename or place}: {error.strerror or error}"
        raise UserError(f"cannot write {reason}: {free}{remedy}") from None


def read_yaml(path: Path) -> Any:
    """What a YAML file that a person wrote holds. UserError if it cannot be read, or if a key stands twice in a
    mapping, of which YAML would silently take the last."""
    import yaml

    def check(node: Any) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            names = [other.value for other, _ in node.value]
            if names.count(key.value) > 1:
                raise UserError(f"{path}: line {key.start_mark.line + 1}: '{key.value}' stands twice: remove one")
            check(value)

    try:
        text = path.read_text(encoding="utf-8")
        check(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None


def sync(path: Path) -> None:
    """Forces a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """SHA-256, hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum_of_given(path: Path) -> str:
    """SHA-256 of a file that a person named or keeps. Raises UserError if it cannot be read."""
    try:
        return checksum(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
