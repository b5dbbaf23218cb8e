"""Named configurations: one function a row of the paper, each derived from another in the lines that differ.

`presets.get("base++")` is a RunConfig; `presets.names()` lists them all. A row of an ablation is a variant, a change
that fits any scale: `presets.get("table2/misaligned")` is `presets.variant(presets.get("base"), "misaligned")`, and
`presets.variant(presets.get("small"), "misaligned")` is the same for one GPU. `presets.variants()` lists those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from maelm_fast.config import MaskingConfig, ModelConfig, OptimConfig, RunConfig, RuntimeConfig
from maelm_fast.errors import UserError, unknown

_PRESETS: dict[str, Callable[[], RunConfig]] = {}
_DESCRIPTIONS: dict[str, str] = {}


def preset(name: str) -> Callable[[Callable[[], RunConfig]], Callable[[], RunConfig]]:
    """Registers a function without arguments; the first line of its docstring describes the preset."""

    def register(function: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
        _PRESETS[name] = function
        _DESCRIPTIONS[name] = (function.__doc__ or "").strip().splitlines()[0]
        return function

    return register


def names() -> list[str]:
    return list(_PRESETS)


def get(name: str) -> RunConfig:
    """The preset of exactly that name, or UserError listing the names there are."""
    if name not in _PRESETS:
        raise unknown("preset", name, _PRESETS)
    return replace(_PRESETS[name](), preset=name)


def describe(name: str) -> str:
    """One line on what the preset is."""
    return _DESCRIPTIONS[name]


def change(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """A copy with the named fields of the named sections replaced."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


def as_roberta(config: RunConfig) -> RunConfig:
    """The baseline of a preset: [MASK] in the encoder, no decoder, everything else the same (Table 1, "Ours")."""
    decoder = ("decoder_hidden_size", "decoder_num_heads", "decoder_relative_bias", "decoder_resets_mask", "positions")
    plain = {name: getattr(ModelConfig(), name) for name in decoder}
    return change(config, model={"decoder": "none", **plain}, masking={"shown": 0.0})


class Variant(NamedTuple):
    """A row of an ablation, as the change that makes it of a configuration."""

    where: str
    title: str
    """As the paper has it."""
    apply: Callable[[RunConfig], RunConfig]
    needs_decoder: bool = True


def variants() -> list[str]:
    return list(VARIANTS)


def variant(config: RunConfig, name: str) -> RunConfig:
    """A row of the paper's ablations at the scale of `config`, a MAE-LM.

    Sizes keep their ratio to the encoder's or the decoder's: decoder_512 is two thirds and decoder_1024 four thirds of
    the encoder's heads, of the same width each; decoder_2_layers is half and decoder_6_layers one and a half times the
    decoder's layers; halves round up. Raises UserError for an unknown name and where the row cannot be had: of a
    configuration without decoder, or if rounding leaves nothing changed (half of one layer)."""
    if name not in VARIANTS:
        raise unknown("variant", name, VARIANTS)
    row = VARIANTS[name]
    if row.needs_decoder and config.model.decoder == "none":
        raise UserError(f"variant {name} changes a MAE-LM, and model.decoder is none: start from one with a decoder")
    return row.apply(config)


def _changed(**sections: dict[str, Any]) -> Callable[[RunConfig], RunConfig]:
    return lambda config: change(config, **sections)


def _shown(share: float) -> Callable[[RunConfig], RunConfig]:
    return _changed(masking={"shown": share})


def _layers(ratio: float) -> Callable[[RunConfig], RunConfig]:
    def apply(config: RunConfig) -> RunConfig:
        return change(config, model={"decoder_layers": _ratio_of(config.model.decoder_layers, ratio, "decoder_layers")})

    return apply


def _width(ratio: float) -> Callable[[RunConfig], RunConfig]:
    def apply(config: RunConfig) -> RunConfig:
        heads = _ratio_of(config.model.num_heads, ratio, "num_heads")
        return change(config, model={"decoder_hidden_size": heads * config.model.head_dim})

    return apply


def _ratio_of(count: int, ratio: float, field: str) -> int:
    scaled = int(count * ratio + 0.5)
    if scaled == count:
        raise UserError(
            f"the variant has {ratio:.2g} times model.{field}, which rounds to {count} again: start from a larger model"
        )
    return scaled


