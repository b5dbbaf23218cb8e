"""Rows of token ids to packed, masked batches, for the loops of others: transformers' Trainer, Accelerate, Lightning,
plain PyTorch. Nothing of transformers is imported.

A mask is keyed by (seed, epoch, idx), as in our own runs (maelm_fast/masking.py), so that it depends neither on the
batch, the worker process or the rank that draws it, nor on whether a run was resumed. A collator sees rows only: idx
must be in them, and of the epoch it must be told. Any of these does:

    the rows say it        field "epoch": MaskedTokenDataset(store, seed=0), or a data set of yours
    Trainer                Trainer(..., data_collator=collator, callbacks=[collator.callback()])
    Accelerate, PyTorch    collator.set_epoch(epoch) before each pass, as with a DistributedSampler
    Lightning              MaeLmDataModule has rows that say it

The epoch lies in shared memory: loader processes see it change, persistent ones too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.utils.data import Dataset, IterableDataset

from maelm_fast.batch import PackedBatch, to_kwargs
from maelm_fast.config import MaskingConfig, require
from maelm_fast.data.masking import pack
from maelm_fast.data.order import samples_at
from maelm_fast.data.token_store import TokenStore
from maelm_fast.masking import VALIDATION_EPOCH, Masker, Vocabulary
from maelm_fast.training.rundir import vocabulary_of

log = logging.getLogger(__name__)

_EPOCH, _SAID_EPOCH, _SAID_IDX = range(3)  # places in the shared memory
_UNKNOWN = -1
_WORDS = 1 << 32  # of either part of a key


class MaskedTokenDataset(Dataset[dict[str, Any]]):
    """A token store's samples as rows, for any DataLoader and sampler: {"input_ids": (n,) int64 NumPy, "idx": int}.

    Item i is sample i. With a seed it is the sample at place i of the order in which `pretrain` reads the store under
    that seed, pass after pass, and the row says its "epoch": read from place k * batch_size on without shuffling, these
    are the updates from k on of that run, masks included. samples: how many places there are; one pass by default.

    Rows of a validation split say the epoch of our evaluations, so that their masks are the same every time."""

    def __init__(self, store: TokenStore, *, seed: int | None = None, samples: int | None = None) -> None:
        require(seed is not None or samples is None, "samples counts places of an order, which needs a seed: give both")
        self.store, self.seed = store, seed
        self._length = len(store) if samples is None else samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        sample, epoch = int(index), None
        if self.seed is not None:
            samples, epochs = samples_at(sample, 1, len(self.store), self.seed)
            sample, epoch = int(samples[0]), int(epochs[0])
        if self.store.split == "validation":
            epoch = VALIDATION_EPOCH
        row = {"input_ids": self.store[sample].astype(np.int64), "idx": sample}
        return row if epoch is None else row | {"epoch": epoch}


class PackedMaskingCollator:
    """Rows, each a mapping with "input_ids" (n,), to the keyword arguments of MaeLmForPreTraining.forward: masked, and
    packed without padding. The collate_fn of a DataLoader, or a Trainer's data_collator.

        collator = PackedMaskingCollator(tokenizer)
        model(**collator([{"input_ids": [0, 17, 23, 2], "idx": 0}]))

    tokenizer: of transformers, or of the tokenizers library. masking: the paper's 15% by default. seed: 64 bits; with a
    row's "idx" and the epoch, each in [0, 2**32), it decides the row's masks (see the top of this file). Rows without
    "idx" are masked from PyTorch's generator, which a resumed run does not get back. Other fields are ignored, but for
    "attention_mask", where 0 marks padding, which is left out. encoder_sees_mask: MaeLm.encoder_sees_mask, True for a
    model without a decoder (RoBERTa).

    Raises UserError for a tokenizer without mask token, for masks that fall (rate_end), for a row without input_ids
    and for a token id outside the vocabulary."""

    def __init__(
        self,
        tokenizer: Any,
        masking: MaskingConfig = MaskingConfig(),
        *,
        seed: int = 0,
        encoder_sees_mask: bool = False,
    ) -> None:
        require(
            masking.rate_end is None,
            "a collator does not know the update, by which masking.rate_end changes the masks: give it masking.final, "
            "or train with 'maelm-fast pretrain'",
        )
        self.masker = Masker(masking, vocabulary(tokenizer), seed, encoder_sees_mask)
        self._shared = torch.tensor([_UNKNOWN, 0, 0]).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """The pass over the data that begins now, from 0 on; for all loader processes. Rows that say theirs keep it."""
        require(0 <= epoch < _WORDS, f"an epoch must lie in [0, 2**32), not {epoch}")
        self._shared[_EPOCH] = epoch

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return to_kwargs(self.pack(rows))

    def pack(self, rows: Sequence[Mapping[str, Any]]) -> PackedBatch:
        """The same as a PackedBatch, which MaeLm.forward takes."""
        samples, epochs = self._keys(rows)
        return pack([_tokens(row) for row in rows], samples, epochs, self.masker)

    def _keys(self, rows: Sequence[Mapping[str, Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not all("idx" in row for row in rows):
            self._say_once(
                _SAID_IDX,
                "the rows have no 'idx': masks are drawn from PyTorch's generator, and a resumed run draws others",
            )
            keys: NDArray[np.int64] = torch.randint(_WORDS, (2, len(rows))).numpy()
            return keys[0], keys[1]
        epoch = int(self._shared[_EPOCH])
        if epoch == _UNKNOWN:
            epoch = 0
            if not all("epoch" in row for row in rows):
                self._say_once(
                    _SAID_EPOCH,
                    "nobody has said which epoch this is, so every pass over the data draws the same masks: call "
                    "collator.set_epoch(epoch), or give a Trainer callbacks=[collator.callback()]",
                )
        epochs = [int(row.get("epoch", epoch)) for row in rows]
        return np.array([int(row["idx"]) for row in rows], dtype=np.int64), np.array(epochs, dtype=np.int64)

    def _say_once(self, what: int, message: str) -> None:
        """Over all loader processes."""
        if not self._shared[what]:
            self._shared[what] = 1
            log.warning("PackedMaskingCollator: %s", message)

    def callback(self) -> Any:
        """A TrainerCallback that tells this collator the epoch, also that of a resumed run, and raises UserError before
        the first step where the Trainer would cut packed rows or take fields away from them."""
        from transformers import TrainerCallback

        collator = self

        class Epochs(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                require(
                    not args.remove_unused_columns,
                    "the Trainer would take 'idx' away from the rows: set TrainingArguments(remove_unused_columns="
                    "False)",
                )
                require(args.n_gpu < 2, f"DataParallel on {args.n_gpu} GPUs {_CUTS}: start with torchrun instead")
                dispatch = args.accelerator_config.dispatch_batches
                if dispatch is None:  # Accelerate's default
                    dispatch = isinstance(more["train_dataloader"].dataset, IterableDataset)
                require(not dispatch, f"dispatch_batches {_CUTS}: set accelerator_config={{'dispatch_batches': False}}")

            def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                collator.set_epoch(int(state.epoch or 0))

        return Epochs()


_CUTS = "would cut a batch of packed sequences as if its rows were equally long"


def vocabulary(tokenizer: Any) -> Vocabulary:
    """What masking needs of a tokenizer, of transformers or of the tokenizers library. UserError if it has no mask
    token."""
    if isinstance(tokenizer, Tokenizer):
        return vocabulary_of(tokenizer)
    require(
        getattr(tokenizer, "mask_token_id", None) is not None,
        f"the tokenizer ({type(tokenizer).__name__}) has no mask token: add one, or use a masked language model's",
    )
    return Vocabulary(len(tokenizer), tokenizer.mask_token_id, tuple(sorted(tokenizer.all_special_ids)))


def _tokens(row: Mapping[str, Any]) -> NDArray[np.generic]:
    require(
        "input_ids" in row,
        f"a row has no 'input_ids', only {', '.join(row) or 'nothing'}: with a Trainer, set "
        "TrainingArguments(remove_unused_columns=False)",
    )
    ids = np.asarray(row["input_ids"], None if len(row["input_ids"]) else np.int64)  # NumPy takes [] for floats
    mask = row.get("attention_mask")
    return ids if mask is None else ids[np.asarray(mask).astype(bool)]
