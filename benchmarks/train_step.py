"""Full training steps, side by side: forward, backward, clip, fused AdamW, on the same token ids, in one process.

    python -m benchmarks.train_step --peers hf --models base,base_cross,roberta_base --dropout 0 --no-bias

1. Gate: our RoBERTa and Hugging Face's, same weights, same batch, must have the same loss; no timing otherwise.
2. Memory: each contestant alone in a fresh process (CUDA: torch's peak; CPU: growth of the peak resident set).
3. Time: the contestants take turns, A B C A B C ..., so that a slow minute of the machine hits all of them. A ratio is
   the median of the rounds' ratios, not the ratio of medians. On a CPU the ratio of CPU seconds is given too: other
   work on the machine disturbs it less than the clock.

Tokens are original tokens: visible and masked, no pads. Every contestant trains on the same batch again and again,
which changes no timing; masks are drawn once, outside the clock.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from benchmarks.measure import append_rows, environment, quartiles
from benchmarks.peers import PAD_ID, copy_weights, hugging_face_inputs, hugging_face_roberta
from maelm_fast import presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig, ModelConfig, RuntimeConfig
from maelm_fast.data.masking import Vocabulary, pack
from maelm_fast.model.flops import peak_flops, training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.hardware import choose_precision, cpu_has_bf16

HF = "hf"
GATE_TOLERANCE = 1e-5  # relative difference of two fp32 losses summed in different orders
CLIP_NORM = 2.0
STEPS_PER_TURN = {"cpu": 1, "cuda": 10}
WARMUP_TURNS = {"cpu": 0, "cuda": 1}  # after a first step, whose loss is reported


@dataclass(frozen=True)
class Settings:
    """What all contestants of a run share. dropout, bias: None keeps each preset's own."""

    batch: int = 8
    seq: int = 512
    rate: float = 0.15
    dropout: float | None = None
    bias: bool | None = None
    precision: str = "fp32"
    device: str = "cpu"
    shape: str = "base"
    """The preset whose dimensions and dropout the Hugging Face model takes."""

    def model_config(self, name: str) -> ModelConfig:
        config = presets.as_roberta(presets.get(self.shape)) if name == HF else presets.get(name)
        changes: dict[str, Any] = {} if self.dropout is None else {"dropout": self.dropout}
        if name == HF or self.bias is False:
            changes["relative_bias"] = "none"
        elif self.bias and config.model.relative_bias == "none":
            changes["relative_bias"] = "t5"
        return presets.change(config, model=changes).model

    def packed(self, vocab_size: int, encoder_sees_mask: bool) -> PackedBatch:
        """The batch: the same token ids and masks for every contestant. <mask> is the vocabulary's last token."""
        ids = np.random.default_rng(0).integers(PAD_ID + 1, vocab_size - 1, (self.batch, self.seq))
        every = np.arange(self.batch)
        masking, vocabulary = MaskingConfig(rate=self.rate), Vocabulary(vocab_size, vocab_size - 1, (vocab_size - 1,))
        return pack(list(ids), every, np.zeros_like(every), masking, vocabulary, 0, encoder_sees_mask).to(self.device)


