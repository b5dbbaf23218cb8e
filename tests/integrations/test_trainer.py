"""transformers' Trainer: several processes are one, a resumed run draws its masks again, and what would cut a batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, Subset

from maelm_fast import MaeLmForPreTraining, MaskedTokenDataset, PackedMaskingCollator, TokenStore
from tests.integrations.ddp_trainer import ACCUMULATED, MASKING, STEPS, losses, trained
from tests.waiting import HANG

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_with_unequal_masks_are_one(document_store: Path, tmp_path: Path) -> None:
    store = TokenStore.open(document_store)
    rows, collator = MaskedTokenDataset(store), PackedMaskingCollator(store.tokenizer(), MASKING)
    collator.set_epoch(0)
    counts = [len(batch["labels"]) for batch in DataLoader(rows, batch_size=4, collate_fn=collator)]
    shares = [counts[i] / counts[i + 1] for i in range(0, 2 * ACCUMULATED * STEPS, 2)]
    assert max(shares) / min(shares) > 1.5  # so that the test can fail

    script = str(Path(__file__).with_name("ddp_trainer.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(
        [*command, str(document_store), str(tmp_path), "4"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    of_two = torch.load(tmp_path / "result.pt", weights_only=True)
    of_one = trained(str(document_store), str(tmp_path), 8)
    assert of_two["losses"] == pytest.approx(losses(of_one), abs=2e-6)
    assert len(set(of_two["losses"])) == STEPS
    for name, weight in of_one.model.state_dict().items():
        torch.testing.assert_close(of_two["weights"][name], weight, rtol=0.0, atol=2e-5, msg=name)  # lr is 1e-2


def test_a_resumed_run_draws_the_masks_it_would_have_drawn(document_store: Path, tmp_path: Path) -> None:
    """Two passes, in random order, stopped in the middle of the second."""
    rows = Subset(MaskedTokenDataset(TokenStore.open(document_store)), range(24))
    options = {"rows": rows, "max_steps": 6, "train_sampling_strategy": "random", "save_strategy": "steps"}
    whole = trained(str(document_store), str(tmp_path), 4, save_steps=4, **options)
    again = trained(
        str(document_store), str(tmp_path), 4, **options, resume_from_checkpoint=str(tmp_path / "checkpoint-4")
    )
    assert losses(again) == losses(whole)
    size = whole.model.config.vocab_size  # rows beyond it are padding, which is not saved
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name][:size], weight[:size]), name


def test_a_batch_that_accelerate_dispatches_is_refused(document_store: Path) -> None:
    store = TokenStore.open(document_store)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    collator = PackedMaskingCollator(store.tokenizer(), MASKING)
    rows = MaskedTokenDataset(store, seed=0)
    loader = accelerator.prepare(DataLoader(rows, batch_size=8, collate_fn=collator))
    model = MaeLmForPreTraining.from_preset("tiny", tokenizer=store.tokenizer(), num_layers=1)
    with pytest.raises(ValueError, match=r"something cut a packed batch.*dispatch_batches=False"):
        model(**next(iter(loader)))
