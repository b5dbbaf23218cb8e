"""The live metric is the exact rank of the rows it names, whatever masks the batches hold."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maelm_fast.config import MetricsConfig
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker
from maelm_fast.training.gram import GramMatrix, rank_at
from maelm_fast.training.live import TOKENS_PER_DIMENSION, live_batches, live_ranks
from maelm_fast.training.rundir import LoadedRun, RunDir, load_run


def batches_of(run: LoadedRun, path: Path) -> list:
    masker = Masker(run.config.masking, run.vocabulary, run.config.seed, run.model.encoder_sees_mask)
    return live_batches(TokenStore(path, "validation"), masker, 8, run.config.model.hidden_size)


@pytest.mark.parametrize("preset", ["tiny", "roberta_tiny"])
def test_ranks_are_those_of_the_rows_they_name(make_run: Callable[..., RunDir], store: Path, preset: str) -> None:
    run = load_run(make_run(preset=preset).path)
    model, batches = run.model.train(), batches_of(run, store)
    ranks = live_ranks(model, batches, "cpu", contextlib.nullcontext)
    assert model.training
    assert json.loads(json.dumps(ranks)) == ranks
    sees_mask = preset == "roberta_tiny"
    names = {"rank_input", "rank_middle", "rank_last", "rank_tokens"}
    assert set(ranks) == (names | {"rank_last_mask", "rank_last_all"} if sees_mask else names)

    layers: list[list[torch.Tensor]] = [[], [], []]
    for batch in batches:
        found: list[torch.Tensor] = []
        model.eval().encoder(batch.ids, batch.visible, layers=found)
        for kept, hidden in zip(layers, found, strict=True):
            kept.append(hidden.detach())
    is_mask = torch.cat([batch.ids for batch in batches]) == model.mask_id
    whole = [torch.cat(parts) for parts in layers]

    def rank(hidden: torch.Tensor) -> int:
        gram = GramMatrix(hidden.shape[1])
        gram.add(hidden)
        return rank_at(gram.squared_singular_values(), 0.9)

    expected = {f"rank_{n}": rank(x[~is_mask]) for n, x in zip(("input", "middle", "last"), whole, strict=True)}
    if sees_mask:
        expected |= {"rank_last_mask": rank(whole[2][is_mask]), "rank_last_all": rank(whole[2])}
    assert ranks == {**expected, "rank_tokens": int((~is_mask).sum())}


def test_the_metric_follows_the_model(make_run: Callable[..., RunDir], store: Path) -> None:
    run = load_run(make_run().path)
    batches = batches_of(run, store)
    before = live_ranks(run.model, batches, "cpu", contextlib.nullcontext)
    assert live_ranks(run.model, batches, "cpu", contextlib.nullcontext) == before
    with torch.no_grad():
        run.model.encoder.token_table[:] = run.model.encoder.token_table[:1].clone()
        run.model.encoder.position_table.zero_()
    after = live_ranks(run.model, batches, "cpu", contextlib.nullcontext)
    assert after == {**before, "rank_input": 1, "rank_middle": 1, "rank_last": 1}


@pytest.mark.parametrize(("kind", "least", "most"), [("store", 1.0, 1.07), ("document_store", 0.9, 1.1)])
def test_the_sample_has_enough_tokens_and_not_many_more(
    make_run: Callable[..., RunDir], request: pytest.FixtureRequest, kind: str, least: float, most: float
) -> None:
    """To a sequence where all have one length; where they do not, on average."""
    path = request.getfixturevalue(kind)
    run = load_run(make_run(hidden_size=32).path)
    batches = batches_of(run, path)
    unmasked = sum(batch.counts.original - batch.counts.masked for batch in batches)
    wanted = TOKENS_PER_DIMENSION * 32
    assert least * wanted <= unmasked <= most * wanted
    assert [b.ids.tolist() for b in batches] == [b.ids.tolist() for b in batches_of(run, path)]


def test_the_interval_is_checked() -> None:
    assert MetricsConfig(rank_every=0).rank_every == 0
    with pytest.raises(UserError, match=r"metrics\.rank_every must not be negative"):
        MetricsConfig(rank_every=-1)