class Contestant:
    """A model, its loss on the batch, and a step of training."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.config = settings.model_config(name)
        self.autocast = partial(torch.autocast, settings.device, torch.bfloat16, enabled=settings.precision == "bf16")
        torch.manual_seed(0)
        self.model: nn.Module
        self.loss: Callable[[], Tensor]
        if name == HF:
            theirs = hugging_face_roberta(self.config).to(settings.device)
            batch = settings.packed(self.config.vocab_size, encoder_sees_mask=True)
            inputs = hugging_face_inputs(batch)
            self.model, self.loss = theirs, lambda: theirs(**inputs).loss
            scored = batch.decoder_lengths  # its last layer and its head compute every position
        else:
            ours = MaeLm(self.config).to(settings.device)
            batch = settings.packed(self.config.vocab_size, ours.encoder_sees_mask)
            self.model, self.loss = ours, lambda: ours(batch)[0] / batch.counts.masked
            scored = batch.masked_lengths
        self.model.train()
        self.tokens = batch.counts.original
        self.flops = training_flops(self.config, batch.lengths, batch.decoder_lengths, scored)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> Tensor:
        with self.autocast():
            loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def turn(self) -> tuple[float, float]:
        """Seconds per step and CPU seconds per step."""
        busy = time.process_time()
        seconds = self._turn()
        return seconds, (time.process_time() - busy) / STEPS_PER_TURN[self.settings.device]

    def _turn(self) -> float:
        steps = STEPS_PER_TURN[self.settings.device]
        if self.settings.device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(steps):
                self.step()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000 / steps
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - began) / steps


def gate(names: Sequence[str], settings: Settings) -> dict[str, float]:
    """First losses in fp32 without dropout and bias. SystemExit if the RoBERTas disagree or a loss is not finite."""
    plain = Settings(**{**vars(settings), "dropout": 0.0, "bias": False, "precision": "fp32"})
    config = plain.model_config(HF)
    torch.manual_seed(0)
    ours, theirs = MaeLm(config).to(plain.device), hugging_face_roberta(config).to(plain.device)
    copy_weights(ours, theirs)
    batch = plain.packed(config.vocab_size, encoder_sees_mask=True)
    with torch.no_grad():
        values = {"our_roberta": (ours(batch)[0] / batch.counts.masked).item()}
        values["hf_roberta"] = theirs(**hugging_face_inputs(batch)).loss.item()
        for name in names:
            if name != HF:
                values[name] = Contestant(name, plain).loss().item()
    if abs(values["our_roberta"] / values["hf_roberta"] - 1) > GATE_TOLERANCE:
        raise SystemExit(f"gate: our RoBERTa and Hugging Face's disagree on the same weights: {values}")
    if not all(map(math.isfinite, values.values())):
        raise SystemExit(f"gate: a loss is not finite: {values}")
    return values


def peak_memory_mb(name: str, settings: Settings) -> float:
    """Megabytes (2**20 bytes) that two steps need, weights and optimiser included. Runs in a process of its own."""
    before = 0 if settings.device == "cuda" else _resident("VmRSS")
    contestant = Contestant(name, settings)
    for _ in range(2):
        contestant.step()
    if settings.device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return (_resident("VmHWM") - before) / 2**20


def _resident(field: str) -> int:
    """Bytes, from Linux's account of this process. (getrusage's peak would include the parent's before exec.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def compare(names: Sequence[str], settings: Settings, rounds: int) -> list[dict[str, Any]]:
    """One row of results per contestant."""
    losses = alone(gate, names, settings)
    memory = {name: alone(peak_memory_mb, name, settings) for name in names}
    contestants = [Contestant(name, settings) for name in names]
    first = {c.name: c.step().item() for c in contestants}
    gc.collect()
    gc.disable()
    for _ in range(WARMUP_TURNS[settings.device]):
        for contestant in contestants:
            contestant.turn()
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for contestant in contestants:
            turns[contestant.name].append(contestant.turn())
    gc.enable()
    machine = environment(settings.device) | {"transformers": transformers.__version__}
    rows = []
    for contestant in contestants:
        speed = quartiles([contestant.tokens / seconds for seconds, _ in turns[contestant.name]])
        ratios: dict[str, dict[str, float] | None] = {"ratio_to_hf": None, "cpu_ratio_to_hf": None}
        if HF in names:
            pairs = list(zip(turns[HF], turns[contestant.name], strict=True))
            ratios["ratio_to_hf"] = quartiles([theirs[0] / own[0] for theirs, own in pairs])
            if settings.device == "cpu":
                ratios["cpu_ratio_to_hf"] = quartiles([theirs[1] / own[1] for theirs, own in pairs])
        flops = contestant.flops / contestant.tokens * speed["median"]
        peak = peak_flops(machine["device"]) if settings.precision == "bf16" else None
        rows.append({
            **machine, "model": contestant.name, "precision": settings.precision, "batch": settings.batch,
            "seq": settings.seq, "rate": settings.rate, "dropout": contestant.config.dropout,
            "bias": contestant.config.relative_bias, "rounds": rounds, "tokens_per_s": speed, **ratios,
            "mflop_per_token": round(contestant.flops / contestant.tokens / 1e6, 1),
            "tflop_per_s": round(flops / 1e12, 4), "mfu": round(flops / peak, 4) if peak else None,
            "peak_memory_mb": round(memory[contestant.name]),
            "first_loss": round(first[contestant.name], 5), "gate": losses,
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    def spread(value: dict[str, float] | None, form: str) -> str:
        if value is None:
            return "-"
        return f"{value['median']:{form}} [{value['q1']:{form}}, {value['q3']:{form}}]"

    lines = [
        f"{'model':14}{'dropout':>8}{'bias':>9}{'tokens/s':>28}{'over hf':>22}{'over hf, CPU time':>22}"
        f"{'TFLOP/s':>9}{'MFU':>7}{'peak MB':>9}{'loss':>10}"
    ]
    for row in rows:
        lines.append(
            f"{row['model']:14}{row['dropout']:8}{row['bias']:>9}{spread(row['tokens_per_s'], '.1f'):>28}"
            f"{spread(row['ratio_to_hf'], '.2f'):>22}{spread(row['cpu_ratio_to_hf'], '.2f'):>22}"
            f"{row['tflop_per_s']:9.3f}{row['mfu'] or '-':>7}{row['peak_memory_mb']:9}{row['first_loss']:10.5f}"
        )
    return "\n".join(lines)


def cpu_note(settings: Settings) -> str | None:
    if settings.device == "cuda" or cpu_has_bf16():
        return None
    return "this CPU has no bf16 matrix instructions; fp32 is the precision to train in here, for every contestant"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="base,roberta_base", help="presets, separated by commas")
    parser.add_argument("--peers", choices=[HF], help="hf: Hugging Face RobertaForMaskedLM as well")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--seq", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--rate", type=float, default=0.15, help="mask rate")
    parser.add_argument("--dropout", default="preset", help="a rate for every contestant, or preset")
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, help="relative position bias; default: preset")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: as a run chooses")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSONL file that the rows are appended to")
    options = parser.parse_args(arguments)

    names = options.models.split(",") + ([HF] if options.peers else [])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = choose_precision(RuntimeConfig(precision=options.precision), torch.device(device))
    settings = Settings(
        batch=options.batch, seq=options.seq, rate=options.rate, bias=options.bias, precision=precision,
        dropout=None if options.dropout == "preset" else float(options.dropout), shape=names[0],
        device=device,
    )  # fmt: skip
    note = cpu_note(settings)
    if note:
        print(note)
    rows = compare(names, settings, options.rounds)
    shared = rows[0]
    print(f"{shared['device']}, {shared['threads']} threads, load {shared['load']}, torch {shared['torch']}, "
          f"transformers {shared['transformers']}, commit {shared['commit']}")  # fmt: skip
    print(f"{settings.batch} x {settings.seq} tokens, {settings.rate:.0%} masked, {settings.precision}, "
          f"{options.rounds} rounds; median [quartiles]; tokens are original tokens")  # fmt: skip
    print(table(rows))
    if options.out:
        append_rows(options.out, rows)


if __name__ == "__main__":
    main()
