"""How large the experiments are made: four scales, each a model and a corpus for every setting of the paper it runs.

Decoders have two layers at least, so that half of them (Table 2's two of four) is a smaller decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from maelm_fast import presets
from maelm_fast.config import RunConfig
from maelm_fast.errors import unknown
from maelm_fast.finetuning.tasks import Task
from maelm_fast.paper import grids
from maelm_fast.paper.grids import Grid, Values
from maelm_fast.paper.prompting.fewshot import GRID_BATCH_SIZES, GRID_LRS, SPLIT_SEEDS, FewShotConfig

_SHORT: Values = {"max_length": (128,)}  # tokens; a model with fewer positions takes fewer


@dataclass(frozen=True)
class Corpus:
    """What a token store must be made like, if it is not given."""

    vocab_size: int
    seq_len: int
    cased: bool = False
    validation: float = 0.01

    @property
    def name(self) -> str:
        return f"{'cased' if self.cased else 'uncased'}-{self.vocab_size}-{self.seq_len}"


@dataclass(frozen=True)
class Setting:
    """MAE-LM in one of the paper's settings at this scale."""

    config: RunConfig
    corpus: Corpus
    grid: Grid
    """Of fine-tuning. A grid of several cells for a task is searched, and the best cell reported."""


@dataclass(frozen=True)
class Downstream:
    """How much of the downstream tasks a scale does."""

    seeds: int
    """Of fine-tuning, for each pretrained model."""
    train_limit: int | None = None
    """Training examples of a task at most, a fixed pseudo-random subset; of SQuAD, whose inputs are long, half as
    many."""
    validation_limit: int | None = None
    """Likewise of each validation split."""
    few: FewShotConfig = field(default_factory=FewShotConfig)
    """Of few-shot prompting; the default is Gao et al.'s."""
    draws: int = len(SPLIT_SEEDS)
    """Of few-shot examples."""

    def limits(self, task: Task) -> tuple[int | None, int | None]:
        """Training examples, and examples of each validation split."""
        train, validation = self.train_limit, self.validation_limit
        share = 2 if task.kind == "spans" else 1
        return train and train // share, validation and validation // share


@dataclass(frozen=True)
class Scale:
    name: str
    about: str
    settings: dict[str, Setting]
    """By the paper's name of the setting. Rows of settings that are not here are left out, and the report says so."""
    checkpoints: int
    """A run is evaluated and saved so many times, evenly spaced, and every checkpoint is kept."""
    rank_samples: int
    """Validation samples that effective ranks are measured on."""
    downstream: Downstream
    text: str | None = None
    """The text taken when none is given."""
    gpu: bool = False
    """Whether its time is planned for a GPU where this machine has none; it is then run only when told to."""
    meaningless: bool = False


def _scale(name: str, about: str, base: RunConfig, grid: Grid, share: float = 0.01, **more: Any) -> Scale:
    """base and large++, which has twice the layers, on one corpus. share: of it that is for validation."""
    large = presets.change(base, model={"num_layers": 2 * base.model.num_layers})
    corpus = Corpus(base.model.vocab_size, base.model.max_positions, validation=share)
    settings = {"base": Setting(base, corpus, grid), "large++": Setting(large, corpus, grid)}
    return Scale(name, about, settings, **more)


def smoke() -> Scale:
    base = presets.change(
        presets.get("tiny"),
        model={"max_positions": 64, "hidden_size": 96, "num_heads": 3, "ffn_size": 384, "decoder_layers": 2},
        optim={"batch_size": 16, "max_steps": 60, "warmup_steps": 10},
        runtime={"micro_batch_size": 16, "eval_samples": 64},
    )
    common = {"lr": (1e-3,), "epochs": (1,), "batch_size": (16,), "evaluations_per_epoch": (1,), **_SHORT}
    grid = Grid("smoke", "one epoch", common, {"squad": {"question_length": (24,), "stride": (32,)}})
    few = FewShotConfig(shots=2, steps=4, evaluate_every=2)
    return _scale(
        *("smoke", "minutes on two CPU cores, to see that everything works", base, grid, 0.02),
        checkpoints=3,
        rank_samples=64,
        downstream=Downstream(seeds=1, train_limit=128, validation_limit=48, few=few, draws=2),
        text="embedded",
        meaningless=True,
    )


def cpu() -> Scale:
    base = presets.change(
        presets.get("tiny"),
        model={"vocab_size": 4096, "num_layers": 4, "decoder_layers": 2},
        optim={"batch_size": 64, "max_steps": 12_208, "warmup_steps": 600},
        runtime={"micro_batch_size": 32, "log_every": 50, "eval_samples": 2048},
    )
    grid = Grid(
        "cpu",
        "one cell, its learning rate the better of 3e-4 and 1e-3 for MLM, halfway through pretraining",
        {"lr": (1e-3,), "epochs": (3,), "batch_size": (32,), "evaluations_per_epoch": (1,), **_SHORT},
        {"small": {"epochs": (5,)}, "squad": {"epochs": (2,), "question_length": (32,), "stride": (64,)}},
    )
    return _scale(
        *("cpu", "100 million tokens a run on a few CPU cores", base, grid),
        checkpoints=8,
        rank_samples=2048,
        downstream=Downstream(seeds=3, train_limit=8192, validation_limit=2048, few=FewShotConfig(lrs=(1e-4,))),
    )


def gpu() -> Scale:
    squad: Values = {"question_length": (32,), "stride": (64,)}
    grid = Grid(
        "gpu",
        "one cell of the paper's grids, at their largest learning rate, the model being smaller than the paper's",
        {"lr": (5e-5,), "epochs": (3,), "batch_size": (32,), **_SHORT},
        {"small": {"epochs": (10,), "batch_size": (16,)}, "large": {"lr": (4e-5,)}, "squad": squad},
    )
    return _scale(
        *("gpu", "655 million tokens a run on one GPU", presets.get("small"), grid),
        checkpoints=10,
        rank_samples=8192,
        downstream=Downstream(seeds=5, few=FewShotConfig(lrs=(5e-5,))),
        gpu=True,
    )


def full() -> Scale:
    cased = Corpus(64_000, 512, cased=True)
    base, large = grids.get("paper-base"), grids.get("paper-large")
    settings = {
        "base": Setting(presets.get("base"), Corpus(32_768, 512), base),
        "base++": Setting(presets.get("base++"), cased, base),
        "large++": Setting(presets.get("large++"), cased, large),
    }
    return Scale(
        *("full", "the paper's models, updates and batches", settings),
        checkpoints=25,
        rank_samples=10_000,  # 5 million tokens, as the paper's
        downstream=Downstream(seeds=5, few=FewShotConfig(lrs=GRID_LRS, batch_sizes=GRID_BATCH_SIZES)),
        gpu=True,
    )


SCALES: dict[str, Callable[[], Scale]] = {"smoke": smoke, "cpu": cpu, "gpu": gpu, "full": full}


def get(name: str) -> Scale:
    """The scale of that name, or UserError listing the names there are."""
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    return SCALES[name]()
