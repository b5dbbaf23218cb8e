"""Who takes part in the comparison of training steps: our presets and their peers, made from one Settings.

A contestant's name is a preset's, or a peer's (PEERS), with `_compiled` behind it if torch.compile gets the whole
model: base, roberta_base_compiled, hf, hf_compiled, padded. Its step is forward, backward, clip, fused
AdamW, on the same batch, for all of them. A preset's may also be what a run makes of it: `_accumulated`, an update of
MICRO_BATCHES micro-batches, and `_graph`, an update recorded as one CUDA graph.

Tokens are original tokens: visible and masked, no pads. FLOPs are those of the real tokens and of what the model's
class computes for them: pads count nothing, a head that scores every position counts at every position.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.padded import PaddedMaeLm, padded_inputs
from benchmarks.peers import PAD_ID, hugging_face_inputs, hugging_face_roberta
from benchmarks.rows import COMPILED
from maelm_fast import presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, ModelConfig, require
from maelm_fast.data.masking import pack
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.block import keep_gelu
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training import memory
from maelm_fast.training.step import GraphedStep, TrainStep, apply_gradients

PEERS = {
    "hf": "Hugging Face RobertaForMaskedLM of the same dimensions, as it comes: sdpa attention",
    "hf_eager": "the same with eager attention",
    "hf_flash": "the same with flash_attention_2",
    "padded": "MAE-LM computed as the released code computes it, with our weights",
}
ATTENTION = {"hf": "sdpa", "hf_eager": "eager", "hf_flash": "flash_attention_2"}
GRAPH, ACCUMULATED = "_graph", "_accumulated"
MICRO_BATCHES = 8
CLIP_NORM, LR = 2.0, 1e-4
STEPS_PER_TURN = {"cpu": 1, "cuda": 4}
SHORTEST = 8  # tokens of a document


def split(name: str) -> tuple[str, str]:
    """A contestant's preset or peer, and what is behind its name, or nothing."""
    variant = next((v for v in (COMPILED, GRAPH, ACCUMULATED) if name.endswith(v)), "")
    return name.removesuffix(variant), variant


