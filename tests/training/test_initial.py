"""Where a run's weights come from: the seed, or another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maelm_fast.errors import UserError
from maelm_fast.training import trainer
from maelm_fast.training.initial import adapt, from_run, load_initial
from maelm_fast.training.job import pretrain
from maelm_fast.training.rundir import load_run
from tests.training.runs import VOCABULARY, config, final_weights, rows


def test_loaded_run_has_its_step_and_vocabulary(whole: Path) -> None:
    run = load_run(whole)
    assert run.step == 8
    assert run.config.model.vocab_size == run.tokenizer.get_vocab_size()
    assert load_run(whole, step=4).step == 4
    with pytest.raises(UserError, match="there are: 4, 6, 8"):
        load_run(whole, step=5)


def test_init_from_a_run(store: Path, whole: Path, tmp_path: Path) -> None:
    initial = from_run(whole)
    out = tmp_path / "run"
    asked = config(optim={"max_steps": 1, "warmup_steps": 0, "lr": 1e-12}, runtime={"eval_samples": 20})
    pretrain(asked, store, out, initial)
    start_loss = next(r for r in rows(out) if r["kind"] == "validation")["val_loss"]
    end_loss = [r for r in rows(whole) if r["kind"] == "validation"][-1]["val_loss"]
    assert start_loss == pytest.approx(end_loss, rel=1e-5)
    other = tmp_path / "roberta"  # the encoder carries over to another objective, the decoder does not
    pretrain(
        replace(asked, model=replace(asked.model, decoder="none", decoder_relative_bias=False)),
        str(store),
        str(other),
        initial,
    )
    assert torch.allclose(final_weights(other)["encoder.token_table"], final_weights(whole)["encoder.token_table"])


def test_the_encoder_stays_what_it_was_in_the_run_it_comes_from(whole: Path) -> None:
    """Its sizes, its bias and its norms' epsilon; the decoder and dropout are as asked."""
    model = load_run(whole).config.model
    bias = {"relative_bias": "released", "relative_buckets": 16, "relative_max_distance": 64}
    asked = replace(
        model, num_layers=5, num_heads=2, ffn_size=8, max_positions=99, layer_norm_eps=1e-3, dropout=0.3, **bias
    )
    assert adapt(asked, from_run(whole)) == replace(model, dropout=0.3)


def test_initial_weights_must_hold_the_whole_encoder(whole: Path) -> None:
    initial = from_run(whole)
    partly = {name: tensor for name, tensor in initial.state.items() if name != "encoder.token_table"}
    with pytest.raises(UserError, match=r"no fitting weights for encoder\.token_table \(1 encoder tensors"):
        load_initial(load_run(whole).model, replace(initial, state=partly))


def test_the_mask_token_is_the_vocabulary_s() -> None:
    """BERT's is not the last."""
    assert trainer.build_model(config(), replace(VOCABULARY, mask_id=4)).mask_id == 4


def test_a_model_is_initialised_by_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        return trainer.build_model(replace(config(), seed=seed), VOCABULARY).encoder.token_table.detach()

    first, state = weights(3), torch.get_rng_state()
    torch.rand(7)
    assert torch.equal(weights(3), first)
    assert not torch.equal(weights(4), first)
    torch.set_rng_state(state)
    weights(3)
    assert torch.equal(torch.get_rng_state(), state)
