"""Every preset builds, trains a step, and the paper's rows are the paper's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from maelm_fast import presets
from maelm_fast.config import ModelConfig, RunConfig, from_dict, to_dict
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.paper.printed import TABLE_2 as PRINTED

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
        o.max_steps,
        o.lr,
        o.batch_size,
        o.warmup_steps,
        m.max_positions,
        m.relative_buckets,
        m.relative_max_distance,
        o.eps,
        o.betas,
        o.clip_norm,
        m.dropout,
        o.weight_decay,
    ) == TABLE_3[name]
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
    run = presets.get(name)
    smaller = {
        "vocab_size": 300,
        "hidden_size": 32,
        "ffn_size": 64,
        "num_heads": 2,
        "num_layers": 2,
        "decoder_layers": 2,
    }
    if run.model.decoder_hidden_size:
        smaller["decoder_hidden_size"] = run.model.decoder_hidden_size // 32
    run = presets.change(run, model=smaller)
    model = MaeLm(run.model)
    rows = [np.arange(5, 45), np.arange(100, 117)]
    vocabulary = Vocabulary(300, 299, (0, 1, 2, 3, 299))
    batch = pack(
        rows, np.arange(2), np.zeros(2, int), Masker(run.masking.final, vocabulary, 0, model.encoder_sees_mask)
    )
    loss, _ = model(batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


# Table 2 of the paper by row: what differs from base, and the GLUE average
TABLE_2: dict[str, tuple[dict[str, Any], float]] = {
    "mlm": ({"decoder": "none"}, 85.2),
    "enc_mask_dec": ({"shown": 1.0}, 85.1),
    "dec_resets_mask": ({"shown": 1.0, "decoder_resets_mask": True}, 85.9),
    "random_replace": ({"policy": "random"}, 85.1),
    "misaligned": ({"positions": "misaligned"}, 86.0),
    "no_relative": ({"relative_bias": "none"}, 86.1),
    "self_cross": ({"decoder": "self_cross"}, 85.4),
    "causal_cross": ({"decoder": "causal_cross"}, 85.5),
    "cross": ({"decoder": "cross"}, 86.0),
    "decoder_2_layers": ({"decoder_layers": 2}, 85.8),
    "decoder_6_layers": ({"decoder_layers": 6}, 84.8),
    "decoder_512": ({"decoder_hidden_size": 512}, 85.8),
    "decoder_1024": ({"decoder_hidden_size": 1024}, 85.5),
}
OTHERS: dict[str, dict[str, Any]] = {
    **{f"fig4/delta_{share:g}": {"shown": share} for share in (0.25, 0.5, 0.75, 1.0)},
    "appendix_e/bert_masking": {"decoder": "none", "policy": "bert"},
    "appendix_c/mask40": {"rate": 0.4},
    "appendix_c/roberta_mask40": {"decoder": "none", "rate": 0.4},
}


def differences(run: RunConfig, other: RunConfig) -> dict[str, Any]:
    mine, theirs = to_dict(run), to_dict(other)
    return {
        field: value
        for section in ("model", "masking", "optim", "runtime")
        for field, value in mine[section].items()
        if value != theirs[section][field]
    }


def test_ablations_differ_from_base_in_their_row_only() -> None:
    rows = {f"table2/{name}": changes for name, (changes, _) in TABLE_2.items()} | OTHERS
    base = presets.get("base")
    for name, changes in rows.items():
        assert differences(presets.get(name), base) == changes
    assert {name for name in presets.names() if "/" in name} == set(rows)
    known = {name.split("/")[1] for name in rows} - {"roberta_mask40"}
    assert set(presets.variants()) == known
    printed = [float(glue) for _, rows in PRINTED.groups for _, glue in rows]
    assert [86.1, *(glue for _, glue in TABLE_2.values())] == printed
    assert presets.get("table2/mlm") == presets.get("roberta_base")
    assert presets.get("table2/cross") == presets.get("base_cross")


def test_decoders_of_table_2() -> None:
    """Heads of 64, four times the width in the feed-forward, as in the encoder."""
    sizes = {}
    for name in ("decoder_512", "decoder_1024", "misaligned"):
        own = presets.get(f"table2/{name}").model.decoder_config
        sizes[name] = (own.hidden_size, own.num_heads, own.head_dim, own.ffn_size)
    assert sizes["decoder_512"] == (512, 8, 64, 2048)
    assert sizes["decoder_1024"] == (1024, 16, 64, 4096)
    assert sizes["misaligned"] == (768, 12, 64, 3072)


def test_sizes_of_variants_keep_their_ratio_at_other_scales() -> None:
    small, tiny, large = presets.get("small"), presets.get("tiny"), presets.get("large++")
    widths = {
        name: [presets.variant(scale, name).model.decoder_hidden_size for scale in (small, tiny, large)]
        for name in ("decoder_512", "decoder_1024")
    }
    assert widths == {"decoder_512": [5 * 64, 3 * 32, 11 * 64], "decoder_1024": [11 * 64, 5 * 32, 21 * 64]}
    layers = [presets.variant(small, f"decoder_{n}_layers").model.decoder_layers for n in (2, 6)]
    assert layers == [1, 3]
    assert presets.variant(tiny, "decoder_6_layers").model.decoder_layers == 2
    with pytest.raises(UserError, match=r"0\.5 times model\.decoder_layers, which rounds to 1 again"):
        presets.variant(tiny, "decoder_2_layers")


@pytest.mark.parametrize("name", presets.variants())
def test_every_variant_can_be_had_at_our_scales(name: str) -> None:
    for scale in ("small", "small_cross"):
        run, base = presets.variant(presets.get(scale), name), presets.get(scale)
        assert run != base or (scale, name) == ("small_cross", "cross")
        assert run.optim == base.optim
        assert from_dict(RunConfig, to_dict(run)) == run
    assert presets.variant(presets.get("small"), "no_relative").model.decoder_relative_bias is False


def test_variants_of_a_configuration_without_decoder() -> None:
    roberta = presets.get("roberta_small")
    for name in presets.variants():
        if name in ("mlm", "bert_masking", "mask40"):
            assert presets.variant(roberta, name).model == roberta.model
        else:
            with pytest.raises(UserError, match=f"variant {name} changes a MAE-LM"):
                presets.variant(roberta, name)
    assert presets.variant(roberta, "mask40").masking.rate == 0.4
    with pytest.raises(UserError, match=r"unknown variant 'delta', did you mean 'delta_1'\? there are: mlm, .*mask40"):
        presets.variant(presets.get("small"), "delta")


def test_the_baseline_of_any_variant_is_the_plain_one() -> None:
    small = presets.get("small")
    for name in presets.variants():
        baseline = presets.as_roberta(presets.variant(small, name))
        bias = {"relative_bias": small.model.relative_bias, "decoder_layers": small.model.decoder_layers}
        assert presets.change(baseline, model=bias).model == presets.as_roberta(small).model
        assert baseline.masking.shown == 0.0


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
    """The counting of the projection: 512 tokens, 15% masked (77 of 512 here), last-layer saving."""
    per_token = training_flops(presets.get(name).model, [435], [512], [77]) / 512 / 1e6
    assert per_token == pytest.approx(mflops, rel=2e-3)


def test_config_survives_a_round_trip() -> None:
    for name in presets.names():
        assert from_dict(RunConfig, to_dict(presets.get(name))) == presets.get(name)


def test_config_refuses_unknown_keys_and_fills_in_missing_ones() -> None:
    data = to_dict(presets.get("tiny"))
    with pytest.raises(UserError, match=r"unknown key 'optim\.lrr'"):
        from_dict(RunConfig, {**data, "optim": {**data["optim"], "lrr": 1}})
    with pytest.raises(UserError, match=r"model\.decoder is one of none, .*, not both"):
        from_dict(RunConfig, {**data, "model": {**data["model"], "decoder": "both"}})
    older = {key: value for key, value in data.items() if key not in ("seed", "metrics")}
    older["runtime"] = {key: value for key, value in data["runtime"].items() if key != "backend"}
    assert from_dict(RunConfig, older) == presets.change(presets.get("tiny"), metrics={"rank_every": 1000})


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"base\+\+"):
        presets.get("bas")


def test_table_is_padded_to_a_multiple_of_64() -> None:
    assert ModelConfig(vocab_size=1000).table_size == 1024
    assert ModelConfig(vocab_size=64_000).table_size == 64_000


def test_fast_presets_are_their_scales_with_muon_and_falling_masks() -> None:
    """And the paper's own are as they were."""
    for name in ("tiny", "small", "base"):
        fast, plain = presets.get(f"{name}_fast"), presets.get(name)
        changed = differences(fast, plain)
        assert changed.keys() <= {"name", "lr", "muon_lr", "rate", "rate_end"} | (
            {"max_steps", "warmup_steps", "muon_momentum", "lr_end", "average"} if name == "tiny" else set()
        )
        rates = 0.5 if name == "tiny" else 0.4, 0.15
        assert (changed["name"], changed["rate"], fast.masking.final.rate) == ("muon", *rates)
        assert presets.get(f"roberta_{name}_fast") == presets.as_roberta(fast)
    paper = [presets.get(name) for name in presets.names() if "fast" not in name]
    assert {(run.optim.name, run.optim.schedule, run.masking.rate_end) for run in paper} == {("adamw", "linear", None)}
