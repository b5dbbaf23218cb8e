"""tau-effective rank of the encoder's token representations, layer by layer (the paper's section 2.2, Figures 1 and 5).

rank_tau(H) is the smallest k such that the k largest squared singular values of H, one row per token, hold a share tau
of their sum. H is not centred, as the paper writes it. The squared singular values are the eigenvalues of the Gram
matrix H^T H, summed over batches in float64, so that H itself (millions of tokens) is never held.

The inputs are those of the paper, on the same sequences with the same masks; the mask rate is the run's own:

    with_mask       the full sequence, masked tokens shown as [MASK]; every position counts
    without_mask    the original sequence, real tokens only
    mask_positions  the [MASK] positions of with_mask alone
    visible         masked tokens removed, as a MAE-LM encoder is pretrained (MAE-LM only)

Shapes: T tokens, d dimensions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from maelm_fast.batch import Layout, PackedBatch, layout_of
from maelm_fast.config import require
from maelm_fast.data.loader import validation_batches
from maelm_fast.data.token_store import TokenStore
from maelm_fast.data.tokenizer import tokenizer_hash
from maelm_fast.errors import UserError
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.files import write_json
from maelm_fast.training.rundir import LoadedRun

REPORT_FILE = "effective_rank.json"
INPUTS = ("with_mask", "without_mask", "mask_positions", "visible")
LEADING_VALUES = 16  # singular values kept in a report, per input and layer


@dataclass(frozen=True)
class InputRanks:
    """The ranks under one input. Lists have an entry per layer: the embedding output, then every block's output."""

    name: str
    label: str
    tokens: int
    """Rows of H. No rank exceeds it."""
    ranks: list[int]
    singular_values: list[list[float]]
    """The largest ones, of unit sum of squares over all d: their squares are shares of the whole."""


@dataclass(frozen=True)
class RankReport:
    """Effective ranks of one checkpoint on its validation split."""

    preset: str
    step: int
    hidden_size: int
    tau: float
    centred: bool
    data: str
    samples: int
    mask_rate: float
    mask_policy: str
    inputs: list[InputRanks]

    def write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, dataclasses.asdict(self))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> RankReport:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**data, "inputs": [InputRanks(**entry) for entry in data["inputs"]]})
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(f"{path} is not a report of effective ranks: write one with 'maelm-fast rank'") from None


