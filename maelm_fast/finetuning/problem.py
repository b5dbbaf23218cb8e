"""What the training loop needs of a task: items to train on, a loss, an evaluation. The loop (run.py) knows no more.

A problem belongs to a tokenizer, not to a model: seeds, learning rates and checkpoints of one encoder share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from maelm_fast.batch import layout_of
from maelm_fast.config import require
from maelm_fast.data.order import permutation
from maelm_fast.encoders import TextEncoder, TokenBatch, to_device
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import Examples, TaskData
from maelm_fast.finetuning.heads import SequenceModel
from maelm_fast.finetuning.metrics import confusion, evaluate
from maelm_fast.text import Inputs

EVALUATION_TOKENS = 16_384
"""Of a batch without gradients."""


@dataclass(frozen=True)
class Evaluation:
    """What a model does on all validation splits."""

    metrics: dict[str, dict[str, float]]
    """Split to metric to value, in percent."""
    predictions: list[dict[str, Any]]
    """A row per validation example: id, split, label, prediction, scores; SQuAD: text, null odds."""
    details: dict[str, Any] = field(default_factory=dict)
    """Confusion matrices by split, or SQuAD's examples of errors."""


class Problem(Protocol):
    """A tokenised task. `loss` is called inside the loop's autocast; `evaluate` makes its own (`autocast`), and leaves
    the model in evaluation mode."""

    data: TaskData
    lengths: Sequence[int]
    """Tokens of each training item: an example, or a window of a passage."""
    validation_inputs: Inputs
    """All validation items as tokens: what effective ranks are measured on."""
    truncation: dict[str, Any]
    """What was cut, for the report."""

    @property
    def train_size(self) -> int:
        return len(self.lengths)

    def model(self, encoder: TextEncoder, config: FinetuneConfig) -> nn.Module:
        """The encoder, as module `encoder`, with a new head, which config.seed initialises."""

    def loss(
        self, model: nn.Module, indices: NDArray[np.int64], device: torch.device, dropout_seed: Tensor | int | None
    ) -> Tensor:
        """Mean over these training items, fp32, 0-d on the device."""

    def evaluate(self, model: nn.Module, device: torch.device, precision: str) -> Evaluation: ...


class SentenceProblem(Problem):
    """Classification or regression of a text or a pair, from the first token's vector. Classification: cross-entropy;
    regression: squared error of scores scaled to 0..1 (both as released)."""

    def __init__(self, data: TaskData, encoder: TextEncoder, config: FinetuneConfig) -> None:
        self.data, self.task = data, data.task
        longest = min(config.max_length, encoder.max_length)
        assert isinstance(data.train, Examples)

        def encode(examples: Any) -> Inputs:
            return encoder.tokenizer.encode(examples.texts, longest)

        self.train = encode(data.train)
        self.validation = {name: encode(split) for name, split in data.validation.items()}
        self.lengths: Sequence[int] = self.train.lengths
        self.validation_inputs = concatenated(list(self.validation.values()))
        labels = data.train.labels
        self.targets = torch.from_numpy(self.task.scale(labels) if self.task.kind == "regression" else labels)
        parts = {"train": self.train, **self.validation}
        self.truncation = {"max_length": longest, **{name: part.truncation for name, part in parts.items()}}

    def model(self, encoder: TextEncoder, config: FinetuneConfig) -> SequenceModel:
        return SequenceModel(encoder, self.task.outputs, config.dropout, config.seed)

    def loss(
        self, model: nn.Module, indices: NDArray[np.int64], device: torch.device, dropout_seed: Tensor | int | None
    ) -> Tensor:
        batch = token_batch(self.train, indices).to(device)
        targets = to_device(self.targets[torch.from_numpy(indices)], device)
        logits = model(batch, dropout_seed).float()
        if self.task.kind == "regression":
            return F.mse_loss(logits.squeeze(-1), targets)
        return F.cross_entropy(logits, targets)

    def evaluate(self, model: nn.Module, device: torch.device, precision: str) -> Evaluation:
        metrics: dict[str, dict[str, float]] = {}
        predictions: list[dict[str, Any]] = []
        matrices: dict[str, list[list[int]]] = {}
        for split, inputs in self.validation.items():
            examples = self.data.validation[split]
            assert isinstance(examples, Examples)
            logits = predict(model, inputs, device, precision)
            if self.task.kind == "regression":
                found: NDArray = self.task.unscale(logits[:, 0])
                rows: list[dict[str, Any]] = [
                    {"label": float(label), "prediction": float(value)}
                    for label, value in zip(examples.labels, found, strict=True)
                ]
            else:
                found, names = logits.argmax(-1), self.task.labels
                scores = torch.from_numpy(logits).softmax(-1).tolist()
                rows = [
                    {"label": names[label], "prediction": names[value], "scores": dict(zip(names, row, strict=True))}
                    for label, value, row in zip(examples.labels, found, scores, strict=True)
                ]
                matrices[split] = confusion(self.task, found, examples.labels).tolist()
            metrics[split] = evaluate(self.task, found, examples.labels)
            predictions += [{"id": i, "split": split, **row} for i, row in zip(examples.ids, rows, strict=True)]
        return Evaluation(metrics, predictions, {"confusion": matrices} if matrices else {})