VARIANTS = {
    "mlm": Variant("table2", "enc. w. [MASK] (i.e., MLM)", as_roberta, needs_decoder=False),
    "enc_mask_dec": Variant("table2", "enc. w. [MASK] + dec.", _shown(1.0)),
    "dec_resets_mask": Variant(
        "table2",
        "enc. w. [MASK], dec. resets [MASK]",
        _changed(masking={"shown": 1.0}, model={"decoder_resets_mask": True}),
    ),
    "random_replace": Variant("table2", "random replace w. real token", _changed(masking={"policy": "random"})),
    "misaligned": Variant("table2", "misaligned position encoding", _changed(model={"positions": "misaligned"})),
    "no_relative": Variant(
        "table2",
        "no relative position encoding",
        _changed(model={"relative_bias": "none", "decoder_relative_bias": False}),
    ),
    "self_cross": Variant("table2", "bi. self-attention + cross-attention", _changed(model={"decoder": "self_cross"})),
    "causal_cross": Variant(
        "table2", "uni. self-attention + cross-attention", _changed(model={"decoder": "causal_cross"})
    ),
    "cross": Variant("table2", "cross-attention", _changed(model={"decoder": "cross"})),
    "decoder_2_layers": Variant("table2", "decoder: 2 layer, 768 dimension", _layers(2 / 4)),
    "decoder_6_layers": Variant("table2", "decoder: 6 layer, 768 dimension", _layers(6 / 4)),
    "decoder_512": Variant("table2", "decoder: 4 layer, 512 dimension", _width(512 / 768)),
    "decoder_1024": Variant("table2", "decoder: 4 layer, 1024 dimension", _width(1024 / 768)),
    "delta_0.25": Variant("fig4", "a quarter of the [MASK] in the encoder", _shown(0.25)),
    "delta_0.5": Variant("fig4", "half of the [MASK] in the encoder", _shown(0.5)),
    "delta_0.75": Variant("fig4", "three quarters of the [MASK] in the encoder", _shown(0.75)),
    "delta_1": Variant("fig4", "all [MASK] in the encoder", _shown(1.0)),
    "bert_masking": Variant(
        "appendix_e",
        "RoBERTa with BERT's 80/10/10 masks (Fig. 6)",
        lambda config: change(as_roberta(config), masking={"policy": "bert"}),
        needs_decoder=False,
    ),
    "mask40": Variant("appendix_c", "40% masked", _changed(masking={"rate": 0.4}), needs_decoder=False),
}


@preset("base")
def base() -> RunConfig:
    """Table 3, base: 12 layers of 768, uncased 32,768 tokens, 125K updates of 2,048 sequences of 512."""
    return RunConfig(model=ModelConfig(), masking=MaskingConfig(), optim=OptimConfig(), runtime=RuntimeConfig())


@preset("base++")
def base_plus_plus() -> RunConfig:
    """Table 3, base++: cased 64,000 tokens, 64 buckets, 2M updates at 2e-4."""
    return change(
        base(),
        model={"vocab_size": 64_000, "relative_buckets": 64},
        optim={"lr": 2e-4, "max_steps": 2_000_000},
    )


@preset("large++")
def large_plus_plus() -> RunConfig:
    """Table 3, large++: 24 layers of 1,024, 128 buckets up to distance 256, 1M updates at 1e-4, clipped at 1."""
    return change(
        base_plus_plus(),
        model={
            "hidden_size": 1024,
            "num_layers": 24,
            "num_heads": 16,
            "ffn_size": 4096,
            "relative_buckets": 128,
            "relative_max_distance": 256,
        },
        optim={"lr": 1e-4, "max_steps": 1_000_000, "clip_norm": 1.0},
    )


@preset("base_cross")
def base_cross() -> RunConfig:
    """Table 2, cross-attention: base with a decoder of masked tokens attending to the encoder's outputs only."""
    return change(base(), model={"decoder": "cross"})


def _of_base(name: str) -> RunConfig:
    return variant(base(), name)


@preset("roberta_base")
def roberta_base() -> RunConfig:
    """Table 1, RoBERTa (Ours): standard MLM under the settings of base."""
    return as_roberta(base())


@preset("roberta_base++")
def roberta_base_plus_plus() -> RunConfig:
    """Standard MLM under the settings of base++."""
    return as_roberta(base_plus_plus())


@preset("roberta_large++")
def roberta_large_plus_plus() -> RunConfig:
    """Standard MLM under the settings of large++."""
    return as_roberta(large_plus_plus())