class GramMatrix:
    """H^T H in float64, rows of H added a batch at a time."""

    def __init__(self, dimensions: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self.matrix = torch.zeros(dimensions, dimensions, dtype=torch.float64, device=device)

    def add(self, hidden: Tensor) -> None:
        """hidden: (T, d)."""
        wide = hidden.to(torch.float64)
        self.matrix.addmm_(wide.T, wide)
        self.tokens += hidden.shape[0]

    def squared_singular_values(self) -> Tensor:
        """(d,) float64 on the CPU, descending. Those within rounding error of zero, negative ones too, are zero."""
        values = torch.linalg.eigvalsh(self.matrix.cpu()).flip(0)
        return torch.where(values > values[0] * _rounding(len(values)), values, 0.0)


def rank_at(squared: Tensor, tau: float) -> int:
    """The smallest k such that the k largest of the squared singular values, (d,) descending, hold a share tau.

    tau lies in (0, 1]; 1 gives the numerical rank. A share that misses tau by rounding alone counts as reaching it. A
    matrix of zeros has rank 0."""
    require(0.0 < tau <= 1.0, f"tau must lie above 0 and at most at 1, not {tau}")
    held = squared.to(torch.float64).cumsum(0)
    if held[-1] <= 0:
        return 0
    return int((held < held[-1] * (tau - _rounding(len(held)))).sum()) + 1


def _rounding(dimensions: int) -> float:
    return dimensions * torch.finfo(torch.float64).eps


class _Input(NamedTuple):
    """One forward pass of the encoder. counted: input name to the rows (T,) that count, None being all of them."""

    ids: Tensor
    layout: Layout
    counted: dict[str, Tensor | None]


def encoder_inputs(batch: PackedBatch, mask_id: int, removes_mask: bool) -> list[_Input]:
    """The passes for one batch with [MASK] in the encoder's row. removes_mask: whether the model is a MAE-LM."""
    if batch.lengths != batch.decoder_lengths:
        raise UserError("effective ranks need batches packed with encoder_sees_mask=True, whatever the model")
    shown, layout = batch.visible_ids, batch.visible
    is_mask = shown == mask_id
    original = shown.index_copy(0, batch.masked_index.long(), batch.labels)
    inputs = [
        _Input(shown, layout, {"with_mask": None, "mask_positions": is_mask}),
        _Input(original, layout, {"without_mask": None}),
    ]
    if removes_mask:
        kept = [int((~part).sum()) for part in is_mask.split(batch.lengths)]
        visible = layout_of(kept, layout.positions[~is_mask]).to(shown.device)
        inputs.append(_Input(shown[~is_mask], visible, {"visible": None}))
    return inputs


@torch.no_grad()
def effective_ranks(model: MaeLm, batches: Iterable[PackedBatch], tau: float = 0.9) -> list[InputRanks]:
    """The tau-effective rank of every layer under every input (see the top of this file).

    batches: packed with encoder_sees_mask=True, also for a MAE-LM; what else the inputs need is worked out from them.
    Runs where the model is, in the model's precision, in evaluation mode."""
    require(0.0 < tau <= 1.0, f"tau must lie above 0 and at most at 1, not {tau}")
    device = model.encoder.token_table.device
    dimensions, depth = model.config.hidden_size, model.config.num_layers + 1
    labels = _labels(model.encoder_sees_mask)
    grams = {name: [GramMatrix(dimensions, device) for _ in range(depth)] for name in labels}
    was_training = model.training
    model.eval()
    for batch in batches:
        for ids, layout, counted in encoder_inputs(batch.to(device), model.mask_id, not model.encoder_sees_mask):
            layers: list[Tensor] = []
            model.encoder(ids, layout, layers=layers)
            for name, rows in counted.items():
                for gram, hidden in zip(grams[name], layers, strict=True):
                    gram.add(hidden if rows is None else hidden[rows])
    model.train(was_training)
    return [_input_ranks(name, label, grams[name], tau) for name, label in labels.items()]


def _labels(encoder_sees_mask: bool) -> dict[str, str]:
    if encoder_sees_mask:
        return {
            "with_mask": "with [MASK], as in pretraining",
            "without_mask": "without [MASK]: all tokens real",
            "mask_positions": "[MASK] positions alone",
        }
    return {
        "visible": "visible tokens, as in pretraining",
        "without_mask": "all tokens real",
        "with_mask": "with [MASK] (never seen in pretraining)",
        "mask_positions": "[MASK] positions alone (never seen)",
    }


def _input_ranks(name: str, label: str, grams: list[GramMatrix], tau: float) -> InputRanks:
    spectra = [gram.squared_singular_values() for gram in grams]
    leading = [
        [float(f"{v:.6g}") for v in (s / s.sum().clamp_min(torch.finfo(s.dtype).tiny)).sqrt()[:LEADING_VALUES].tolist()]
        for s in spectra
    ]
    return InputRanks(name, label, grams[0].tokens, [rank_at(s, tau) for s in spectra], leading)


def measure(
    run: LoadedRun,
    store: TokenStore,
    tau: float = 0.9,
    samples: int | None = None,
    watch: Callable[[Iterable[PackedBatch], int], Iterable[PackedBatch]] | None = None,
) -> RankReport:
    """Effective ranks of a run on the first `samples` samples of a validation split (runtime.eval_samples if None).

    watch(batches, how many) may show progress; it gives the batches back. Raises UserError if the store was tokenised
    by another tokenizer than the run's or holds longer sequences than the model takes."""
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
    samples, size = min(samples, len(store)), config.runtime.micro_batch_size
    batches: Iterable[PackedBatch] = validation_batches(
        store, run.vocabulary, config.masking, config.seed, size, encoder_sees_mask=True, max_samples=samples
    )
    if watch is not None:
        batches = watch(batches, -(-samples // size))
    return RankReport(
        preset=run.record.preset,
        step=run.step,
        hidden_size=config.model.hidden_size,
        tau=tau,
        centred=False,
        data=str(store.path),
        samples=samples,
        mask_rate=config.masking.rate,
        mask_policy=config.masking.policy,
        inputs=effective_ranks(run.model, batches, tau),
    )
