"""Everything a run can be told, as frozen dataclasses, and nothing else: no torch, no parsing.

ModelConfig, MaskingConfig, OptimConfig change the result (science); RuntimeConfig should change only speed and what is
written when. Values are checked on construction: a wrong one raises UserError naming the field and the remedy.
Defaults are the paper's `base` row; where the paper is silent the comment says whose choice it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from maelm_fast.errors import UserError

TABLE_MULTIPLE = 64  # token-table rows are padded to this, for the matrix units


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network. `decoder="none"` is standard MLM (RoBERTa): the encoder sees [MASK] and the head sits on it."""

    vocab_size: int = 32768
    """Tokens, special ones included. `pretrain` takes it from the token store."""
    max_positions: int = 512
    """Rows of each absolute position table: the longest sequence."""
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_size: int = 3072
    decoder: Literal["none", "self", "cross"] = "self"
    """self: bidirectional self-attention over all slots (the paper's MAE-LM). cross: masked tokens attend to the
    encoder's outputs only (Table 2, "cross-attention")."""
    decoder_layers: int = 4
    relative_bias: Literal["none", "t5", "released"] = "t5"
    """Bucket rule of the encoder's relative position bias. released: the ceil rule of the authors' code."""
    relative_buckets: int = 32
    relative_max_distance: int = 128
    decoder_relative_bias: bool = False
    """A bias of its own for the decoder (ours; a flag in the released code, off): helps tiny models leave the
    unigram plateau."""
    position_init: Literal["normal", "sinusoidal"] = "normal"
    relative_init: Literal["normal", "local"] = "normal"
    """local: relative biases start by favouring near keys (ours), so that a tiny model leaves the unigram plateau after
    a hundred updates, not thousands."""
    dropout: float = 0.1
    """Encoder only: embeddings, attention weights, attention output, feed-forward output. The decoder has none."""
    layer_norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_positions", "hidden_size", "num_layers", "num_heads", "ffn_size"):
            require(getattr(self, name) > 0, f"model.{name} must be positive, not {getattr(self, name)}")
        require(
            self.hidden_size % self.num_heads == 0,
            f"model.hidden_size {self.hidden_size} is not a multiple of model.num_heads {self.num_heads}",
        )
        require(0.0 <= self.dropout < 1.0, f"model.dropout must lie in [0, 1), not {self.dropout}")
        require(
            self.decoder == "none" or self.decoder_layers > 0,
            f"model.decoder_layers must be positive, not {self.decoder_layers}; for no decoder set model.decoder=none",
        )
        require(
            self.decoder != "none" or not self.decoder_relative_bias,
            "model.decoder_relative_bias is set but model.decoder is none: remove one of the two",
        )
        if self.relative_bias != "none" or self.decoder_relative_bias:
            require(
                self.relative_buckets >= 8 and self.relative_buckets % 4 == 0,
                f"model.relative_buckets must be a multiple of 4, at least 8, not {self.relative_buckets}",
            )
            require(
                self.relative_max_distance > self.relative_buckets // 4,
                f"model.relative_max_distance {self.relative_max_distance} must exceed a quarter of "
                f"model.relative_buckets {self.relative_buckets}",
            )

    @property
    def table_size(self) -> int:
        """Rows of the token table: vocab_size rounded up to a multiple of 64. Padding rows are never predicted."""
        return -(-self.vocab_size // TABLE_MULTIPLE) * TABLE_MULTIPLE

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Which tokens are predicted, and what stands in their place."""

    rate: float = 0.15
    count: Literal["fixed", "stochastic"] = "fixed"
    """fixed: round(rate * n) tokens of n (static shapes). stochastic: floor(rate * n + u), u uniform per sequence
    (released code)."""
    special_tokens: bool = True
    """Whether <s> and </s> may be masked (they may in the released code)."""
    policy: Literal["mask", "bert"] = "mask"
    """mask: every masked token becomes [MASK]. bert: 80% [MASK], 10% a random token, 10% unchanged (Appendix E)."""

    def __post_init__(self) -> None:
        require(0.0 < self.rate < 1.0, f"masking.rate must lie between 0 and 1, not {self.rate}")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, linear warm-up, linear decay to 0. Update k, counting from 0, uses lr(k); lr(0) = 0 (released code)."""

    lr: float = 5e-4
    batch_size: int = 2048
    """Sequences per update, over all ranks and micro-batches."""
    max_steps: int = 125_000
    warmup_steps: int = 10_000
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.01
    decay: Literal["all", "matrices"] = "all"
    """all: every parameter decays (released code). matrices: not biases, LayerNorm or the relative bias."""
    clip_norm: float = 2.0
    """Global L2 norm of the gradient; 0 switches clipping off."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optim.lr must be positive, not {self.lr}")
        require(self.batch_size > 0, f"optim.batch_size must be positive, not {self.batch_size}")
        require(self.max_steps > 0, f"optim.max_steps must be positive, not {self.max_steps}")
        require(
            0 <= self.warmup_steps < self.max_steps,
            f"optim.warmup_steps {self.warmup_steps} must be at least 0 and below optim.max_steps {self.max_steps}",
        )
        require(
            all(0.0 <= beta < 1.0 for beta in self.betas), f"optim.betas must lie in [0, 1), not {list(self.betas)}"
        )
        require(self.eps > 0, f"optim.eps must be positive, not {self.eps}")
        require(self.weight_decay >= 0, f"optim.weight_decay must not be negative, not {self.weight_decay}")
        require(self.clip_norm >= 0, f"optim.clip_norm must not be negative (0 is off), not {self.clip_norm}")


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Which implementation runs each op. auto: the fastest that can. A named one runs, or the run ends with the reasons
    it cannot. triton: the kernels; native: the compiled extension; reference: plain PyTorch."""

    mask_and_pack: Literal["auto", "host", "triton", "reference"] = "auto"
    """host: on the CPU, in the loader. triton and reference: on the training device. auto: host."""
    embed_packed: Literal["auto", "triton", "native", "reference"] = "auto"
    attention: Literal["auto", "flash", "torch", "triton", "xformers", "flex", "grouped", "reference"] = "auto"
    """flash, torch, xformers: flash-attn, torch.nn.attention.varlen and xformers, without bias and dropout. flex:
    FlexAttention, without dropout. grouped: sequences of like length together, in PyTorch, for the CPU."""
    add_norm: Literal["auto", "triton", "native", "reference"] = "auto"
    feed_forward: Literal["auto", "triton", "reference"] = "auto"
    scatter_to_decoder: Literal["auto", "native", "reference"] = "auto"
    masked_cross_entropy: Literal["auto", "triton", "chunked", "reference"] = "auto"
    """chunked: the kernel's algorithm in plain PyTorch, for the CPU."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How the run is carried out and watched. Changes speed and files, not what is computed (up to rounding)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: autocast over fp32 master weights. auto: bf16, but fp32 on a CPU without bf16 matrix instructions."""
    micro_batch_size: int = 32
    """Full sequences per forward pass on one rank; of shorter ones, as many as have no more tokens in all. Gradients
    accumulate over the update's batch."""
    backend: BackendConfig = field(default_factory=BackendConfig)
    workers: int = 0
    """Loader processes. The batches are the same for every number."""
    log_every: int = 10
    eval_every: int = 1000
    eval_samples: int = 2048
    """Validation sequences per evaluation (all of them if the split has fewer)."""
    save_every: int = 1000
    keep_checkpoints: int = 3
    early_stop: int = 0
    """Stop after this many evaluations without a better validation loss; 0 is never."""
    max_nonfinite: int = 10
    """Updates in a row with a NaN or infinite gradient (each is skipped and counted) before the run stops."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "log_every", "eval_every", "eval_samples", "save_every", "keep_checkpoints"):
            require(getattr(self, name) > 0, f"runtime.{name} must be positive, not {getattr(self, name)}")
        for name in ("workers", "early_stop"):
            require(getattr(self, name) >= 0, f"runtime.{name} must not be negative, not {getattr(self, name)}")
        require(self.max_nonfinite > 0, f"runtime.max_nonfinite must be positive, not {self.max_nonfinite}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One pretraining run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    seed: int = 0
    """Initialisation, sample order, masks and dropout all follow from it."""

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, f"seed must lie in [0, 2**63), not {self.seed}")


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain data, as written to config.yaml (tuples become lists)."""
    return {
        f.name: to_dict(v) if dataclasses.is_dataclass(v) else list(v) if isinstance(v, tuple) else v
        for f in dataclasses.fields(config)
        for v in (getattr(config, f.name),)
    }


def from_dict(cls: type, data: dict[str, Any], path: str = "") -> Any:
    """The inverse of to_dict. Raises UserError on a missing or an unknown key."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    require(isinstance(data, dict), f"config: {path or 'the file'} must be a mapping")
    for key in data:
        require(key in known, f"config: unknown key '{path}{key}'; known: {', '.join(known)}")
    values = {}
    for name in known:
        require(name in data, f"config: key '{path}{name}' is missing")
        sub = SECTIONS.get((cls, name))
        value = data[name]
        values[name] = (
            from_dict(sub, value, f"{path}{name}.") if sub else tuple(value) if isinstance(value, list) else value
        )
    return cls(**values)


SECTIONS: dict[tuple[type, str], type] = {
    (RunConfig, "model"): ModelConfig,
    (RunConfig, "masking"): MaskingConfig,
    (RunConfig, "optim"): OptimConfig,
    (RunConfig, "runtime"): RuntimeConfig,
    (RuntimeConfig, "backend"): BackendConfig,
}
