"""Whether a run's data are what they were: each shard of the store is compared with its checksum before the run's first
update, and again by a later start if its size, time or inode has changed since.

    RUN/verified.json   {"manifest": SHA-256 of one that has none of its own, else null,
                         "files": [[name, bytes, mtime_ns, ctime_ns, inode], ...]}

What keeps all of these and changes all the same, a failing disk, is noticed by a new run or by `data show --verify`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maelm_fast.data.token_store import MANIFEST_FILE, REMEDY, Shard, TokenStore, verify_shard
from maelm_fast.errors import UserError
from maelm_fast.training.files import write_json
from maelm_fast.training.parallel import Processes

TELL_BYTES = 1 << 30
"""So much takes long enough to read that it is said."""
REPORT_SECONDS = 10.0

Stamp = tuple[str, int, int, int, int]
"""Of a file: name, size in bytes, when its content and when anything of it was changed (ns), inode."""


def verify_data(record: Path, store: TokenStore, processes: Processes, say: Callable[[str], None] = print) -> None:
    """Raises UserError naming what is not as it was. record: the run's verified.json, which rank 0 reads and writes.

    Called by every process; each reads its share of the files. What has the same stamp in two of them is the same file;
    on a machine with a copy of its own that copy is compared too."""
    known, manifest = processes.from_main(lambda: _read(record)), store.manifest
    recorded: str | None = known.get("manifest")
    if manifest.sha256:
        recorded = None
    elif recorded is None:
        recorded = manifest.checksum
        say(f"{store.path}: prepared before manifests had a checksum; from now on this run compares it with today's")
    elif recorded != manifest.checksum:
        raise UserError(f"{store.path / MANIFEST_FILE} was changed since the run was started: {REMEDY}")
    shards = {shard.name: shard for split in manifest.splits.values() for shard in split.shards}
    seen = processes.everyone([_stamp(store.path / name) for name in shards])
    whole = {tuple(stamp) for stamp in known.get("files", ()) if isinstance(stamp, list)}
    mine = []
    for i, stamp in enumerate(sorted({stamp for stamps in seen for stamp in stamps} - whole)):
        ranks = [rank for rank, stamps in enumerate(seen) if stamp in stamps]
        if ranks[i % len(ranks)] == processes.rank:
            mine.append(shards[stamp[0]])
    _verify(store.path, mine, processes, say)
    files = sorted({stamp for stamps in processes.everyone(seen[processes.rank]) for stamp in stamps})
    processes.from_main(lambda: write_json(record, {"manifest": recorded, "files": files}))


def _verify(directory: Path, shards: list[Shard], processes: Processes, say: Callable[[str], None]) -> None:
    total, done, reported = sum(shard.bytes for shard in shards), 0, time.monotonic()
    if total >= TELL_BYTES:
        share = f"; this is the share of one of {processes.world} processes" if processes.world > 1 else ""
        say(f"{directory}: comparing {total / 1e9:.1f} GB with their checksums{share}")
    for shard in shards:
        processes.at(f"comparing {shard.name} with its checksum")
        verify_shard(directory, shard)
        done += shard.bytes
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            say(f"{directory}: compared {done / 1e9:.1f} of {total / 1e9:.1f} GB")


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}: {REMEDY}") from None
    return path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _read(record: Path) -> dict[str, Any]:
    """Nothing where there is none or it is damaged: then everything is compared."""
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
