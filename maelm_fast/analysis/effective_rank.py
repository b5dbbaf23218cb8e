"""tau-effective rank of an encoder's token representations, layer by layer (the paper's section 2.2, Figures 1, 5, 6).

rank_tau(H) is the smallest k such that the k largest squared singular values of H, one row per token, hold a share tau
of their sum. H is not centred, as the paper writes it, and never held: see gram.py. What is fed to the encoder is said
in inputs.py; of a run, the mask rate and policy are its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from maelm_fast.analysis.inputs import Encode, from_encoder, gram_matrices
from maelm_fast.batch import PackedBatch
from maelm_fast.config import require
from maelm_fast.data.loader import validation_batches
from maelm_fast.data.token_store import TokenStore
from maelm_fast.data.tokenizer import tokenizer_hash
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker
from maelm_fast.training.files import write_json
from maelm_fast.training.gram import GramMatrix, rank_at
from maelm_fast.training.live import evaluating
from maelm_fast.training.rundir import LoadedRun

REPORT_FILE = "effective_rank.json"
LEADING_VALUES = 16  # singular values kept in a report, per input and layer
TAU = 0.9  # the paper's

SEES_MASK = {
    "with_mask": "with [MASK], as in pretraining",
    "without_mask": "without [MASK]: all tokens real",
    "mask_positions": "[MASK] positions alone",
    "real_positions": "real positions of the input with [MASK]",
}
REMOVES_MASK = {
    "visible": "visible tokens, as in pretraining",
    "without_mask": "all tokens real",
    "with_mask": "with [MASK] (never seen in pretraining)",
    "mask_positions": "[MASK] positions alone (never seen)",
    "real_positions": "real positions of the input with [MASK]",
}
SEES_SOME = SEES_MASK | {"with_mask": "with [MASK], all shown", "visible": "visible tokens, every [MASK] removed"}
SEES_RANDOM = {
    "visible": "random tokens in the place of masked ones, as in pretraining",
    "without_mask": "all tokens real",
}
"""The inputs that say something about an encoder pretrained with [MASK], one that never saw it (MAE-LM), one in between
(Fig. 4), and one that read random tokens instead (Table 2), and what they are."""

Watch = Callable[[Iterable[PackedBatch], int], Iterable[PackedBatch]]
"""(batches, how many) -> the batches again, with progress shown."""


@dataclass(frozen=True)
class InputRanks:
    """The ranks under one input. Layers: the embedding output, then every block's output."""

    name: str
    label: str
    tokens: int
    """Rows of H. No rank exceeds it."""
    ranks: list[list[int]]
    """For every tau of the report a list with a rank per layer."""
    singular_values: list[list[float]]
    """Per layer the largest ones, of unit sum of squares over all d: their squares are shares of the whole."""


@dataclass(frozen=True)
class RankReport:
    """Effective ranks of one encoder on one text. name: the run's preset, or the checkpoint's directory."""

    name: str
    step: int | None
    encoder_sees_mask: bool
    """Whether it read any [MASK] in pretraining."""
    hidden_size: int
    taus: list[float]
    centred: bool
    data: str
    samples: int
    mask_rate: float
    mask_policy: str
    inputs: list[InputRanks]

    def write(self, path: Path) -> None:
        write_reports(path, [self])

    @property
    def title(self) -> str:
        return self.name if self.step is None else f"{self.name}, step {self.step:,}"


def write_reports(path: Path, reports: Sequence[RankReport]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"reports": [dataclasses.asdict(report) for report in reports]})
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def effective_ranks(
    encode: Encode,
    batches: Iterable[PackedBatch],
    mask_id: int,
    labels: dict[str, str],
    taus: Sequence[float] = (TAU,),
    device: torch.device | str = "cpu",
) -> list[InputRanks]:
    """The tau-effective ranks of every layer of any encoder (inputs.py) under the inputs that `labels` names.

    batches: packed with encoder_sees_mask=True, also for a MAE-LM; what else the inputs need is worked out from them.
    For real tokens alone, of a downstream task say, {"without_mask": ...} needs no masks in the batches. Dropout is
    the caller's to switch off (training.live.evaluating)."""
    check_taus(taus)
    grams = gram_matrices(encode, batches, mask_id, tuple(labels), device)
    return [_input_ranks(name, label, grams[name], taus) for name, label in labels.items()]