@dataclass(frozen=True)
class Settings:
    """What all contestants of a case share. dropout, bias: None keeps each preset's own."""

    batch: int = 8
    """Sequences."""
    seq: int = 512
    """Tokens of the longest sequence."""
    rate: float = 0.15
    dropout: float | None = None
    bias: bool | None = None
    precision: str = "fp32"
    device: str = "cpu"
    shape: str = "base"
    """The preset whose dimensions and dropout hf and padded take."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """ModelConfig fields replaced in every contestant's configuration."""
    lengths: str = "full"
    """full: every sequence has seq tokens. documents: see sequence_lengths."""

    def __post_init__(self) -> None:
        require(self.batch >= 1 and self.seq >= SHORTEST, f"at least one sequence of {SHORTEST} tokens is needed")
        require(self.lengths in ("full", "documents"), f"lengths are full or documents, not {self.lengths}")

    def model_config(self, name: str) -> ModelConfig:
        """UserError on a name that no contestant has, and if the sequences are too long for its position table."""
        kind, variant = split(name)
        require(variant in ("", COMPILED) or kind not in PEERS, f"{name}: {variant} is for presets")
        require(
            variant != ACCUMULATED or self.batch % MICRO_BATCHES == 0,
            f"{name} needs a multiple of {MICRO_BATCHES} sequences, not {self.batch}",
        )
        require(variant != GRAPH or self.device == "cuda", f"{name} needs a GPU")
        config = presets.get(self.shape if kind in PEERS else kind)
        if kind in ATTENTION:
            config = presets.as_roberta(config)
        masking = config.masking
        require(
            (masking.policy, masking.shown) == ("mask", 0.0), f"{name} masks in a way of its own: it is not timed here"
        )
        require(
            kind != "padded" or config.model.decoder == "self", f"{self.shape} has no self-attention decoder to pad"
        )
        changes: dict[str, Any] = {} if self.dropout is None else {"dropout": self.dropout}
        if kind in ATTENTION or self.bias is False:
            changes["relative_bias"] = "none"
        elif self.bias and config.model.relative_bias == "none":
            changes["relative_bias"] = "t5"
        model = presets.change(config, model={**changes, **self.changes}).model
        require(self.seq <= model.max_positions, f"{name} has {model.max_positions} positions, not {self.seq}")
        return model

    def sequence_lengths(self) -> tuple[int, ...]:
        """documents: log-normal lengths cut at seq, as documents cut to fit would have them: 23% are full, the median
        is 0.48 seq. They are the distribution's quantiles, in an order drawn once, so that a small batch has its share
        of each."""
        if self.lengths == "full":
            return (self.seq,) * self.batch
        normal = statistics.NormalDist(np.log(0.48 * self.seq), 1.0)
        drawn = np.exp([normal.inv_cdf((i + 0.5) / self.batch) for i in range(self.batch)])
        lengths = np.clip(drawn, SHORTEST, self.seq).astype(int)
        return tuple(np.random.default_rng(1).permutation(lengths).tolist())

    def token_ids(self, vocab_size: int) -> list[NDArray[np.int64]]:
        """The same for every contestant with that vocabulary, as frequent as a text's words are (Zipf and Mandelbrot:
        1 over rank + 2.7). <mask>, its last token, is not among them."""
        rng, tokens = np.random.default_rng(0), np.arange(PAD_ID + 1, vocab_size - 1)
        frequency = 1 / (np.arange(len(tokens)) + 2.7)
        ids = rng.choice(rng.permutation(tokens), (self.batch, self.seq), p=frequency / frequency.sum())
        return [row[:n] for row, n in zip(ids, self.sequence_lengths(), strict=True)]

    def packed(self, vocab_size: int, encoder_sees_mask: bool, epoch: int = 0) -> PackedBatch:
        """The batch with the masks of that epoch, on the device."""
        return self.packed_from(self.token_ids(vocab_size), vocab_size, encoder_sees_mask, epoch).to(self.device)

    def packed_from(
        self, ids: list[NDArray[np.int64]], vocab_size: int, encoder_sees_mask: bool, epoch: int
    ) -> PackedBatch:
        """The same from these ids, on the host."""
        masking, vocabulary = MaskingConfig(rate=self.rate), Vocabulary(vocab_size, vocab_size - 1, (vocab_size - 1,))
        samples = np.arange(self.batch)
        return pack(ids, samples, np.full_like(samples, epoch), Masker(masking, vocabulary, 0, encoder_sees_mask))


def sees_mask(kind: str, config: ModelConfig) -> bool:
    """Whether [MASK] stays in the encoder's row."""
    return kind in ATTENTION or (kind != "padded" and config.decoder == "none")


def model_flops(kind: str, config: ModelConfig, batch: PackedBatch) -> int:
    """Of a forward and backward pass."""
    # hf: the last layer and the head compute every position. padded: the decoder's last layer does.
    scored = batch.decoder.lengths if kind in PEERS else batch.masked.lengths
    flops = training_flops(config, batch.visible.lengths, batch.decoder.lengths, scored)
    if kind == "padded":
        unscored = batch.counts.original - batch.counts.masked
        flops -= 3 * 2 * unscored * config.hidden_size * (config.hidden_size + config.vocab_size)
    return flops


class Turn(NamedTuple):
    """Seconds and CPU seconds a step, and the seconds of every step."""

    seconds: float
    cpu_seconds: float
    steps: list[float]


