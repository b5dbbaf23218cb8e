"""Is what was written what we have? An exported directory, read back as a user would, against our model.

In float64 and plain PyTorch, where rounding is no excuse: right exports agree to 1e-12 or so (LayoutLMv3 to 1e-6,
since it stores the bias scaled and rounded), wrong ones differ by far more than the tolerance. Nothing is fetched from
the network.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maelm_fast.batch import layout_of
from maelm_fast.data.masking import pack_masked
from maelm_fast.data.tokenizer import PAD, with_mask_in_text
from maelm_fast.errors import UserError
from maelm_fast.masking import Vocabulary
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops.dispatch import REFERENCE, backends

TOLERANCE = 1e-5
_TEXTS = ("Once, upon a time.", "  two  spaces\tand ÅNGSTRÖM, 中文 🙂", "a <mask> b", "is <mask>.", "")


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences on real tokens. layers: hidden states compared, the embedding's output included.
    logits: of the masked tokens' scores; None if the format holds no LM head."""

    layers: int
    hidden: float
    logits: float | None


def compare_model(transformers: Any, model: MaeLm, path: Path, remote_code: bool) -> Differences:
    """Hidden states of every layer, and the masked tokens' scores if there is an LM head, on random sequences of one
    token to the maximum, padded right and left. Raises UserError if they differ by more than TOLERANCE."""
    ours = copy.deepcopy(model).double().eval()
    options = {"dtype": torch.float64, "local_files_only": True, "trust_remote_code": remote_code}
    longest = model.config.max_positions
    half = longest // 2
    batches = [
        _Padded(model, [1, max(1, half), longest], longest, "right"),
        _Padded(model, [1, min(2, longest), max(1, half)], min(longest, half + 3), "left"),
    ]
    with torch.inference_mode(), remote_code_removed(), backends(REFERENCE):
        theirs = transformers.AutoModel.from_pretrained(path, **options).eval()
        pairs = [pair for batch in batches for pair in batch.hidden_states(ours, theirs)]
        layers, hidden = len(pairs) // len(batches), _largest_difference(pairs)
        _check("hidden states", hidden)
        logits = None
        if theirs.config.architectures[0].endswith("ForMaskedLM"):
            del theirs
            whole = transformers.AutoModelForMaskedLM.from_pretrained(path, **options).eval()
            logits = _largest_difference([batch.masked_logits(ours, whole) for batch in batches])
            _check("masked tokens' scores", logits)
    return Differences(layers, hidden, logits)


def compare_tokenizer(transformers: Any, tokenizer: Any, path: Path) -> None:
    """The tokenizer read back gives our ids, with <mask> in a text those of `maelm-fast fill`. Raises UserError if
    not."""
    theirs = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    in_text = with_mask_in_text(tokenizer)
    for text in _TEXTS:
        ours = in_text if "<mask>" in text else tokenizer
        if theirs(text)["input_ids"] != ours.encode(text).ids:
            raise UserError(f"the exported tokenizer, read back, encodes {text!r} differently; nothing was exported")


def _check(what: str, difference: float) -> None:
    if not difference <= TOLERANCE:  # nan is wrong too
        raise UserError(
            f"the exported model, read back, differs from the run's: {what} by {difference:.1e} (at most {TOLERANCE:g} "
            "is right); nothing was exported. Try --format own"
        )


def _largest_difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    return float(torch.stack([(a - b).abs().max() for a, b in pairs if a.numel()]).max())


class _Padded:
    """Random sequences, once as a list and once padded to (S, width). Neither padding nor [MASK] is among the tokens:
    where those stand is what the two models take differently."""

    def __init__(self, model: MaeLm, lengths: list[int], width: int, side: str) -> None:
        generator = np.random.default_rng(0)
        ordinary = np.setdiff1d(np.arange(model.config.vocab_size), [PAD, model.mask_id])
        self.sequences = [generator.choice(ordinary, n) for n in lengths]
        self.mask = torch.zeros(len(lengths), width, dtype=torch.long)
        for row, n in zip(self.mask, lengths, strict=True):
            row[slice(0, n) if side == "right" else slice(width - n, width)] = 1

    def _ids(self, tokens: np.ndarray) -> Tensor:
        ids = torch.full(self.mask.shape, PAD)
        ids[self.mask.bool()] = torch.from_numpy(tokens)
        return ids

    def hidden_states(self, ours: MaeLm, theirs: Any) -> list[tuple[Tensor, Tensor]]:
        """Ours and theirs, (T, d) each, layer by layer."""
        tokens = np.concatenate(self.sequences)
        layout = layout_of([len(sequence) for sequence in self.sequences])
        layers: list[Tensor] = []
        ours.encoder(torch.from_numpy(tokens).int(), layout, layers=layers)
        output = theirs(self._ids(tokens), attention_mask=self.mask, output_hidden_states=True)
        return [(a, b[self.mask.bool()]) for a, b in zip(layers, output.hidden_states, strict=True)]

    def masked_logits(self, ours: MaeLm, theirs: Any) -> tuple[Tensor, Tensor]:
        """Ours and theirs, (M, vocabulary) each, with half of each sequence masked (and a single token altogether)."""
        generator = np.random.default_rng(1)
        masked = [sequence.copy() for sequence in self.sequences]
        for sequence in masked:
            sequence[generator.permutation(len(sequence))[: (len(sequence) + 1) // 2]] = ours.mask_id
        batch = pack_masked(masked, Vocabulary(ours.config.vocab_size, ours.mask_id, ()), ours.encoder_sees_mask)
        output = theirs(self._ids(np.concatenate(masked)), attention_mask=self.mask)
        return ours.logits(batch), output.logits[self.mask.bool()][batch.masked_index]


@contextlib.contextmanager
def remote_code_removed() -> Iterator[None]:
    """transformers imports remote code from a copy in its cache; this takes the comparison's copy out again."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if name.startswith("transformers_modules.") and name.endswith(".modeling_maelm") and file:
                shutil.rmtree(Path(file).parents[1], ignore_errors=True)
                del sys.modules[name]
