"""Everything a run can be told, as frozen dataclasses, and nothing else: no torch, no parsing.

ModelConfig, MaskingConfig, OptimConfig change the result (science); RuntimeConfig should change only speed and what is
written when, MetricsConfig only what is measured. Values are checked on construction: a wrong one raises UserError
naming the field and the remedy. Defaults are the paper's `base` row; where the paper is silent the comment says whose
choice it is.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from maelm_fast.errors import UserError, unknown

_RATE_STEP = 0.05
TABLE_MULTIPLE = 64  # token-table rows are padded to this, for the matrix units
MICRO_BATCH = 32


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
    decoder: Literal["none", "self", "cross", "self_cross", "causal_cross"] = "self"
    """self: bidirectional self-attention over all slots (the paper's MAE-LM). The others are Table 2's. cross: masked
    tokens attend to the encoder's outputs only. self_cross: self, and in each layer cross-attention to the encoder's
    outputs after it. causal_cross: as BART, every token is predicted from those before it and the encoder's outputs."""
    decoder_layers: int = 4
    decoder_hidden_size: int | None = None
    """Width of the decoder (Table 2: 512, 1024); None: hidden_size. Its feed-forward is wider or narrower in
    proportion; a linear layer leads into it, and one in the head leads back to the token table's width."""
    decoder_num_heads: int | None = None
    """None: as many heads of the encoder's width as fit the decoder's, which for 512 are 8 of 64 (ours: the paper and
    the released code are silent, and the 12 heads of base do not divide 512)."""
    decoder_resets_mask: bool = False
    """The decoder reads the [MASK] embedding at every masked place, also where the encoder had a token there (Table 2,
    "enc. w. [MASK], dec. resets [MASK]")."""
    positions: Literal["aligned", "misaligned"] = "aligned"
    """Positions in the encoder, absolute and relative. aligned: of the original sequence, masked tokens leave gaps.
    misaligned: 0, 1, 2, ... over the tokens that the encoder reads (Table 2). The decoder's are always aligned."""
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
        sizes = ("vocab_size", "max_positions", "hidden_size", "num_layers", "num_heads", "ffn_size")
        for name in (*sizes, "layer_norm_eps", "init_std"):
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
        self._check_decoder()
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

    def _check_decoder(self) -> None:
        own = ("decoder_hidden_size", "decoder_num_heads")
        for name in own:
            value = getattr(self, name)
            require(value is None or value > 0, f"model.{name} must be positive, not {value}")
        if self.decoder == "none":
            absent = dict.fromkeys(own) | {"decoder_resets_mask": False, "positions": "aligned"}
            for name, default in absent.items():
                require(
                    getattr(self, name) == default,
                    f"model.{name} is set but means nothing when model.decoder is none: remove one of the two",
                )
            return
        require(
            self.decoder != "causal_cross" or not self.decoder_resets_mask,
            "model.decoder_resets_mask is set, but a causal_cross decoder reads tokens, not what the encoder made of "
            "them: remove one of the two",
        )
        width, heads = self.decoder_hidden_size or self.hidden_size, self.decoder_num_heads
        part = self.head_dim if heads is None else heads
        kind = "the width of an encoder's head, so set model.decoder_num_heads" if heads is None else "the heads"
        require(width % part == 0, f"model.decoder_hidden_size {width} is not a multiple of {part}, {kind}")

    @property
    def decoder_config(self) -> ModelConfig:
        """What the decoder's blocks are built from: these fields with the decoder's width, heads and feed-forward."""
        width = self.decoder_hidden_size or self.hidden_size
        return dataclasses.replace(
            self,
            hidden_size=width,
            num_heads=self.decoder_num_heads or width // self.head_dim,
            ffn_size=width * self.ffn_size // self.hidden_size,
            decoder_hidden_size=None,
            decoder_num_heads=None,
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
    """Share of the tokens that is masked."""
    rate_end: float | None = None
    """In training the share goes from `rate` in the first updates to this in the last ones, in equal steps of 0.05 or
    less that take equally many updates (ours; a linear fall: arXiv 2305.15096). Everything else masks at this rate
    then: validation, the live rank. None: it stays at `rate`."""
    count: Literal["fixed", "stochastic"] = "fixed"
    """fixed: round(rate * n) tokens of n (static shapes). stochastic: floor(rate * n + u), u uniform per sequence
    (released code)."""
    special_tokens: bool = True
    """Whether <s> and </s> may be masked (they may in the released code)."""
    policy: Literal["mask", "bert", "random"] = "mask"
    """mask: every masked token becomes [MASK]. bert: 80% [MASK], 10% a random token, 10% unchanged (Appendix E).
    random: every masked token becomes a random one, which stays in the encoder's row (Table 2)."""
    shown: float = 0.0
    """Share of each sequence's masked tokens that the encoder reads as [MASK] (Fig. 4's delta): floor(shown * m + 0.5)
    of m. 0: none, MAE-LM. Without a decoder all of them are read, whatever stands here."""

    def __post_init__(self) -> None:
        require(0.0 < self.rate < 1.0, f"masking.rate must lie between 0 and 1, not {self.rate}")
        end = self.rate if self.rate_end is None else self.rate_end
        require(0.0 < end < 1.0, f"masking.rate_end must lie between 0 and 1, not {end}")
        require(0.0 <= self.shown <= 1.0, f"masking.shown must lie in [0, 1], not {self.shown}")
        require(
            self.shown == 0.0 or self.policy == "mask",
            f"masking.shown is {self.shown}, but with masking.policy {self.policy} the policy says what the encoder "
            "reads: set masking.shown=0 or masking.policy=mask",
        )

    @property
    def final(self) -> MaskingConfig:
        """With the one rate at which training ends, and at which everything but training masks."""
        return self if self.rate_end is None else dataclasses.replace(self, rate=self.rate_end, rate_end=None)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its learning rate. Update k, counting from 0, uses lr(k); lr(0) = 0 (released code)."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks and of the head, AdamW for all else (ours; training/muon.py)."""
    lr: float = 5e-4
    """Peak learning rate."""
    muon_lr: float | None = None
    """Peak learning rate of Muon's matrices, whose updates are as large as AdamW's at the same rate (arXiv 2502.16982);
    None: lr."""
    muon_momentum: float = 0.95
    """Of Muon's average of the gradients; the short runs of tiny_fast want less."""
    batch_size: int = 2048
    """Sequences per update, over all its micro-batches."""
    max_steps: int = 125_000
    """Updates in all."""
    warmup_steps: float = 10_000
    """Updates of warm-up; below 1, their share of max_steps. A configuration, once made, has the number."""
    schedule: Literal["linear", "trapezoid"] = "linear"
    """After a linear warm-up. linear: linear decay to 0 (the paper). trapezoid: the peak is kept until the last
    cooldown_steps updates, and then decays linearly to 0 (ours). Such a run can be prolonged, or cooled down early, by
    resuming it with another max_steps: as long as no update that is done would have been another."""
    cooldown_steps: float | None = None
    """Updates of the trapezoid's decay; below 1, their share of max_steps; None: half. A configuration, once made, has
    the number."""
    lr_end: float = 0.0
    """Share of the peak at which the decay ends (the paper: 0). An average of the weights likes more."""
    average: float = 0.0
    """Decay of an exponential average of the weights, one step an update: what is evaluated, saved and exported then is
    that average (ours; training/average.py). 0.995 is over some 200 updates; 0: the weights as they are."""
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.01
    decay: Literal["all", "matrices"] = "all"
    """all: every parameter decays (released code). matrices: not biases, LayerNorm or the relative bias."""
    clip_norm: float = 2.0
    """Global L2 norm of the gradient; 0 switches clipping off."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optim.lr must be positive, not {self.lr}")
        require(self.muon_lr is None or self.muon_lr > 0, f"optim.muon_lr must be positive, not {self.muon_lr}")
        require(0.0 <= self.muon_momentum < 1.0, f"optim.muon_momentum must lie in [0, 1), not {self.muon_momentum}")
        for name, default in (("muon_lr", None), ("muon_momentum", 0.95)):
            require(
                self.name == "muon" or getattr(self, name) == default,
                f"optim.{name} is set but optim.name is {self.name}: set optim.name=muon, or remove it",
            )
        require(self.batch_size > 0, f"optim.batch_size must be positive, not {self.batch_size}")
        require(self.max_steps > 0, f"optim.max_steps must be positive, not {self.max_steps}")
        warmup = self._updates(self.warmup_steps)
        require(
            0 <= warmup < self.max_steps and warmup == int(warmup),
            f"optim.warmup_steps {self.warmup_steps:g} must be a whole number, at least 0 and below optim.max_steps "
            f"{self.max_steps}, or a share of it: give --warmup",
        )
        object.__setattr__(self, "warmup_steps", int(warmup))
        self._check_cooldown()
        for name in ("lr_end", "average"):
            require(0.0 <= getattr(self, name) < 1.0, f"optim.{name} must lie in [0, 1), not {getattr(self, name)}")
        require(
            all(0.0 <= beta < 1.0 for beta in self.betas), f"optim.betas must lie in [0, 1), not {list(self.betas)}"
        )
        require(self.eps > 0, f"optim.eps must be positive, not {self.eps}")
        require(self.weight_decay >= 0, f"optim.weight_decay must not be negative, not {self.weight_decay}")
        require(self.clip_norm >= 0, f"optim.clip_norm must not be negative (0 is off), not {self.clip_norm}")

    def _updates(self, steps: float) -> float:
        return round(steps * self.max_steps) if 0 < steps < 1 else steps

    def _check_cooldown(self) -> None:
        if self.schedule == "linear":
            require(
                self.cooldown_steps is None,
                "optim.cooldown_steps is set but optim.schedule is linear: set optim.schedule=trapezoid, or remove it",
            )
            return
        cooldown = self._updates(0.5 if self.cooldown_steps is None else self.cooldown_steps)
        require(
            0 < cooldown <= self.max_steps - self.warmup_steps and cooldown == int(cooldown),
            f"optim.cooldown_steps {self.cooldown_steps} must be a whole number, at least 1 and at most what "
            f"optim.warmup_steps {self.warmup_steps} leaves of optim.max_steps {self.max_steps}, or a share of those",
        )
        object.__setattr__(self, "cooldown_steps", int(cooldown))


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Which implementation runs each op. auto: the fastest that can. A named one runs, or the run ends with the reasons
    it cannot. triton: the kernels; native: the compiled extension; reference: plain PyTorch."""

    mask_and_pack: Literal["auto", "host", "triton", "reference"] = "auto"
    """host: on the CPU, in the loader. triton and reference: on the training device. auto: host."""
    embed_packed: Literal["auto", "triton", "native", "reference"] = "auto"
    attention: Literal["auto", "flash", "torch", "triton", "xformers", "flex", "native", "grouped", "reference"] = (
        "auto"
    )
    """flash, torch, xformers: flash-attn, torch.nn.attention.varlen and xformers, without bias and dropout. flex:
    FlexAttention, without dropout. native: C++ for the CPU. grouped: sequences of like length together, in
    PyTorch, for the CPU."""
    add_norm: Literal["auto", "triton", "native", "reference"] = "auto"
    linear: Literal["auto", "triton", "native", "reference"] = "auto"
    """triton: PyTorch's, with the bias's gradient from the kernel before it. native, also in feed_forward and
    masked_cross_entropy: bf16 on a CPU with AVX-512 BF16."""
    feed_forward: Literal["auto", "triton", "native", "reference"] = "auto"
    scatter_to_decoder: Literal["auto", "native", "reference"] = "auto"
    masked_cross_entropy: Literal["auto", "triton", "native", "chunked", "reference"] = "auto"
    """chunked: the kernel's algorithm in plain PyTorch, for the CPU."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How several processes, which torchrun starts, share a run. One process needs none of it."""

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """ddp: each process holds the model and the optimiser's state. fsdp: FSDP2, which holds a share of both in each;
    for models that do not fit otherwise. auto: ddp (ours: the paper's models need 2.2 to 6.7 GB)."""
    timeout_s: float = 600.0
    """Seconds that a process may wait for the others, or work at one thing, before the run ends and says who hangs."""

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, f"runtime.parallel.timeout_s must be positive, not {self.timeout_s}")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How the run is carried out and watched. Changes speed and files, not what is computed (up to rounding); but
    dropout is drawn per micro-batch, so that another micro_batch_size draws other bits."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: autocast over fp32 master weights. auto: bf16, but fp32 on a CPU without bf16 matrix instructions."""
    micro_batch_size: int | None = None
    """Full sequences per forward pass; of shorter ones, as many as have no more tokens in all. Gradients
    accumulate over the update's batch. Another size draws other dropout bits, the same masks. None: what a run that
    goes on was begun with; else on a GPU in bf16 by its memory (training/memory.py), elsewhere 32."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    cuda_graph: bool = False
    """Record an update as a CUDA graph and replay it: for small models, where launching kernels takes longer than
    running them. Needs samples of one length, a fixed mask count and a GPU."""
    deterministic: bool = False
    """On a GPU too, the same bits every time: table gradients are added in a fixed order, which is slower, and what
    has no such order is refused. A CPU gives the same bits anyway. Without it cuBLAS may add up a product's parts in
    bf16 (PyTorch's default)."""
    workers: int = 0
    """Loader processes. The batches are the same for every number."""
    log_every: int = 10
    eval_every: int = 1000
    eval_samples: int = 2048
    """Validation sequences per evaluation (all of them if the split has fewer)."""
    save_every: int = 1000
    keep_checkpoints: int = 3
    async_save: bool = False
    """A step waits only until the state is copied into the host's memory; a thread writes it. The save at the end, or
    when stopped, is waited for."""
    early_stop: int = 0
    """Stop after this many evaluations without a better validation loss; 0 is never."""
    max_nonfinite: int = 10
    """Updates in a row with a NaN or infinite gradient (each is skipped and counted) before the run stops."""

    def __post_init__(self) -> None:
        sizes = {} if self.micro_batch_size is None else {"micro_batch_size": self.micro_batch_size}
        for name in ("log_every", "eval_every", "eval_samples", "save_every", "keep_checkpoints"):
            sizes[name] = getattr(self, name)
        for name, size in sizes.items():
            require(size > 0, f"runtime.{name} must be positive, not {size}")
        for name in ("workers", "early_stop"):
            require(getattr(self, name) >= 0, f"runtime.{name} must not be negative, not {getattr(self, name)}")
        require(self.max_nonfinite > 0, f"runtime.max_nonfinite must be positive, not {self.max_nonfinite}")

    @property
    def sequences_at_once(self) -> int:
        """micro_batch_size, or 32 where nobody has looked at the device."""
        return MICRO_BATCH if self.micro_batch_size is None else self.micro_batch_size


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What is measured of the model as it trains, beside its loss. Changes nothing else."""

    rank_every: int = 1000
    """Updates between measurements of the representations' effective rank (training/live.py); 0 is never."""

    def __post_init__(self) -> None:
        require(self.rank_every >= 0, f"metrics.rank_every must not be negative (0 is never), not {self.rank_every}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One pretraining run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    seed: int = 0
    """Initialisation, sample order, masks and dropout all follow from it."""
    preset: str = field(default="", compare=False)
    """The name of the preset it was made from, for records; no option, and no part of to_dict."""

    def mask_rate(self, update: int) -> float:
        """The share of the tokens that an update masks, counting from 0: a function of the update alone, so that a
        resumed run draws the same masks. It has few values, since each is a shape of its own to whatever is compiled
        for one."""
        first, last = self.masking.rate, self.masking.final.rate
        falls = math.ceil(round(abs(last - first) / _RATE_STEP, 6))
        done = update * (falls + 1) // self.optim.max_steps
        return last if done >= falls else round(first + (last - first) * done / falls, 6)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, f"seed must lie in [0, 2**63), not {self.seed}")
        require(
            self.model.decoder != "none" or self.masking.shown == 0.0,
            f"masking.shown is {self.masking.shown}, but without a decoder the encoder reads every [MASK]: remove it",
        )
        require(
            not self.model.decoder_resets_mask or self.masking.shown > 0.0 or self.masking.policy != "mask",
            "model.decoder_resets_mask changes nothing where the encoder reads no masked token: set masking.shown too",
        )


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain data, as written to config.yaml (tuples become lists): all that decides anything."""
    return {
        f.name: to_dict(v) if dataclasses.is_dataclass(v) else list(v) if isinstance(v, tuple) else v
        for f in dataclasses.fields(config)
        for v in (getattr(config, f.name),)
        if f.compare
    }


def from_dict(cls: type, data: dict[str, Any], path: str = "") -> Any:
    """The inverse of to_dict; a key that is missing, as in the file of an older version, has its default. Raises
    UserError on an unknown key, or a value that is none of those there are."""
    hints = get_type_hints(cls)
    require(isinstance(data, dict), f"config: {path or 'the file'} must be a mapping")
    for key in data:
        if key not in hints:
            raise UserError(f"config: {unknown('key', path + key, [path + name for name in hints])}")
    values = {}
    for name, value in data.items():
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else (value,)
        require(value in choices, f"config: {path}{name} is one of {', '.join(map(str, choices))}, not {value}")
        section = dataclasses.is_dataclass(hints[name])
        made = from_dict(hints[name], value, f"{path}{name}.") if section else value
        values[name] = tuple(made) if isinstance(made, list) else made
    return cls(**values)