class Contestant:
    """A model, its loss on the batch, and a step of training."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.kind, variant = split(name)
        self.compiled = variant == COMPILED
        self.config = settings.model_config(name)
        self.autocast = partial(torch.autocast, settings.device, torch.bfloat16, enabled=settings.precision == "bf16")
        torch.manual_seed(0)
        self.model: nn.Module
        if self.kind in PEERS:
            self.model = self._peer().to(settings.device)
        else:
            self.model = self._preset().to(settings.device)
        self.model.train()
        self._ids = settings.token_ids(self.config.vocab_size)
        self._call: Callable[..., Any] = self.model
        if self.compiled:
            # so that a profile can name the loops that inductor writes in C++, as it names those in Triton by itself
            self._call = torch.compile(self.model, options={"cpp.enable_kernel_profile": True})
        self.batch = self._packed(epoch=0)
        self.inputs = self._inputs(self.batch)
        self.tokens = self.batch.counts.original
        self.predicted = (
            self.batch.counts.original if self.config.decoder == "causal_cross" else self.batch.counts.masked
        )
        self.flops = model_flops(self.kind, self.config, self.batch)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, fused=True)
        self.whole: TrainStep | GraphedStep | None = None
        """The update, where it has no parts."""
        if variant in (GRAPH, ACCUMULATED):
            self.whole = TrainStep(cast(MaeLm, self.model), self.optimizer, CLIP_NORM, settings.precision)
            self._seeds = torch.arange(1 if variant == GRAPH else MICRO_BATCHES, device=settings.device)
            self._micro_batches = self._cut(len(self._seeds))
        if self.whole is not None and variant == GRAPH:
            self.whole = GraphedStep(self.whole)

    def _cut(self, count: int) -> list[PackedBatch]:
        """The batch as so many micro-batches."""
        size = self.settings.batch // count
        settings, masked = replace(self.settings, batch=size), sees_mask(self.kind, self.config)
        parts = [self._ids[start : start + size] for start in range(0, self.settings.batch, size)]
        batches = [settings.packed_from(ids, self.config.vocab_size, masked, epoch=0) for ids in parts]
        return [batch.to(settings.device) for batch in batches]

    def _preset(self) -> MaeLm:
        """Keeps GELU's output where a run with the batch as its micro-batch would."""
        s, model = self.settings, MaeLm(self.config)
        run = presets.change(
            presets.get(self.kind),
            masking={"rate": s.rate, "rate_end": None},
            runtime={"micro_batch_size": s.batch},
        )
        run = replace(run, model=self.config)
        if memory.can_estimate(run, torch.device(s.device), s.precision):
            free, parameters = torch.cuda.mem_get_info()[0], sum(p.numel() for p in model.parameters())
            keep_gelu(model, memory.keeps_gelu(run, parameters, s.seq, free))
        return model

    def _peer(self) -> nn.Module:
        if self.kind in ATTENTION:
            return hugging_face_roberta(self.config, ATTENTION[self.kind])
        return PaddedMaeLm(MaeLm(self.config))

    def _packed(self, epoch: int) -> PackedBatch:
        vocab_size = self.config.vocab_size
        return self.settings.packed_from(self._ids, vocab_size, sees_mask(self.kind, self.config), epoch)

    def _inputs(self, batch: PackedBatch) -> Any:
        """What the model is called with, on the device, from a batch on the host."""
        device = self.settings.device
        if self.kind in ATTENTION:
            return {name: tensor.to(device) for name, tensor in hugging_face_inputs(batch).items()}
        if self.kind == "padded":
            return padded_inputs(batch).to(device)
        return batch.to(device)

    def fresh(self, epoch: int) -> None:
        """Other masks from now on, packed on the host and copied to the device."""
        self.inputs = self._inputs(self._packed(epoch))

    def loss(self) -> Tensor:
        """Nats per masked token, 0-d."""
        loss: Tensor
        if self.kind in ATTENTION:
            loss = self._call(**self.inputs).loss
        elif self.kind == "padded":
            loss = self._call(self.inputs)
        else:
            loss = self._call(self.inputs)[0] / self.predicted
        return loss

    def forward(self) -> Tensor:
        with self.autocast():
            return self.loss()

    def update(self) -> None:
        """Ours as a run does it, a peer's as its users do."""
        if self.kind not in PEERS:
            apply_gradients(self.optimizer, self.parameters, CLIP_NORM)
            return
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Tensor:
        if self.whole is not None:
            return self.whole(self._micro_batches, self._seeds, LR)[0]
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()

    @property
    def steps_of_a_turn(self) -> int:
        """With those outside the clock."""
        return STEPS_PER_TURN[self.settings.device] + (self.settings.device == "cuda")

    def turn(self) -> Turn:
        steps = STEPS_PER_TURN[self.settings.device]
        busy = time.process_time()
        taken = self._turn(steps)
        return Turn(statistics.mean(taken), (time.process_time() - busy) / steps, taken)

    def _turn(self, steps: int) -> list[float]:
        """Seconds of each step."""
        if self.settings.device == "cuda":
            self.step()  # in memory that the allocator may hold in the pieces of the contestant before
            events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            events[0].record()
            for event in events[1:]:
                self.step()
                event.record()
            events[-1].synchronize()
            return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]
        clock = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            clock.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(clock)]
