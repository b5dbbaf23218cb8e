"""What a plan costs before it runs: tokens and FLOPs, counted, and time, estimated from a rate.

Of downstream work the tokens are estimated too, from the bytes of the texts, so its cost is a rough one.
The rate is measured on this machine by a few steps of the model on random tokens. For a scale meant for a GPU, on a
machine without one, it is an assumed share of a GPU's peak: a projection, named so wherever it is shown.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from maelm_fast import presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import ModelConfig, RunConfig
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.flops import PEAK_BF16, training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.paper.downstream import Prompting, Size, Unit
from maelm_fast.paper.plan import Cell, Plan
from maelm_fast.paper.scales import Scale
from maelm_fast.training.hardware import choose_device, choose_precision, device_name, is_out_of_memory
from maelm_fast.training.optim import build_optimizer

ASSUMED_GPU, ASSUMED_SHARE = "NVIDIA H100", 0.4
ASSUMED_BYTES_PER_TOKEN = 4.0  # of downstream text, before there is a vocabulary
_SPECIAL_TOKENS = 4  # of a pair
_FEW_TOKENS = 4096  # of a calibrating micro-batch at most, on a CPU; a GPU would idle
_SECONDS, _STEPS = 2.0, 3  # of a calibration, at least


@dataclass(frozen=True)
class Cost:
    """Of one cell, or the sum of several. tokens: original tokens trained on. flops: of training, evaluating and
    measuring ranks. disk: bytes of checkpoints kept."""

    tokens: float = 0
    flops: float = 0
    disk: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.flops + other.flops, self.disk + other.disk)


@dataclass(frozen=True)
class Rate:
    """FLOP/s, by the setting's name, and where they are from, in words."""

    flops_per_s: dict[str, float]
    source: str


def cost(cell: Cell, mean_length: float | None = None, steps_done: int = 0) -> Cost:
    """Of pretraining and the effective ranks. mean_length: tokens of a training sample on average (None: full
    sequences). steps_done: what is left after so many."""
    config, length = cell.config, round(mean_length or cell.corpus.seq_len)
    with torch.device("meta"):
        model = MaeLm(config.model)
    batch = _random_batch(config, model, 1, length)
    per_sample = training_flops(config.model, *batch.lengths)
    optim, runtime, m = config.optim, config.runtime, config.model
    steps = optim.max_steps - steps_done
    trained = steps * optim.batch_size
    evaluated = -(-steps // runtime.eval_every) * runtime.eval_samples
    gram = 2 * length * m.hidden_size**2 * (m.num_layers + 1)
    ranks = len(cell.rank_steps) * cell.rank_samples * 3 * (per_sample / 3 + gram)  # three inputs to the encoder
    parameters = sum(p.numel() for p in model.parameters())
    saved = -(-steps // runtime.save_every)
    return Cost(trained * length, trained * per_sample + evaluated * per_sample / 3 + ranks, saved * parameters * 12)


def unit_cost(unit: Unit, cell: Cell, size: Size, bytes_per_token: float = ASSUMED_BYTES_PER_TOKEN) -> Cost:
    """Of one fine-tuning or prompting, as if every example had the task's mean length."""
    model = cell.config.model
    length = size.text_bytes / bytes_per_token + _SPECIAL_TOKENS
    if isinstance(unit, Prompting):
        length = min(length, model.max_positions)
        forward = _forward(model if unit.mode != "head" else _encoder(cell.config), round(length))
        few = unit.few
        trained = 0 if unit.mode == "zero-shot" else few.steps * sum(few.batch_sizes) * len(few.lrs)
        return Cost(trained * length, (3 * trained + size.validation) * forward)
    config = unit.config
    limit = min(config.max_length, model.max_positions)
    windows = 1 + max(0, math.ceil((length - limit) / config.stride)) if unit.task == "squad_v2" else 1
    length = min(length, limit)
    forward = windows * _forward(_encoder(cell.config), round(length))
    trained = config.epochs * size.train
    looked_at = config.epochs * config.evaluations_per_epoch * size.validation
    return Cost(trained * windows * length, (3 * trained + looked_at) * forward)


def _encoder(config: RunConfig) -> ModelConfig:
    """The model without its decoder."""
    return presets.as_roberta(config).model


def _forward(model: ModelConfig, length: int) -> float:
    """FLOPs of one sequence of which one token is predicted: as a class, or as a word."""
    visible = length if model.decoder == "none" else length - 1
    return training_flops(model, [visible], [length], [1]) / 3


def rate_for(plan: Plan) -> Rate:
    """Measured here, if the plan's scale is meant for a machine such as this; assumed otherwise."""
    settings = {cell.row.setting: cell.config for cell in plan.cells}
    if needs_gpu_missing_here(plan.scale):
        peak = PEAK_BF16[ASSUMED_GPU]
        source = (
            f"a projection: {ASSUMED_SHARE:.0%} of the bf16 peak of one {ASSUMED_GPU} is assumed, nothing was measured"
        )
        return Rate(dict.fromkeys(settings, ASSUMED_SHARE * peak), source)
    first = next(iter(settings.values()))
    device = choose_device(first.runtime)
    try:
        rates = {name: measured_rate(config) for name, config in settings.items()}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{device_name(device)} has too little memory for the micro-batches of scale {plan.scale.name}: take a "
            "smaller --scale"
        ) from None
    shown = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.items())
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return Rate(rates, f"measured just now on {device_name(device)}{threads}: {shown}")


def needs_gpu_missing_here(scale: Scale) -> bool:
    return scale.gpu and not torch.cuda.is_available()


def measured_rate(config: RunConfig) -> float:
    """FLOP/s of a few steps on random tokens: the median, after one that is not counted."""
    device = choose_device(config.runtime)
    bf16 = choose_precision(config.runtime, device) == "bf16"
    length = config.model.max_positions
    size = config.runtime.sequences_at_once
    if device.type == "cpu":
        size = max(1, min(size, _FEW_TOKENS // length))
    with torch.random.fork_rng(devices=[]):
        model = MaeLm(config.model).to(device)
    optimizer = build_optimizer(model, config.optim, "bf16" if bf16 else "fp32")
    batch = _random_batch(config, model, size, length).to(device)
    flops = training_flops(config.model, *batch.lengths)
    seconds: list[float] = []
    while len(seconds) <= _STEPS or sum(seconds) < _SECONDS:
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            loss, _ = model(batch, dropout_seed=len(seconds))
        (loss / batch.counts.masked).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return flops / statistics.median(seconds[1:])


def _random_batch(config: RunConfig, model: MaeLm, size: int, length: int) -> PackedBatch:
    vocabulary = Vocabulary(config.model.vocab_size, config.model.vocab_size - 1, (config.model.vocab_size - 1,))
    rows = list(np.random.default_rng(0).integers(0, config.model.vocab_size - 1, (size, length)).astype(np.int32))
    samples = np.arange(size)
    masker = Masker(config.masking.final, vocabulary, 0, model.encoder_sees_mask)
    return pack(rows, samples, np.zeros_like(samples), masker)
