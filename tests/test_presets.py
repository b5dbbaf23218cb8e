"""Every preset builds, trains a step, and the paper's rows are the paper's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maelm_fast import presets
from maelm_fast.config import ModelConfig, RunConfig, from_dict, to_dict
from maelm_fast.data.masking import Vocabulary, pack
from maelm_fast.errors import UserError
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm

# Table 3 of the paper: steps, lr, batch, warm-up, length, buckets, max distance, eps, betas, clip, dropout, decay
TABLE_3 = {
    "base": (125_000, 5e-4, 2048, 10_000, 512, 32, 128, 1e-6, (0.9, 0.98), 2.0, 0.1, 0.01),
    "base++": (2_000_000, 2e-4, 2048, 10_000, 512, 64, 128, 1e-6, (0.9, 0.98), 2.0, 0.1, 0.01),
    "large++": (1_000_000, 1e-4, 2048, 10_000, 512, 128, 256, 1e-6, (0.9, 0.98), 1.0, 0.1, 0.01),
}
SHAPES = {  # Section 4.1, Appendix C: layers, width, heads, decoder layers, vocabulary
    "base": (12, 768, 12, 4, 32_768),
    "base++": (12, 768, 12, 4, 64_000),
    "large++": (24, 1024, 16, 4, 64_000),
}


@pytest.mark.parametrize("name", TABLE_3)
@pytest.mark.parametrize("prefix", ["", "roberta_"])
def test_table_3(name: str, prefix: str) -> None:
    run = presets.get(prefix + name)
    o, m = run.optim, run.model
    assert (
        o.max_steps, o.lr, o.batch_size, o.warmup_steps, m.max_positions, m.relative_buckets, m.relative_max_distance,
        o.eps, o.betas, o.clip_norm, m.dropout, o.weight_decay,
    ) == TABLE_3[name]  # fmt: skip
    assert (m.num_layers, m.hidden_size, m.num_heads, m.decoder_layers, m.vocab_size) == SHAPES[name]
    assert run.masking.rate == 0.15
    assert run.masking.policy == "mask"


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_builds(name: str) -> None:
    """On the meta device, where the large ones cost nothing, with the parameter names a smaller one trains."""
    config = presets.get(name)
    with torch.device("meta"):
        model = MaeLm(config.model)
    assert sum(p.numel() for p in model.parameters()) > 0
    assert presets.describe(name)


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_computes_a_loss_when_shrunk(name: str) -> None:
    run = presets.change(
        presets.get(name),
        model={
            "vocab_size": 300,
            "hidden_size": 32,
            "ffn_size": 64,
            "num_heads": 2,
            "num_layers": 2,
            "decoder_layers": 2,
        },
    )
    model = MaeLm(run.model)
    rows = [np.arange(5, 45), np.arange(100, 117)]
    vocabulary = Vocabulary(300, 299, (0, 1, 2, 3, 299))
    batch = pack(rows, np.arange(2), np.zeros(2, int), run.masking, vocabulary, 0, model.encoder_sees_mask)
    loss, _ = model(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_sizes_of_base() -> None:
    """140.0M parameters in all, as counted for the released code (its dictionary is not padded)."""
    with torch.device("meta"):
        model = MaeLm(presets.get("base").model)
    count = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("encoder", "decoder", "head")}
    assert round(count["encoder"] / 1e6, 1) == 110.6
    assert round(count["decoder"] / 1e6, 1) == 28.7
    assert round(sum(count.values()) / 1e6, 1) == 140.0


@pytest.mark.parametrize(("name", "mflops"), [("base", 651.9), ("roberta_base", 555.3), ("base_cross", 545.0)])
def test_flops_per_token_of_full_sequences(name: str, mflops: float) -> None:
    """The counting of the roofline: 512 tokens, 15% masked (77 of 512 here), last-layer saving."""
    per_token = training_flops(presets.get(name).model, [435], [512], [77]) / 512 / 1e6
    assert per_token == pytest.approx(mflops, rel=2e-3)


def test_config_survives_a_round_trip() -> None:
    for name in presets.names():
        assert from_dict(RunConfig, to_dict(presets.get(name))) == presets.get(name)


def test_config_refuses_unknown_and_missing_keys() -> None:
    data = to_dict(presets.get("tiny"))
    with pytest.raises(UserError, match=r"unknown key 'optim\.lrr'"):
        from_dict(RunConfig, {**data, "optim": {**data["optim"], "lrr": 1}})
    with pytest.raises(UserError, match="'seed' is missing"):
        from_dict(RunConfig, {k: v for k, v in data.items() if k != "seed"})


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"base\+\+"):
        presets.get("bas")


def test_table_is_padded_to_a_multiple_of_64() -> None:
    assert ModelConfig(vocab_size=1000).table_size == 1024
    assert ModelConfig(vocab_size=64_000).table_size == 64_000
