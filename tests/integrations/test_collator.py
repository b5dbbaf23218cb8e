"""The collator: the masks of our own loader, whoever asks for them, when and in what company; and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from maelm_fast.batch import from_kwargs, to_kwargs
from maelm_fast.config import MaskingConfig
from maelm_fast.data.loader import TrainingBatches, validation_batches
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.integrations.transformers.collator import MaskedTokenDataset, PackedMaskingCollator
from tests.batches import assert_same_batch

SPECIAL = dict(zip(("bos", "pad", "eos", "unk", "mask"), ("<s>", "<pad>", "</s>", "<unk>", "<mask>"), strict=True))


def collator_of(store: TokenStore, **options: Any) -> PackedMaskingCollator:
    return PackedMaskingCollator(store.tokenizer(), options.pop("masking", MaskingConfig()), **options)


@pytest.mark.parametrize("masking", [MaskingConfig(), MaskingConfig(count="stochastic", policy="bert", rate=0.3)])
def test_rows_in_order_are_the_updates_of_a_run(store: Path, masking: MaskingConfig) -> None:
    opened = TokenStore.open(store)
    collator = collator_of(opened, seed=5, masking=masking)
    batches = TrainingBatches(opened, collator.masker, batch_size=24, micro_batch_size=24)
    passes = 24 * (len(batches) + 2)
    rows = MaskedTokenDataset(opened, seed=5, samples=passes)
    loaded = list(DataLoader(rows, batch_size=24, collate_fn=collator))
    assert len(loaded) == len(batches) + 2
    for k in (0, 3, len(batches) - 1, len(batches) + 1):  # the last but one runs into the second pass
        assert_same_batch(from_kwargs(**loaded[k]), batches[k][0])


def test_masks_depend_on_seed_epoch_and_idx_alone(document_store: Path) -> None:
    opened = TokenStore.open(document_store)
    collator, rows = collator_of(opened, seed=5), MaskedTokenDataset(opened)
    collator.set_epoch(3)
    together = collator.pack([rows[i] for i in (4, 9, 2)])
    alone = collator.pack([rows[9]])
    start, end = together.masked.cu_seqlens[1:3].tolist()
    assert torch.equal(alone.masked.positions, together.masked.positions[start:end])
    assert torch.equal(alone.labels, together.labels[start:end])
    by_row = collator_of(opened, seed=5).pack([rows[i] | {"epoch": 3} for i in (4, 9, 2)])
    assert_same_batch(by_row, together)
    collator.set_epoch(4)
    assert not torch.equal(collator.pack([rows[9]]).masked.positions, alone.masked.positions)
    assert_same_batch(collator.pack([rows[9] | {"epoch": 3}]), alone)
    other = collator_of(opened, seed=6).pack([rows[9] | {"epoch": 3}])
    assert not torch.equal(other.masked.positions, alone.masked.positions)


def test_persistent_loader_processes_hear_of_the_epoch(document_store: Path) -> None:
    opened = TokenStore.open(document_store)
    rows, collator = MaskedTokenDataset(opened), collator_of(opened, seed=5)
    loader = DataLoader(
        rows,
        batch_size=200,
        collate_fn=collator,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for epoch in (0, 2):
        collator.set_epoch(epoch)
        for i, batch in enumerate(loader):
            expected = collator_of(opened, seed=5).pack(
                [rows[j] | {"epoch": epoch} for j in range(200 * i, min(200 * (i + 1), len(rows)))]
            )
            assert_same_batch(from_kwargs(**batch), expected)


def test_a_validation_split_has_the_masks_of_our_evaluations(store: Path) -> None:
    opened = TokenStore.open(store, "validation")
    collator, rows = collator_of(opened, seed=5), MaskedTokenDataset(opened)
    collator.set_epoch(7)
    ours = next(validation_batches(opened, collator.masker, 4, 4))
    order = {tuple(row["input_ids"].tolist()): row for row in (rows[i] for i in range(len(rows)))}
    theirs = [order[tuple(ids.tolist())] for ids in ours.original_ids.split(list(ours.decoder.lengths))]
    assert_same_batch(collator.pack(theirs), ours)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("maelm_fast")]


def test_without_idx_masks_come_from_the_generator_and_it_says_so_once(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = TokenStore.open(store)
    collator = collator_of(opened)
    rows = [{"input_ids": opened[i].tolist()} for i in range(8)]
    torch.manual_seed(1)
    first, second = collator.pack(rows), collator.pack(rows)
    torch.manual_seed(1)
    assert_same_batch(collator.pack(rows), first)
    assert not torch.equal(first.masked_index, second.masked_index)
    assert len(said(caplog)) == 1
    assert "no 'idx'" in said(caplog)[0]


def test_an_epoch_that_nobody_told_is_said_once(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = TokenStore.open(store)
    collator, rows = collator_of(opened), MaskedTokenDataset(opened)
    first = collator.pack([rows[0]])
    collator.pack([rows[1]])
    assert len(said(caplog)) == 1
    assert "set_epoch" in said(caplog)[0]
    caplog.clear()
    told = collator_of(opened)
    told.set_epoch(0)
    assert_same_batch(told.pack([rows[0]]), first)
    collator_of(opened).pack([rows[0] | {"epoch": 0}])
    assert not said(caplog)


def test_padding_is_left_out(store: Path) -> None:
    opened = TokenStore.open(store)
    collator = collator_of(opened)
    collator.set_epoch(0)
    ids = opened[3].tolist()
    padded = {"input_ids": [*ids, 1, 1], "attention_mask": torch.tensor([1] * len(ids) + [0, 0]), "idx": 3}
    assert_same_batch(collator.pack([padded]), collator.pack([{"input_ids": ids, "idx": 3}]))


def test_either_kind_of_tokenizer(store: Path) -> None:
    opened = TokenStore.open(store)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=opened.tokenizer(), **{f"{role}_token": name for role, name in SPECIAL.items()}
    )
    assert PackedMaskingCollator(theirs).masker == PackedMaskingCollator(opened.tokenizer()).masker
    without = PreTrainedTokenizerFast(tokenizer_object=opened.tokenizer())
    with pytest.raises(UserError, match="has no mask token: add one"):
        PackedMaskingCollator(without)


def test_bad_rows(store: Path) -> None:
    collator = collator_of(TokenStore.open(store))
    assert collator([{"input_ids": [], "idx": 0, "epoch": 0}])["decoder_lengths"] == [0]  # nothing to read is no fault
    with pytest.raises(UserError, match=r"no 'input_ids', only idx, epoch: .*remove_unused_columns=False"):
        collator([{"idx": 0, "epoch": 0}])
    with pytest.raises(UserError, match="token id 300 is outside the vocabulary of 300"):
        collator([{"input_ids": [0, 300, 2], "idx": 0, "epoch": 0}])
    with pytest.raises(UserError, match="an epoch must lie in"):
        collator.set_epoch(-1)
    with pytest.raises(UserError, match=r"give it masking\.final"):
        PackedMaskingCollator(TokenStore.open(store).tokenizer(), MaskingConfig(rate=0.4, rate_end=0.15))
    with pytest.raises(UserError, match="needs a seed"):
        MaskedTokenDataset(TokenStore.open(store), samples=3)
    rows = MaskedTokenDataset(TokenStore.open(store), seed=0, samples=3)
    assert [len(rows), len(list(rows))] == [3, 3]


def test_a_batch_that_was_cut_is_refused(store: Path) -> None:
    opened = TokenStore.open(store)
    rows = MaskedTokenDataset(opened, seed=0)
    batch = to_kwargs(collator_of(opened).pack([rows[i] for i in range(4)]))
    assert_same_batch(from_kwargs(**batch), from_kwargs(**batch))
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(ValueError, match=rf"^{name} has shape .*dispatch_batches=False.*torchrun$"):
                from_kwargs(**{**batch, name: value[:-1]})


def test_the_callback_tells_the_epoch_and_refuses_what_cuts(store: Path) -> None:
    collator = collator_of(TokenStore.open(store))
    callback = collator.callback()
    good = {"remove_unused_columns": False, "n_gpu": 1, "accelerator_config": SimpleNamespace(dispatch_batches=None)}
    loader = DataLoader([0])
    callback.on_train_begin(SimpleNamespace(**good), None, None, train_dataloader=loader)
    for change, remedy in (
        ({"remove_unused_columns": True}, "remove_unused_columns=False"),
        ({"n_gpu": 2}, "torchrun"),
        ({"accelerator_config": SimpleNamespace(dispatch_batches=True)}, "dispatch_batches.*False"),
    ):
        with pytest.raises(UserError, match=remedy):
            callback.on_train_begin(SimpleNamespace(**good | change), None, None, train_dataloader=loader)
    with pytest.raises(UserError, match=r"dispatch_batches.*False"):  # what it is by default for an iterable data set
        callback.on_train_begin(SimpleNamespace(**good), None, None, train_dataloader=DataLoader(Stream()))
    for epoch, expected in ((0, 0), (1.25, 1), (2.0, 2)):
        callback.on_epoch_begin(None, SimpleNamespace(epoch=epoch), None)
        row = {"input_ids": np.arange(3, 90), "idx": 5}
        assert_same_batch(collator.pack([row]), collator.pack([row | {"epoch": expected}]))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(())
