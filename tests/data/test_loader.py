"""Updates: the samples of an update, each once, in micro-batches within the token budget; the same from any process."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from maelm_fast import native
from maelm_fast.batch import PackedBatch, RaggedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.loader import TrainingBatches, training_updates
from maelm_fast.data.masking import pack
from maelm_fast.data.token_store import TokenStore
from maelm_fast.data.update import new_row
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from tests.batches import assert_same_batch
from tests.waiting import HANG

MASKER = Masker(MaskingConfig(), Vocabulary(300, 299, (0, 1, 2, 3, 299)), seed=5, encoder_sees_mask=False)
SMALL = Masker(MaskingConfig(), Vocabulary(250, 249, (0, 249)), seed=5, encoder_sees_mask=False)


def batches(store: TokenStore, batch_size: int, micro_batch_size: int, mask_on_device: bool = False) -> TrainingBatches:
    return TrainingBatches(store, MASKER, batch_size, micro_batch_size, mask_on_device)


def assert_same(a: list[PackedBatch] | list[RaggedBatch], b: list[PackedBatch] | list[RaggedBatch]) -> None:
    for x, y in zip(a, b, strict=True):
        assert_same_batch(x, y)


@pytest.mark.parametrize(("batch_size", "micro_batch_size"), [(12, 5), (8, 4), (3, 10)])
def test_full_samples_make_micro_batches_in_a_row(store: Path, batch_size: int, micro_batch_size: int) -> None:
    opened = TokenStore.open(store, "train")
    loaded = batches(opened, batch_size, micro_batch_size)
    for update in (0, 3, len(opened) // batch_size):  # the last runs into the second epoch
        ids, epochs = loaded.samples(update)
        parts = [slice(i, i + micro_batch_size) for i in range(0, batch_size, micro_batch_size)]
        rows = [opened[int(i)] for i in ids]
        expected = [pack(rows[part], ids[part], epochs[part], MASKER) for part in parts]
        assert_same(loaded[update], expected)


@pytest.mark.parametrize("mode", ["full", "document"])
@pytest.mark.parametrize("mask_on_device", [False, True])
def test_the_reference_makes_the_same_updates(
    mode: str, mask_on_device: bool, store: Path, document_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order, reading, packing decision and masks in C++ and without it."""
    if native.host() is None:
        pytest.skip(native.reasons["host"])
    path = store if mode == "full" else document_store
    updates = (0, 7, len(TokenStore.open(path)) // 50)  # the last runs into the second epoch
    built = batches(TokenStore.open(path), 50, 6, mask_on_device)
    compiled = [built[update] for update in updates]
    monkeypatch.setattr(native, "host", lambda: None)
    plain = batches(TokenStore.open(path), 50, 6, mask_on_device)
    for update, micro_batches in zip(updates, compiled, strict=True):
        assert_same(plain[update], micro_batches)


def test_masks_left_to_the_device(document_store: Path) -> None:
    """The same samples in the same micro-batches, with what keys their masks."""
    opened = TokenStore.open(document_store)
    for ragged, packed in zip(batches(opened, 40, 4, True)[3], batches(opened, 40, 4)[3], strict=True):
        assert isinstance(ragged, RaggedBatch)
        assert ragged.ids.dtype == torch.int32
        assert tuple(ragged.lengths) == packed.decoder.lengths
        rows = [row.numpy() for row in ragged.ids.split(ragged.lengths.tolist())]
        assert all((row == opened[i]).all() for row, i in zip(rows, ragged.samples, strict=True))
        assert_same([pack(rows, ragged.samples, ragged.epochs, MASKER)], [packed])


def test_micro_batches_of_documents_are_evenly_full(document_store: Path) -> None:
    loaded = batches(TokenStore.open(document_store), 256, 16)
    for update in range(3):
        sizes = [batch.counts.original for batch in loaded[update]]
        assert len(sizes) > 2
        assert sum(sizes) >= 0.99 * len(sizes) * max(sizes)


def test_a_token_of_another_vocabulary_is_refused(store: Path) -> None:
    opened = TokenStore.open(store)
    for mask_on_device in (False, True):
        with pytest.raises(UserError, match="outside the vocabulary of 250"):
            TrainingBatches(opened, SMALL, 64, 8, mask_on_device)[0]


def test_documents_fill_micro_batches(document_store: Path) -> None:
    opened = TokenStore.open(document_store, "train")
    loaded = batches(opened, 64, 4)
    budget = 4 * opened.manifest.seq_len
    for update in range(3):
        micro_batches = loaded[update]
        sizes = [batch.counts.original for batch in micro_batches]
        assert max(sizes) <= budget
        assert len(sizes) == -(-sum(sizes) // budget)  # as few as can be
        lengths = [len(opened[int(i)]) for i in loaded.samples(update)[0]]
        assert sorted(n for batch in micro_batches for n in batch.decoder.lengths) == sorted(lengths)
        places = [place(loaded, update, batch) for batch in micro_batches]
        assert sorted(p for part in places for p in part) == list(range(64))
        assert all(part == sorted(part) for part in places)


def place(loaded: TrainingBatches, update: int, batch: PackedBatch) -> list[int]:
    """Where in the update each sequence of a micro-batch stands, recognised by its masked tokens and their places."""

    def key(batch: PackedBatch, s: int) -> tuple[int, ...]:
        start, end = batch.masked.cu_seqlens[s : s + 2].tolist()
        at = batch.masked_index[start:end] - batch.decoder.cu_seqlens[s]
        return (batch.decoder.lengths[s], *at.tolist(), *batch.labels[start:end].tolist())

    ids, epochs = loaded.samples(update)
    rows = [loaded.store[int(i)] for i in ids]
    whole = pack(rows, ids, epochs, MASKER)
    known: dict[tuple[int, ...], list[int]] = {}
    for s in range(len(rows)):
        known.setdefault(key(whole, s), []).append(s)
    assert len(known) > len(rows) // 2
    return [known[key(batch, s)].pop(0) for s in range(len(batch.visible.lengths))]


@pytest.mark.parametrize("workers", [0, 2])
def test_updates_are_the_same_from_any_process(document_store: Path, workers: int) -> None:
    loaded = batches(TokenStore.open(document_store, "train"), 24, 3)
    updates = [u.micro_batches() for u in training_updates(loaded, 2, 5, workers, pin_memory=False)]
    assert len(updates) == 3
    for i, update in enumerate(updates):
        assert_same(update, loaded[2 + i])
        for batch in update:
            assert all(tensor.data_ptr() % 64 == 0 for tensor in batch.tensors)


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_tokens_are_one_line_from_any_process(store: Path, workers: int) -> None:
    loaded = TrainingBatches(TokenStore.open(store), SMALL, 64, 8)
    with pytest.raises(UserError, match=r"^token id \d+ is outside the vocabulary of 250: [^\n]*$"):
        next(training_updates(loaded, 0, 2, workers, pin_memory=False))


FAILING = """
import sys
from maelm_fast.config import MaskingConfig
from maelm_fast.data.loader import TrainingBatches, training_updates
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.data.token_store import TokenStore
if __name__ == "__main__":
    store = TokenStore.open(sys.argv[1])
    batches = TrainingBatches(store, Masker(MaskingConfig(), Vocabulary(300, 299, (0, 299)), 5, False), 8, 8)
    updates = training_updates(batches, 0, 1000, 1, pin_memory=False)
    next(updates)
    raise ArithmeticError
"""


def test_a_trainer_that_fails_ends(store: Path, tmp_path: Path) -> None:
    """Loader processes leave SIGTERM alone while the trainer runs, but not when Python ends them at its exit: it would
    wait for them for ever, since the traceback keeps the updates from being closed."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(store)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG)
    assert run.returncode == 1
    assert run.stderr.endswith("ArithmeticError\n"), run.stderr


def test_a_loader_process_that_dies_is_one_line_when_its_update_is_asked_for(store: Path) -> None:
    """Not before: torch would raise wherever the trainer is, in a save say."""
    updates = training_updates(batches(TokenStore.open(store), 8, 8), 0, 1000, workers=1, pin_memory=False)
    next(updates)
    (process,) = multiprocessing.active_children()
    process.kill()
    os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)  # it has a status, which torch can look at
    with pytest.raises(UserError, match=r"^a loader process was killed by SIGKILL; the same command resumes [^\n]*$"):
        list(updates)


class OneRow(torch.utils.data.Dataset):
    def __getitem__(self, elements: int) -> tuple[bool, int]:
        row = new_row(elements)
        assert row.shape == (elements,)
        assert row.dtype == torch.int32
        return row.is_shared(), int(row.fill_(3).sum())


def test_a_loader_process_writes_into_shared_memory() -> None:
    assert OneRow()[7] == (False, 21)
    loader = torch.utils.data.DataLoader(
        OneRow(), sampler=[7], batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    assert list(loader) == [[True, 21]]


def test_many_micro_batches_need_few_file_descriptors(store: Path) -> None:
    """A process may often have 1,024; an update of 256 micro-batches has 2,560 tensors."""
    loaded = batches(TokenStore.open(store, "train"), 512, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512 if hard == resource.RLIM_INFINITY else min(512, hard), hard))
    try:
        for update in training_updates(loaded, 0, 3, workers=1, pin_memory=False):
            assert len(update.micro_batches()) == 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_data_loader_of_another_trainer_takes_one_pass(store: Path) -> None:
    loaded = batches(TokenStore.open(store), 100, 10)
    loader = torch.utils.data.DataLoader(loaded, batch_size=None)
    updates = list(loader)
    assert len(loader) == len(updates) == -(-len(loaded.store) // 100)
    assert_same(updates[-1], loaded[len(updates) - 1])
