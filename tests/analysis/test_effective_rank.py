"""Ranks against exact singular values, the streamed sum against the whole, and what is counted under which input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from maelm_fast import presets
from maelm_fast.analysis.effective_rank import (
    LEADING_VALUES,
    REMOVES_MASK,
    REPORT_FILE,
    SEES_MASK,
    InputRanks,
    effective_ranks,
    measure,
)
from maelm_fast.analysis.inputs import encoder_inputs, from_encoder
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, ModelConfig
from maelm_fast.data.masking import pack
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.gram import GramMatrix, rank_at
from maelm_fast.training.live import evaluating
from maelm_fast.training.rundir import RunDir, load_run

VOCABULARY = Vocabulary(64, 63, (0, 1, 2, 3, 63))
LENGTHS = (20, 12, 7, 20)


def small_model(decoder: str) -> ModelConfig:
    return presets.change(
        presets.tiny(),
        model={
            "vocab_size": 64,
            "max_positions": 20,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "ffn_size": 32,
            "decoder": decoder,
            "decoder_relative_bias": False,
        },
    ).model


def batch_of(lengths: tuple[int, ...], first: int = 0, policy: str = "mask", sees_mask: bool = True) -> PackedBatch:
    generator = np.random.default_rng(first)
    rows = [generator.integers(4, 63, n) for n in lengths]
    samples = np.arange(first, first + len(rows))
    masking = MaskingConfig(policy=policy)  # type: ignore[arg-type]
    return pack(rows, samples, np.zeros(len(rows), np.int64), Masker(masking, VOCABULARY, 0, sees_mask))


def ranks_of(model: MaeLm, batches: list[PackedBatch], *taus: float) -> dict[str, InputRanks]:
    labels = SEES_MASK if model.encoder_sees_mask else REMOVES_MASK
    entries = effective_ranks(from_encoder(model.encoder), batches, model.mask_id, labels, taus or (0.9,))
    return {entry.name: entry for entry in entries}


def gram_of(hidden: Tensor) -> GramMatrix:
    gram = GramMatrix(hidden.shape[1])
    gram.add(hidden)
    return gram


def exact_rank(hidden: Tensor, tau: float) -> int:
    squared = torch.linalg.svdvals(hidden.double()) ** 2
    share = squared.cumsum(0) / squared.sum()
    return int((share < tau).sum()) + 1


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("tokens", [300, 24, 5])
def test_ranks_are_those_of_the_exact_singular_values(tau: float, tokens: int) -> None:
    scale = torch.logspace(0, -2, 24, dtype=torch.float64)
    hidden = torch.randn(tokens, 24, dtype=torch.float64) * scale
    gram = gram_of(hidden)
    assert rank_at(gram.squared_singular_values(), tau) == exact_rank(hidden, tau)
    expected = torch.zeros(24, dtype=torch.float64)
    expected[: min(tokens, 24)] = torch.linalg.svdvals(hidden) ** 2
    torch.testing.assert_close(gram.squared_singular_values(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_tau_1_gives_the_true_rank_of_a_low_rank_matrix(rank: int) -> None:
    hidden = torch.randn(200, rank, dtype=torch.float64) @ torch.randn(rank, 16, dtype=torch.float64)
    squared = gram_of(hidden).squared_singular_values()
    assert rank_at(squared, 1.0) == rank
    assert bool((squared[rank:] == 0).all())


@pytest.mark.parametrize(
    ("squared", "tau", "rank"),
    [
        ([1.0] * 10, 0.9, 9),  # exactly nine tenths: reached
        ([1.0] * 10, 0.9001, 10),
        ([1.0] * 10, 1.0, 10),
        ([1.0] * 10, 1e-12, 1),
        ([9.0, 1.0], 0.9, 1),
        ([8.0, 1.0, 1.0], 0.9, 2),
        ([5.0, 0.0, 0.0], 1.0, 1),
        ([0.0, 0.0], 0.9, 0),
    ],
)
def test_rank_at_the_edges_of_tau(squared: list[float], tau: float, rank: int) -> None:
    assert rank_at(torch.tensor(squared, dtype=torch.float64), tau) == rank


@pytest.mark.parametrize("tau", [0.0, -0.1, 1.1, float("nan")])
def test_a_tau_outside_its_range_is_refused(tau: float) -> None:
    with pytest.raises(UserError, match="tau must lie"):
        rank_at(torch.ones(3), tau)


def test_nearly_constant_features_have_rank_one_and_no_negative_values() -> None:
    hidden = torch.full((1000, 32), 3.0, dtype=torch.float64) + 1e-9 * torch.randn(1000, 32, dtype=torch.float64)
    gram = gram_of(hidden)
    assert float(torch.linalg.eigvalsh(gram.matrix).min()) < 1e-9  # nothing but rounding
    squared = gram.squared_singular_values()
    assert bool((squared >= 0).all())
    assert rank_at(squared, 0.999) == 1


def test_it_is_not_centred() -> None:
    hidden = torch.randn(500, 8, dtype=torch.float64) + 100.0
    assert rank_at(gram_of(hidden).squared_singular_values(), 0.9) == 1


def test_streamed_batches_equal_the_whole() -> None:
    """fp32 rows with singular values over five decades, in uneven parts, against the SVD of the stacked matrix."""
    hidden = (torch.randn(3001, 24) @ torch.randn(24, 24)) * torch.logspace(0, -5, 24)
    parts = GramMatrix(24)
    for part in hidden.split([1, 1400, 0, 1600]):
        parts.add(part)
    assert parts.tokens == 3001
    torch.testing.assert_close(parts.matrix, hidden.double().T @ hidden.double(), rtol=1e-12, atol=1e-12)
    values, directions = parts.principal_directions()
    _, singular, exact = torch.linalg.svd(hidden.double(), full_matrices=False)
    torch.testing.assert_close(values, singular**2, rtol=1e-4, atol=1e-9 * float(singular[0]) ** 2)
    torch.testing.assert_close((directions[:, :8] * exact[:8].T).sum(0).abs(), torch.ones(8, dtype=torch.float64))
    for tau in (0.5, 0.9, 0.99, 0.9999):
        assert rank_at(values, tau) == rank_at(parts.squared_singular_values(), tau) == exact_rank(hidden, tau)


def test_what_the_encoder_gets_under_each_input() -> None:
    seen, removed = batch_of(LENGTHS), batch_of(LENGTHS, sees_mask=False)
    with_mask, without_mask, visible = encoder_inputs(seen, VOCABULARY.mask_id)
    assert with_mask.ids.tolist() == seen.ids.tolist()
    assert with_mask.counted["with_mask"] is None
    rows, others = with_mask.counted["mask_positions"], with_mask.counted["real_positions"]
    assert rows is not None
    assert others is not None
    assert rows.nonzero().ravel().tolist() == seen.masked_index.tolist()
    assert others.tolist() == [not row for row in rows.tolist()]
    generator = np.random.default_rng(0)
    original = [token for n in LENGTHS for token in generator.integers(4, 63, n).tolist()]
    assert without_mask.ids.tolist() == original
    assert without_mask.layout is with_mask.layout
    assert visible.ids.tolist() == removed.ids.tolist()
    assert visible.layout.positions.tolist() == removed.visible.positions.tolist()
    assert visible.layout.lengths == removed.visible.lengths


def test_only_the_passes_that_the_named_inputs_need() -> None:
    batch = batch_of(LENGTHS)
    assert [list(p.counted) for p in encoder_inputs(batch, 63, ("without_mask",))] == [["without_mask"]]
    assert [list(p.counted) for p in encoder_inputs(batch, 63, ("real_positions", "visible"))] == [
        ["real_positions"],
        ["visible"],
    ]


def test_under_the_bert_policy_only_mask_tokens_count_as_mask() -> None:
    batch = batch_of((20,) * 8, policy="bert")
    with_mask, _, visible = encoder_inputs(batch, VOCABULARY.mask_id)
    rows = with_mask.counted["mask_positions"]
    assert rows is not None
    shown_as_mask = int(rows.sum())
    assert 0 < shown_as_mask < batch.counts.masked
    assert visible.ids.tolist() == batch_of((20,) * 8, policy="bert", sees_mask=False).ids.tolist()


@pytest.mark.parametrize("decoder", ["none", "self"])
def test_tokens_counted_and_ranks_equal_those_of_the_collected_states(decoder: str) -> None:
    model = MaeLm(small_model(decoder))
    batches = [batch_of(LENGTHS), batch_of((20, 20), first=4)]
    results = ranks_of(model, batches, 0.8, 0.95)
    original = sum(batch.counts.original for batch in batches)
    masked = sum(batch.counts.masked for batch in batches)
    tokens = {name: entry.tokens for name, entry in results.items()}
    expected = {
        "with_mask": original,
        "without_mask": original,
        "mask_positions": masked,
        "real_positions": original - masked,
    }
    assert tokens == (expected if decoder == "none" else {**expected, "visible": original - masked})

    states: list[list[Tensor]] = []
    with torch.no_grad():
        for batch in batches:
            model.eval().encoder(batch.ids, batch.visible, layers=(layers := []))
            states.append(layers)
    for layer in range(model.config.num_layers + 1):
        whole = torch.cat([layers[layer] for layers in states])
        is_mask = torch.cat([batch.ids == VOCABULARY.mask_id for batch in batches])
        for i, tau in enumerate((0.8, 0.95)):
            assert results["with_mask"].ranks[i][layer] == exact_rank(whole, tau)
            assert results["mask_positions"].ranks[i][layer] == exact_rank(whole[is_mask], tau)
            assert results["real_positions"].ranks[i][layer] == exact_rank(whole[~is_mask], tau)
        singular = torch.linalg.svdvals(whole.double())
        expected_values = (singular / singular.square().sum().sqrt())[:LEADING_VALUES]
        torch.testing.assert_close(
            torch.tensor(results["with_mask"].singular_values[layer]), expected_values.float(), rtol=1e-4, atol=1e-5
        )


def test_the_model_is_left_in_the_mode_it_was_in_and_dropout_is_off() -> None:
    model = MaeLm(small_model("none")).train()
    model.encoder.dropout_p = 0.5
    with evaluating(model):
        first, second = (ranks_of(model, [batch_of(LENGTHS)]) for _ in range(2))
    assert model.training
    assert first == second


def test_text_without_masks_needs_no_more_than_real_tokens() -> None:
    """As after fine-tuning: batches in which nothing is masked."""
    model = MaeLm(small_model("none")).eval()
    batch = batch_of((2, 2, 2))
    assert batch.counts.masked == 0
    encode = from_encoder(model.encoder)
    (entry,) = effective_ranks(encode, [batch], model.mask_id, {"without_mask": "all real"})
    states = torch.stack(encode(batch.ids, batch.visible)).double().detach()
    assert entry.ranks == [[exact_rank(layer, 0.9) for layer in states]]


def test_batches_without_mask_in_the_encoder_are_refused() -> None:
    with pytest.raises(UserError, match="encoder_sees_mask=True"):
        ranks_of(MaeLm(small_model("self")), [batch_of(LENGTHS, sees_mask=False)])


def test_no_batches_are_refused() -> None:
    with pytest.raises(UserError, match="no text to measure"):
        ranks_of(MaeLm(small_model("self")), [])


def test_short_sequences_without_a_masked_token_have_rank_0() -> None:
    entries = ranks_of(MaeLm(small_model("none")), [batch_of((2, 1))])
    assert entries["mask_positions"].tokens == 0
    assert entries["mask_positions"].ranks == [[0, 0, 0]]


def test_a_report_as_it_is_written(make_run: Callable[..., RunDir], store: Path, tmp_path: Path) -> None:
    run = make_run()
    report = measure(load_run(run.path), TokenStore(store, "validation"), (0.5, 0.9), samples=8)
    report.write(tmp_path / "out" / REPORT_FILE)
    written = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert written == {"reports": [dataclasses.asdict(report)]}
    assert not report.centred
    assert report.samples == 8
    assert report.title == "tiny, step 20"
    with pytest.raises(UserError, match="cannot write"):
        report.write(tmp_path / "out" / REPORT_FILE / "below-a-file.json")


@pytest.mark.parametrize(
    ("masking", "saw_mask", "inputs"),
    [
        (
            {},
            False,
            {"visible": "visible tokens, as in pretraining", "with_mask": "(never seen in pretraining)"},
        ),
        ({"shown": 0.5}, True, {"visible": "every [MASK] removed", "with_mask": "with [MASK], all shown"}),
        ({"policy": "bert"}, False, {"visible": "visible tokens, as in pretraining"}),
        ({"policy": "random"}, False, {"visible": "random tokens in the place of masked ones, as in pretraining"}),
    ],
)
def test_what_is_said_of_the_inputs_is_true_of_the_run(
    make_run: Callable[..., RunDir], store: Path, masking: dict[str, object], saw_mask: bool, inputs: dict[str, str]
) -> None:
    run = load_run(make_run().path)
    for name, value in masking.items():
        object.__setattr__(run.config.masking, name, value)
    report = measure(run, TokenStore(store, "validation"), samples=8)
    assert report.encoder_sees_mask == saw_mask
    labels = {entry.name: entry.label for entry in report.inputs}
    assert all(text in labels[name] for name, text in inputs.items())
    assert all(entry.tokens for entry in report.inputs)


def test_sequences_longer_than_the_model_takes_are_refused(make_run: Callable[..., RunDir], store: Path) -> None:
    run = make_run(max_positions=16)
    with pytest.raises(UserError, match="sequences of 32 tokens, the model takes at most 16"):
        measure(load_run(run.path), TokenStore(store, "validation"))
