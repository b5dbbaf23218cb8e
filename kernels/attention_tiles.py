"""How the attention kernels cut the scores, and which tile each program takes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """How one kernel covers the scores: (rows of its own, rows a step of its loop), warps, pipeline stages."""

    own: int
    step: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """fwd and dq own query rows, dkv owns key rows. resident: programs of dq on one multiprocessor. red: dq adds to its
    band by `red` instead of load and store."""

    fwd: Tile
    dq: Tile
    dkv: Tile
    resident: int
    red: bool = False


TILES = {
    (80, 32): Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), 2),
    (80, 64): Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), 2),
    (80, 128): Tiles(Tile(128, 32, 8, 2), Tile(32, 32, 4, 1), Tile(64, 32, 8, 1), 2),
    (90, 32): Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), 2),
    (90, 64): Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), 2),
    (90, 128): Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 4, 1), Tile(64, 32, 8, 2), 2),
}
"""By (architecture, padded head dim): large ones that spill nothing in any variant. Not yet timed on a GPU. dq's warps
must not outnumber what its tile is cut into: some would hold the same scores, and both add them (add_to)."""
_64 = [(80, 64), (90, 64)]
CANDIDATES = {
    "forward 64 x 64": {key: replace(TILES[key], fwd=Tile(64, 64, 4, 3)) for key in _64},
    "band by red": {key: replace(TILES[key], red=True) for key in _64},
}
"""What a GPU is yet to be asked: benchmarks.attention times each beside TILES, into which the faster one goes."""
SMALL = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), 1)
"""What the interpreter runs."""


@contextlib.contextmanager
def trying(candidate: str) -> Iterator[None]:
    """Within the block its tiles are those of TILES. A layout keeps lists of tiles: it needs one of its own."""
    before = dict(TILES)
    TILES.update(CANDIDATES[candidate])
    try:
        yield
    finally:
        TILES.update(before)


def tiles_for(device: torch.device, head_dim: int) -> Tiles:
    if device.type != "cuda":
        return SMALL
    major, _ = torch.cuda.get_device_capability(device)
    return TILES[(90 if major >= 9 else 80, padded(head_dim))]


def padded(head_dim: int) -> int:
    return max(32, 1 << (head_dim - 1).bit_length())


@functools.lru_cache(maxsize=128)
def tile_list(lengths: tuple[int, ...], others: tuple[int, ...], own: int, device: torch.device) -> Tensor:
    """(tiles, 2) int32: sequence and first row of each tile of `own` rows. Sequences with the most rows to walk through
    (`others`) come first, so that the last programs to start are short. Kept by lengths: training on full sequences has
    one list."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention: run sequences of these lengths once before a CUDA graph records them")
    order = sorted(range(len(lengths)), key=lambda s: -others[s])
    pairs = [(s, first) for s in order for first in range(0, lengths[s], own)]
    listed = torch.tensor(pairs, dtype=torch.int32).view(-1, 2)
    return listed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else listed


@torch.compiler.assume_constant_result  # the lengths are constants of a traced graph, and so is what follows from them
def tile_lists(
    queries: tuple[int, ...], keys: tuple[int, ...], head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The query tiles of the forward kernel and of dq, the key tiles of dkv."""
    sizes = tiles_for(device, head_dim)
    fwd = (queries, keys, sizes.fwd.own, device)
    dq = (queries, keys, sizes.dq.own, device)
    dkv = (keys, queries, sizes.dkv.own, device)
    lists = {asked: tile_list(*asked) for asked in (fwd, dq, dkv)}
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _recorded.update(lists)
    return lists[fwd], lists[dq], lists[dkv]


_recorded: dict[Any, Tensor] = {}
"""Lists that a CUDA graph reads at every replay, one for equal lengths: tile_list may drop its own, and nothing tells
when the last graph is gone."""
