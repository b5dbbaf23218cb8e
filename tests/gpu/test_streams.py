"""What the sending stream brings while the computing one is far behind. On a CPU there are no streams: there the test
shows that it compares the right things."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from maelm_fast import ops
from maelm_fast.batch import PackedBatch, RaggedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.masking import pack
from maelm_fast.data.update import PackedUpdate, RaggedUpdate, Update
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.training.prefetch import on_device
from tests.devices import DEVICES

MASKER = Masker(MaskingConfig(), Vocabulary(1024, 1023, (0, 1, 2, 3, 1023)), 0, False)
CYCLES = 20_000_000  # some ten milliseconds, in which a copy of this size ends many times
LENGTHS = ([64] * 40, [128, 3, 77, 1, 90])  # the same of every update, so that one's memory suits the next
UPDATES = 8


def rows_of(update: int) -> list[list[np.ndarray]]:
    draw = np.random.default_rng(update)
    return [[draw.integers(4, 1023, n).astype(np.int32) for n in lengths] for lengths in LENGTHS]


def packed(update: int) -> PackedUpdate:
    batches = []
    for rows in rows_of(update):
        samples = np.arange(len(rows)) + 100 * update
        batches.append(pack(rows, samples, np.zeros_like(samples), MASKER))
    return PackedUpdate.of(batches)


def ragged(update: int) -> RaggedUpdate:
    rows = [row for part in rows_of(update) for row in part]
    samples, lengths = np.arange(len(rows)) + 100 * update, np.array([len(row) for row in rows])
    batch = RaggedBatch(torch.from_numpy(np.concatenate(rows)), lengths, samples, np.zeros_like(samples))
    return RaggedUpdate.of(batch, [len(lengths) for lengths in LENGTHS], MASKER)


def masked(update: Update) -> list[PackedBatch]:
    if isinstance(update, PackedUpdate):
        return update.micro_batches()
    return [
        ops.mask_and_pack(batch.ids, batch.lengths.tolist(), batch.samples, batch.epochs, update.masker)
        for batch in update.micro_batches()
    ]


def delivered(updates: list[Update], device: str, late: str = "") -> list[list[list[Tensor]]]:
    """All tensors of each update as the computing stream finds them when it has come to them, on the host. late: the
    stream that is kept busy before each."""

    def busy(stream: str) -> None:
        if device == "cuda" and stream == late:
            torch.cuda._sleep(CYCLES)

    def sent() -> Iterator[Update]:
        for update in updates:
            if device == "cpu":
                yield update
                continue
            whole = update.pin_memory()
            # on_device calls `to` in the sending stream
            yield mock.Mock(to=lambda there, whole=whole: (busy("sending"), whole.to(there))[1], wraps=whole)

    found = []
    for batches in on_device(sent(), masked, torch.device(device)):
        busy("computing")
        found.append([[tensor.clone() for tensor in batch.tensors] for batch in batches])
        del batches  # the update after the next may have its memory, once it is free
    return [[[tensor.cpu() for tensor in tensors] for tensors in batches] for batches in found]


@pytest.mark.parametrize("make", [packed, ragged], ids=["masks of the host", "masks of the device"])
@pytest.mark.parametrize("late", ["computing", "sending"])
@pytest.mark.parametrize("device", DEVICES)
def test_updates_arrive_whole_however_late_either_stream_is(device: str, late: str, make: Any) -> None:
    updates = [make(n) for n in range(UPDATES)]
    expected = [[batch.tensors for batch in masked(update)] for update in updates]
    found = delivered(updates, device, late)
    assert len(found) == UPDATES
    for batches, others in zip(found, expected, strict=True):
        for mine, theirs in zip(batches, others, strict=True):
            assert all(map(torch.equal, mine, theirs))
    assert not torch.equal(found[0][0][0], found[1][0][0])
