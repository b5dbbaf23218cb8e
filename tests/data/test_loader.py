"""Updates: the samples of an update, each once, in micro-batches within the token budget; the same from any process."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import pytest
import torch

from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.data.loader import TrainingBatches, training_updates
from maelm_fast.data.masking import Vocabulary, pack
from maelm_fast.data.token_store import TokenStore

VOCABULARY = Vocabulary(300, 299, (0, 1, 2, 3, 299))


def batches(store: object, batch_size: int, micro_batch_size: int) -> TrainingBatches:
    return TrainingBatches(store, VOCABULARY, MaskingConfig(), 5, batch_size, micro_batch_size, False)  # type: ignore[arg-type]


def assert_same(a: list[PackedBatch], b: list[PackedBatch]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for field in dataclasses.fields(PackedBatch):
            p, q = getattr(x, field.name), getattr(y, field.name)
            assert torch.equal(p, q) if isinstance(p, torch.Tensor) else p == q, field.name


@pytest.mark.parametrize(("batch_size", "micro_batch_size"), [(12, 5), (8, 4), (3, 10)])
def test_full_samples_make_micro_batches_in_a_row(store: Path, batch_size: int, micro_batch_size: int) -> None:
    opened = TokenStore.open(store, "train")
    loaded = batches(opened, batch_size, micro_batch_size)
    for update in (0, 3, len(opened) // batch_size):  # the last runs into the second epoch
        ids, epochs = loaded.samples(update)
        parts = [slice(i, i + micro_batch_size) for i in range(0, batch_size, micro_batch_size)]
        rows = [opened[int(i)] for i in ids]
        expected = [
            pack(rows[part], ids[part], epochs[part], MaskingConfig(), VOCABULARY, 5, encoder_sees_mask=False)
            for part in parts
        ]
        assert_same(loaded[update], expected)


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
        assert sorted(n for batch in micro_batches for n in batch.decoder_lengths) == sorted(lengths)
        places = [place(loaded, update, batch) for batch in micro_batches]
        assert sorted(p for part in places for p in part) == list(range(64))
        assert all(part == sorted(part) for part in places)


def place(loaded: TrainingBatches, update: int, batch: PackedBatch) -> list[int]:
    """Where in the update each sequence of a micro-batch stands, recognised by its masked tokens and their places."""

    def key(batch: PackedBatch, s: int) -> tuple[int, ...]:
        start, end = batch.masked_cu_seqlens[s : s + 2].tolist()
        at = batch.masked_index[start:end] - batch.decoder_cu_seqlens[s]
        return (batch.decoder_lengths[s], *at.tolist(), *batch.labels[start:end].tolist())

    ids, epochs = loaded.samples(update)
    rows = [loaded.store[int(i)] for i in ids]
    whole = pack(rows, ids, epochs, loaded.masking, VOCABULARY, loaded.seed, False)
    known: dict[tuple[int, ...], list[int]] = {}
    for s in range(len(rows)):
        known.setdefault(key(whole, s), []).append(s)
    assert len(known) > len(rows) // 2
    return [known[key(batch, s)].pop(0) for s in range(len(batch.lengths))]


@pytest.mark.parametrize("workers", [0, 2])
def test_updates_are_the_same_from_any_process(document_store: Path, workers: int) -> None:
    loaded = batches(TokenStore.open(document_store, "train"), 24, 3)
    updates = list(training_updates(loaded, 2, 5, workers, pin_memory=False))
    assert len(updates) == 3
    for i, update in enumerate(updates):
        assert_same(update, loaded[2 + i])
        for batch in update:
            assert all(
                getattr(batch, f.name).data_ptr() % 64 == 0
                for f in dataclasses.fields(batch)
                if isinstance(getattr(batch, f.name), torch.Tensor)
            )


def test_many_micro_batches_need_few_file_descriptors(store: Path) -> None:
    """A process may often have 1,024; an update of 256 micro-batches has 2,304 tensors."""
    loaded = batches(TokenStore.open(store, "train"), 512, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512 if hard == resource.RLIM_INFINITY else min(512, hard), hard))
    try:
        for update in training_updates(loaded, 0, 3, workers=1, pin_memory=False):
            assert len(update) == 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
