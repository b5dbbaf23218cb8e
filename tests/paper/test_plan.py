"""Plans: every experiment at every scale has the runs and tokens it should, and no run twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from maelm_fast import presets
from maelm_fast.analysis.inputs import encoder_inputs
from maelm_fast.batch import PackedBatch
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.paper import catalogue, scales
from maelm_fast.paper.catalogue import EXPERIMENTS, Row
from maelm_fast.paper.cost import cost, measured_rate, rate_for
from maelm_fast.paper.plan import Plan, configured, make_plan, the_store_fits
from maelm_fast.paper.results import pretraining_input

RUNS = {"fig1": 1, "fig3": 2, "fig4": 5, "fig5": 2, "fig6": 1, "table1": 2, "table2": 14, "table6": 2, "table7": 2}


def plan(experiment: str, scale: str = "smoke", **options: Any) -> Plan:
    return make_plan(catalogue.get(experiment), scales.get(scale), **options)


@pytest.mark.parametrize("scale", scales.SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_row_is_a_run_of_its_own(name: str, scale: str) -> None:
    one, three = plan(name, scale), plan(name, scale, seeds=3)
    wanted = RUNS[name] + (scale == "full" and name == "table1")  # the row of the base++ setting
    assert (len(one.runs), len(three.runs)) == (wanted, 3 * wanted)
    assert len(one.left_out) == len(EXPERIMENTS[name].rows) - wanted
    for cell in one.cells:
        runtime, last = cell.config.runtime, cell.config.optim.max_steps
        saved = [*range(runtime.save_every, last, runtime.save_every), last]
        assert len(saved) <= runtime.keep_checkpoints
        assert set(cell.rank_steps) <= set(saved)
        assert cell.rank_steps[-1] == last
        assert runtime.eval_every == runtime.save_every
        assert len(cell.stages) == 1 + len(cell.rank_steps)


def test_rows_that_are_asked_for() -> None:
    whole, some = plan("fig4", seeds=2), plan("fig4", seeds=2, labels=["0.5", "0"])
    assert [row.label for row in some.rows] == ["0", "0.5"]
    assert [row.label for row in some.not_asked_for] == ["0.25", "0.75", "1"]
    assert {cell.key for cell in some.runs} < {cell.key for cell in whole.runs}
    assert len(some.runs) == 4
    assert (whole.not_asked_for, some.left_out) == ([], ())
    with pytest.raises(UserError, match=r"fig4 has no row 0\.3 MLM; its rows: 0 0\.25 0\.5 0\.75 1"):
        plan("fig4", labels=["0.5", "0.3", "MLM"])
    with pytest.raises(UserError, match="fig5 needs all of its rows: leave out --rows"):
        plan("fig5", labels=["MLM"])


@pytest.mark.parametrize("name", ["fig4", "table2"])
def test_rows_have_names_of_their_own(name: str) -> None:
    labels = [row.label for row in EXPERIMENTS[name].rows]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("scale", "tokens"),
    [("smoke", 60 * 16 * 64), ("cpu", 12_208 * 64 * 128), ("gpu", 20_000 * 256 * 128), ("full", 125_000 * 2048 * 512)],
)
def test_tokens_add_up(scale: str, tokens: int) -> None:
    pair = plan("fig5", scale, seeds=2)
    assert [cost(cell).tokens for cell in pair.runs] == [tokens] * 4
    updates = pair.runs[0].config.optim.max_steps
    assert cost(pair.runs[0], steps_done=updates // 4).tokens == tokens * 3 / 4
    assert cost(pair.runs[0], steps_done=updates)[1:] == (0, 0)


def test_flops_of_full_are_those_of_the_projection() -> None:
    """651.9 and 555.3 MFLOP a token of full sequences (test_presets)."""
    mlm, mae_lm = plan("fig5", "full").runs
    assert cost(mlm).flops / cost(mlm).tokens / 1e6 == pytest.approx(555.3, rel=0.005)
    assert cost(mae_lm).flops / cost(mae_lm).tokens / 1e6 == pytest.approx(651.9, rel=0.005)
    assert cost(mae_lm).disk == pytest.approx(25 * 12 * 140e6, rel=0.01)


def test_full_is_the_paper() -> None:
    for name in ("table1", "table6", "table2"):
        for cell in plan(name, "full").cells:
            assert cell.config.optim == presets.get(cell.row.setting).optim
    table_1 = plan("table1", "full")
    assert [cell.config.model for cell in table_1.cells] == [
        presets.get(name).model for name in ("roberta_base", "base", "base++")
    ]


def test_a_changed_configuration_is_another_cell() -> None:
    cell = plan("fig1").cells[0]
    others = [
        plan("fig1", seeds=2).cells[1],
        plan("fig1", steps=50).cells[0],
        plan("fig1", "cpu").cells[0],
        plan("fig6").cells[0],
    ]
    stores = [plan("fig1").with_data({cell.corpus: ("store", f, 1024)}).cells[0] for f in ("one", "another")]
    assert len({c.key for c in (cell, *others, *stores)}) == 7


def test_experiments_share_runs() -> None:
    keys = {
        name: {cell.key for cell in plan(name).runs} for name in ("fig1", "fig3", "fig4", "fig5", "table1", "table2")
    }
    assert keys["fig1"] < keys["fig5"] == keys["fig3"] == keys["table1"] < keys["table2"]
    assert len(keys["fig4"] & keys["table2"]) == 2  # delta 0 and 1


def test_steps_shorten_a_run_and_its_warm_up() -> None:
    cell = plan("fig3", steps=7).cells[0]
    assert (cell.config.optim.max_steps, cell.config.optim.warmup_steps, cell.rank_steps) == (7, 0, (3, 6, 7))


@pytest.mark.parametrize(("options", "message"), [({"seeds": 0}, "--seeds"), ({"steps": 1}, "--steps")])
def test_senseless_numbers_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan("fig1", **options)


def test_one_store_is_refused_where_two_are_needed_or_another() -> None:
    with pytest.raises(UserError, match="needs stores uncased-32768-512 and cased-64000-512"):
        the_store_fits(plan("table1", "full"), 512, False, "store")
    with pytest.raises(UserError, match="at most 64"):
        the_store_fits(plan("fig1"), 65, False, "store")
    with pytest.raises(UserError, match="takes uncased"):
        the_store_fits(plan("fig1"), 64, True, "store")
    the_store_fits(plan("fig1"), 32, False, "store")


def test_rows_of_one_label_go_by_different_titles() -> None:
    titles = [cell.title for cell in plan("table1", "full").cells]
    assert titles == ["RoBERTa (Ours), seed 0", "MAE-LM, seed 0", "MAE-LM, base++, seed 0"]


@pytest.mark.parametrize("row", EXPERIMENTS["table2"].rows, ids=lambda row: row.label)
def test_the_input_of_pretraining_is_what_training_feeds_the_encoder(row: Row) -> None:
    config = configured(scales.get("smoke").settings["base"].config, row.variants)
    name = pretraining_input(config)
    assert name is not None
    vocabulary, samples = Vocabulary(64, 63, (0, 63)), np.arange(3)
    rows = [np.random.default_rng(i).integers(1, 63, 20) for i in samples]

    def packed(sees_mask: bool) -> PackedBatch:
        return pack(rows, samples, samples * 0, Masker(config.masking, vocabulary, 0, sees_mask))

    trained = packed(sees_mask=config.model.decoder == "none")
    (measured,) = encoder_inputs(packed(sees_mask=True), vocabulary.mask_id, (name,))
    assert measured.ids.tolist() == trained.ids.tolist()
    assert measured.layout.positions.tolist() == trained.visible.positions.tolist()


def test_a_gpu_that_is_too_small_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(_: object) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("maelm_fast.paper.cost.measured_rate", too_large)
    with pytest.raises(UserError, match="too little memory for the micro-batches of scale smoke"):
        rate_for(plan("fig1"))


def test_the_rate_of_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maelm_fast.paper.cost._SECONDS", 0.0)
    assert 1e7 < measured_rate(plan("fig1").cells[0].config) < 1e15
