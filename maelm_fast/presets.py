"""Named configurations: one function a row of the paper, each derived from another in the lines that differ.

`presets.get("base++")` is a RunConfig; `presets.names()` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from maelm_fast.config import MaskingConfig, ModelConfig, OptimConfig, RunConfig, RuntimeConfig
from maelm_fast.errors import UserError

_PRESETS: dict[str, Callable[[], RunConfig]] = {}


def preset(name: str) -> Callable[[Callable[[], RunConfig]], Callable[[], RunConfig]]:
    def register(function: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
        _PRESETS[name] = function
        return function

    return register


def names() -> list[str]:
    return list(_PRESETS)


def get(name: str) -> RunConfig:
    """The preset of exactly that name, or UserError listing the names there are."""
    if name not in _PRESETS:
        raise UserError(f"unknown preset '{name}'; there are: {', '.join(_PRESETS)}")
    return _PRESETS[name]()


def describe(name: str) -> str:
    """The first line of the preset's docstring."""
    return (_PRESETS[name].__doc__ or "").strip().splitlines()[0]


def change(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """A copy with the named fields of the named sections replaced."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})


def as_roberta(config: RunConfig) -> RunConfig:
    """The baseline of a preset: [MASK] in the encoder, no decoder, everything else the same (Table 1, "Ours")."""
    return change(config, model={"decoder": "none", "decoder_relative_bias": False})


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
    )


@preset("tiny_cross")
def tiny_cross() -> RunConfig:
    """tiny with the cross-attention decoder."""
    return change(tiny(), model={"decoder": "cross"})


@preset("roberta_tiny")
def roberta_tiny() -> RunConfig:
    """Standard MLM under the settings of tiny."""
    return as_roberta(tiny())
