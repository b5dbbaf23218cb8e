"""What a plan costs before it runs: tokens and FLOPs, counted, and time, estimated from a rate.

What is looked at on the way (evaluations, ranks: a percent or so of pretraining) is left out. Of downstream work the
tokens are estimated too, from the bytes of the texts, so its cost is a rough one.
The rate is measured on this machine by a few steps of the model on random tokens. For a scale meant for a GPU, on a
machine without one, it is an assumed share of a GPU's peak: a projection, named so wherever it is shown.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import numpy as np
import torch

from maelm_fast import presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import RunConfig
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.flops import PEAK_BF16, training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.paper.downstream import Prompting, Unit
from maelm_fast.paper.plan import Cell, Plan
from maelm_fast.paper.scales import Scale
from maelm_fast.training.hardware import choose_device, choose_precision, device_name, is_out_of_memory
from maelm_fast.training.optim import build_optimizer
from maelm_fast.training.step import TrainStep

ASSUMED_GPU, ASSUMED_SHARE = "NVIDIA H100", 0.4
_BYTES_PER_TOKEN = 4.0  # of downstream text
_SPECIAL_TOKENS = 4  # of a pair
_FEW_TOKENS = 4096  # of a calibrating micro-batch at most, on a CPU; a GPU would idle
_SECONDS, _STEPS = 2.0, 3  # of a calibration, at least


class Cost(NamedTuple):
    """tokens: original tokens trained on. disk: bytes of checkpoints kept."""

    tokens: float
    flops: float
    disk: float = 0.0


def cost(cell: Cell, steps_done: int = 0) -> Cost:
    """Of pretraining on full sequences. steps_done: what is left after so many."""
    config, length = cell.config, cell.corpus.seq_len
    with torch.device("meta"):
        model = MaeLm(config.model)
    batch = _random_batch(config, model, 1, length)
    steps = config.optim.max_steps - steps_done
    trained = steps * config.optim.batch_size
    parameters = sum(p.numel() for p in model.parameters())
    disk = -(-steps // config.runtime.save_every) * parameters * 12  # AdamW's averages too
    return Cost(trained * length, trained * training_flops(config.model, *batch.lengths), disk)


def mean_tokens(data: TaskData) -> float:
    """Of an example, special ones included, by the bytes of its texts."""
    texts = [text for split in data.splits.values() for column in split.texts for text in column]
    size = sum(len(text.encode()) for text in texts) / sum(map(len, data.splits.values()))
    return size / _BYTES_PER_TOKEN + _SPECIAL_TOKENS


def unit_cost(unit: Unit, cell: Cell, data: TaskData, tokens: float) -> Cost:
    """Of the encoder in one fine-tuning or prompting, as if every example had so many tokens, or as many as fit."""
    model = presets.as_roberta(cell.config).model
    tested = sum(map(len, data.validation.values()))
    if isinstance(unit, Prompting):
        few, length = unit.few, min(tokens, model.max_positions)
        trained = 0 if unit.mode == "zero-shot" else few.steps * sum(few.batch_sizes) * len(few.lrs)
    else:
        config, length = unit.config, min(tokens, unit.config.max_length, model.max_positions)
        trained, tested = config.epochs * len(data.train), config.epochs * config.evaluations_per_epoch * tested
    forward = training_flops(model, [round(length)], [round(length)], [1]) / 3
    return Cost(trained * length, (3 * trained + tested) * forward)


def rate_for(plan: Plan) -> tuple[float, str]:
    """(FLOP/s, where it is from, in words): measured here, if the plan's scale is meant for a machine such as this;
    assumed otherwise."""
    if needs_gpu_missing_here(plan.scale):
        share = f"{ASSUMED_SHARE:.0%} of the bf16 peak of one {ASSUMED_GPU}"
        return ASSUMED_SHARE * PEAK_BF16[ASSUMED_GPU], f"a projection: {share} is assumed, nothing was measured"
    config = plan.cells[0].config
    device = choose_device(config.runtime)
    try:
        rate = measured_rate(config)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{device_name(device)} has too little memory for the micro-batches of scale {plan.scale.name}: take a "
            "smaller --scale"
        ) from None
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return rate, f"measured just now on {device_name(device)}{threads}: {rate / 1e9:,.0f} GFLOP/s"


def needs_gpu_missing_here(scale: Scale) -> bool:
    return scale.gpu and not torch.cuda.is_available()


def measured_rate(config: RunConfig) -> float:
    """FLOP/s of a few steps on random tokens: the median, after one that is not counted."""
    device, length = choose_device(config.runtime), config.model.max_positions
    precision, size = choose_precision(config.runtime, device), config.runtime.sequences_at_once
    if device.type == "cpu":
        size = max(1, min(size, _FEW_TOKENS // length))
    with torch.random.fork_rng(devices=[]):
        model = MaeLm(config.model).to(device)
    step = TrainStep(model, build_optimizer(model, config.optim, precision), config.optim.clip_norm, precision)
    batch = _random_batch(config, model, size, length).to(device)
    seconds: list[float] = []
    while len(seconds) <= _STEPS or sum(seconds) < _SECONDS:
        start = time.perf_counter()
        step([batch], torch.zeros(1, dtype=torch.int64, device=device), 0.0).cpu()  # which waits for a GPU
        seconds.append(time.perf_counter() - start)
    return training_flops(config.model, *batch.lengths) / statistics.median(seconds[1:])


def _random_batch(config: RunConfig, model: MaeLm, size: int, length: int) -> PackedBatch:
    vocabulary = Vocabulary(config.model.vocab_size, config.model.vocab_size - 1, (config.model.vocab_size - 1,))
    rows = list(np.random.default_rng(0).integers(0, config.model.vocab_size - 1, (size, length)).astype(np.int32))
    samples = np.arange(size)
    masker = Masker(config.masking.final, vocabulary, 0, model.encoder_sees_mask)
    return pack(rows, samples, np.zeros_like(samples), masker)
