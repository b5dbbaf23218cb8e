"""The effective rank while a run trains: a few validation sequences, one forward pass, a few small eigenproblems.

N tokens show too low a rank. Measured in three layers of two encoders of d = 128, trained 300 updates, N = d, 4d, 8d,
16d, 32d gave 0.60-0.79, 0.86-0.95, 0.91-0.95, 0.96-1.00, 0.97-1.00 of the rank of 47,304 tokens (medians over disjoint
samples; at 16d all between 0.94 and 1.05). Hence 16. The same tokens are measured every time, so that what moves the
curve is the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from maelm_fast.batch import PackedBatch
from maelm_fast.data.loader import validation_batches
from maelm_fast.data.token_store import TokenStore
from maelm_fast.masking import Masker
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.gram import GramMatrix, rank_at

TOKENS_PER_DIMENSION = 16
TAU = 0.9


def live_batches(store: TokenStore, masker: Masker, micro_batch_size: int, hidden_size: int) -> list[PackedBatch]:
    """The fixed sequences of a validation split to measure: TOKENS_PER_DIMENSION tokens that are not masked per
    dimension."""
    split = store.manifest.splits[store.split]
    unmasked = split.tokens / split.samples * (1.0 - masker.masking.rate)
    return list(
        validation_batches(store, masker, micro_batch_size, math.ceil(TOKENS_PER_DIMENSION * hidden_size / unmasked))
    )


@torch.no_grad()
def live_ranks(
    model: MaeLm,
    batches: Iterable[PackedBatch],
    device: torch.device | str,
    autocast: Callable[[], contextlib.AbstractContextManager],
    tau: float = TAU,
) -> dict[str, float]:
    """tau-effective ranks of the real tokens' representations: rank_input (embedding output), rank_middle, rank_last.

    Where the encoder reads [MASK] there is also rank_last_mask, of the [MASK] positions alone, and rank_last_all, of
    both together. batches: as the model trains on them (live_batches). rank_tokens: how many real tokens there were.
    Parameters that are in parts over several processes must be whole (Processes.whole_model)."""
    last = model.config.num_layers
    places = [
        ("input", 0, "real"),
        ("middle", last // 2, "real"),
        ("last", last, "real"),
        ("last_mask", last, "mask"),
        ("last_all", last, "all"),
    ]
    grams = {name: GramMatrix(model.config.hidden_size, device) for name, _, _ in places}
    with evaluating(model):
        for batch in batches:
            here = batch.to(device, non_blocking=True)
            layers: list[torch.Tensor] = []
            with autocast():
                model.encoder(here.ids, here.visible, layers=layers)
            is_mask = here.ids == model.mask_id
            rows = {"real": ~is_mask, "mask": is_mask}
            for name, layer, kind in places:
                grams[name].add(layers[layer] if kind == "all" else layers[layer][rows[kind]])
    if not grams["last_mask"].tokens:
        del grams["last_mask"], grams["last_all"]
    ranks: dict[str, float] = {
        f"rank_{name}": rank_at(gram.squared_singular_values(), tau) for name, gram in grams.items()
    }
    return ranks | {"rank_tokens": grams["last"].tokens}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off; afterwards the model is in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