def check_taus(taus: Sequence[float]) -> None:
    for tau in taus:
        require(0.0 < tau <= 1.0, f"tau must lie above 0 and at most at 1, not {tau}")


def _input_ranks(name: str, label: str, grams: list[GramMatrix], taus: Sequence[float]) -> InputRanks:
    spectra = [gram.squared_singular_values() for gram in grams]
    leading = [
        [float(f"{v:.6g}") for v in (s / s.sum().clamp_min(torch.finfo(s.dtype).tiny)).sqrt()[:LEADING_VALUES].tolist()]
        for s in spectra
    ]
    return InputRanks(name, label, grams[0].tokens, [[rank_at(s, tau) for s in spectra] for tau in taus], leading)


def run_batches(run: LoadedRun, store: TokenStore, samples: int | None, watch: Watch | None) -> Iterable[PackedBatch]:
    """That many samples (runtime.eval_samples if None) of a validation split, drawn as for the run's evaluations, with
    the run's masks, all of them shown.

    Raises UserError if the store was tokenised by another tokenizer than the run's or holds longer sequences than the
    model takes."""
    config, manifest = run.config, store.manifest
    samples = config.runtime.eval_samples if samples is None else samples
    require(samples > 0, f"samples must be positive, not {samples}")
    require(
        manifest.tokenizer_sha256 == tokenizer_hash(run.tokenizer),
        f"{store.path} was made with another tokenizer than the run's: name a store made with the run's tokenizer",
    )
    require(
        manifest.seq_len <= config.model.max_positions,
        f"{store.path} holds sequences of {manifest.seq_len} tokens, the model takes at most "
        f"{config.model.max_positions}: prepare the text again with shorter ones",
    )
    samples, size = min(samples, len(store)), config.runtime.sequences_at_once
    masker = Masker(config.masking.final, run.vocabulary, config.seed, encoder_sees_mask=True)
    batches: Iterable[PackedBatch] = validation_batches(store, masker, size, samples)
    return batches if watch is None else watch(batches, -(-samples // size))


def saw_mask(run: LoadedRun) -> bool:
    """Whether the encoder read any [MASK] in pretraining."""
    masking = run.config.masking
    return masking.policy != "random" and (run.model.encoder_sees_mask or masking.shown > 0.0)


def _labels(run: LoadedRun) -> dict[str, str]:
    if run.config.masking.policy == "random":
        return SEES_RANDOM
    if not saw_mask(run):
        return REMOVES_MASK
    return SEES_MASK if run.model.encoder_sees_mask else SEES_SOME


def measure(
    run: LoadedRun,
    store: TokenStore,
    taus: Sequence[float] = (TAU,),
    samples: int | None = None,
    watch: Watch | None = None,
) -> RankReport:
    """Effective ranks of a run on a validation split. Runs where the model is; raises UserError as `run_batches`."""
    check_taus(taus)
    config, model = run.config, run.model
    batches = run_batches(run, store, samples, watch)
    with evaluating(model):
        inputs = effective_ranks(
            from_encoder(model.encoder), batches, model.mask_id, _labels(run), taus, model.encoder.token_table.device
        )
    return RankReport(
        name=run.record.preset,
        step=run.step,
        encoder_sees_mask=saw_mask(run),
        hidden_size=config.model.hidden_size,
        taus=list(taus),
        centred=False,
        data=str(store.path),
        samples=min(config.runtime.eval_samples if samples is None else samples, len(store)),
        mask_rate=config.masking.final.rate,
        mask_policy=config.masking.policy,
        inputs=inputs,
    )