@preset("small")
def small() -> RunConfig:
    """Ours: 6 layers of 512, sequences of 128, 20,000 updates of 256; for one GPU."""
    return change(
        base(),
        model={
            "max_positions": 128,
            "hidden_size": 512,
            "num_layers": 6,
            "num_heads": 8,
            "ffn_size": 2048,
            "decoder_layers": 2,
            "decoder_relative_bias": True,
            "position_init": "sinusoidal",
            "relative_init": "local",
            "dropout": 0.0,
        },
        optim={"batch_size": 256, "max_steps": 20_000, "warmup_steps": 1_000},
        runtime={"micro_batch_size": 256, "workers": 2, "log_every": 50},
    )


@preset("small_cross")
def small_cross() -> RunConfig:
    """small with the cross-attention decoder."""
    return change(small(), model={"decoder": "cross"})


@preset("roberta_small")
def roberta_small() -> RunConfig:
    """Standard MLM under the settings of small."""
    return as_roberta(small())


@preset("tiny")
def tiny() -> RunConfig:
    """Ours: 3 layers of 128 and 1 decoder layer, sequences of 64, for two CPU cores and two minutes."""
    return change(
        small(),
        model={
            "vocab_size": 1024,
            "hidden_size": 128,
            "num_layers": 3,
            "num_heads": 4,
            "ffn_size": 512,
            "decoder_layers": 1,
            "init_std": 0.05,  # 0.02 at a width of 768 makes products of this size
        },
        optim={"lr": 1e-3, "batch_size": 32, "max_steps": 1_600, "warmup_steps": 100},
        runtime={
            "micro_batch_size": 32,
            "workers": 0,
            "log_every": 10,
            "eval_every": 250,
            "save_every": 500,
            "eval_samples": 1024,
        },
        metrics={"rank_every": 100},
    )


@preset("tiny_cross")
def tiny_cross() -> RunConfig:
    """tiny with the cross-attention decoder."""
    return change(tiny(), model={"decoder": "cross"})


@preset("roberta_tiny")
def roberta_tiny() -> RunConfig:
    """Standard MLM under the settings of tiny."""
    return as_roberta(tiny())


def as_fast(config: RunConfig, lr: float, muon_lr: float) -> RunConfig:
    """A preset with our recipe for less time to the same loss: Muon, and masks that fall from 40% to 15%."""
    return change(
        config,
        masking={"rate": 0.4, "rate_end": 0.15},
        optim={"name": "muon", "lr": lr, "muon_lr": muon_lr},
    )


@preset("tiny_fast")
def tiny_fast() -> RunConfig:
    """Ours: tiny with Muon, falling masks, averaged weights; 1,200 updates, which take as long as tiny's 1,600."""
    shorter = change(tiny(), optim={"max_steps": 1_200, "warmup_steps": 120})
    return change(
        as_fast(shorter, lr=6e-3, muon_lr=5e-3),
        masking={"rate": 0.5},
        optim={"muon_momentum": 0.9, "lr_end": 0.2, "average": 0.993},
    )


@preset("roberta_tiny_fast")
def roberta_tiny_fast() -> RunConfig:
    """Standard MLM under the settings of tiny_fast."""
    return as_roberta(tiny_fast())


@preset("small_fast")
def small_fast() -> RunConfig:
    """small with Muon and falling masks; not tried at this size."""
    return as_fast(small(), lr=2e-3, muon_lr=2e-3)


@preset("roberta_small_fast")
def roberta_small_fast() -> RunConfig:
    """Standard MLM under the settings of small_fast."""
    return as_roberta(small_fast())


@preset("base_fast")
def base_fast() -> RunConfig:
    """base with Muon and falling masks; not tried at this size."""
    return as_fast(base(), lr=5e-4, muon_lr=1e-3)


@preset("roberta_base_fast")
def roberta_base_fast() -> RunConfig:
    """Standard MLM under the settings of base_fast."""
    return as_roberta(base_fast())


_WHERE = {"table2": "Table 2", "fig4": "Fig. 4", "appendix_e": "Appendix E", "appendix_c": "Appendix C"}
for _name, _row in VARIANTS.items():
    _PRESETS[f"{_row.where}/{_name}"] = functools.partial(_of_base, _name)
    _DESCRIPTIONS[f"{_row.where}/{_name}"] = f"{_WHERE[_row.where]}: {_row.title}"


@preset("appendix_c/roberta_mask40")
def roberta_mask40() -> RunConfig:
    """Appendix C: standard MLM, 40% masked"""
    return variant(roberta_base(), "mask40")