def concatenated(parts: Sequence[Inputs]) -> Inputs:
    """Inputs of several splits, one after another."""
    types = [t for part in parts for t in part.token_types or []]
    return Inputs(
        [ids for part in parts for ids in part.ids],
        types or None,
        sum(part.cut for part in parts),
        sum(part.cut_tokens for part in parts),
        max(part.longest for part in parts),
    )


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@torch.no_grad()
def predict(
    model: nn.Module, inputs: Inputs, device: torch.device, precision: str, each_token: bool = False
) -> NDArray[np.float32]:
    """fp32 logits in the order of the inputs: (n, outputs), or (T, 2) of all their tokens. The model is left in
    evaluation mode. Raises UserError if they are not finite."""
    model.eval()
    require(len(inputs) > 0, "there is nothing to predict: not one input")
    rows = np.array(inputs.lengths if each_token else [1] * len(inputs))
    begins = np.cumsum(rows) - rows
    order, parts = [], []
    for indices in evaluation_batches(inputs.lengths, EVALUATION_TOKENS):
        with autocast(device, precision):
            parts.append(model(token_batch(inputs, indices).to(device)).float())
        order += [np.arange(begins[i], begins[i] + rows[i]) for i in indices]
    found = torch.cat(parts).cpu().numpy()
    logits = np.empty_like(found)
    logits[np.concatenate(order)] = found
    finite = bool(np.isfinite(logits).all())
    require(finite, "the model's outputs are not finite: try a lower --lr, or --precision fp32")
    return logits


def token_batch(inputs: Inputs, indices: Sequence[int] | NDArray[Any]) -> TokenBatch:
    """The inputs at `indices`, in that order, on the CPU."""
    chosen = [inputs.ids[i] for i in indices]
    ids = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int32)
    types = None
    if inputs.token_types is not None:
        types = torch.from_numpy(np.concatenate([inputs.token_types[i] for i in indices]))
    return TokenBatch(torch.from_numpy(ids), layout_of([len(part) for part in chosen]), types)


def update_order(n: int, batch_size: int, seed: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Indices of the examples of each step of an epoch: every example once, the last step possibly a smaller one
    (released code)."""
    for start in range(0, n, batch_size):
        yield permutation(np.arange(start, min(start + batch_size, n)), n, seed, epoch)


def evaluation_batches(lengths: Sequence[int], tokens: int) -> list[NDArray[np.int64]]:
    """Indices of inputs that are evaluated together, int64: of like length, longest first, so that a batch that is too
    large for the memory is the first. Padded to their longest they have at most `tokens` tokens, and no fewer than one
    input."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches, start = [], 0
    while start < len(order):
        count = max(1, tokens // max(1, lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches
