"""SQuAD 2.0 as a problem for the loop: windows to train on, the loss over packed rows, the evaluation of all questions.

The answer of a question that has none, or none in the window, is [CLS]; it competes with the passage's tokens, question
and separators are out of the softmax (released code). Windows lie in a row without padding, so that the softmax is over
pieces of a row: for starts and for ends, one piece per window.

The paper does not say whether its SQuAD numbers use a threshold tuned on the development set. The task's metric is
best_f1, which does (as published searches of this model family choose checkpoints); f1, at the threshold 0, and both
exact matches stand beside it. The released code's fixed threshold is 1.

Shapes: S windows in a batch, T their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from maelm_fast.batch import Layout
from maelm_fast.encoders import TextEncoder, to_device
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.decoding import decode, error_examples, gold_texts
from maelm_fast.finetuning.examples import SpanExamples, TaskData
from maelm_fast.finetuning.heads import SpanModel
from maelm_fast.finetuning.problem import Evaluation, Problem, concatenated, predict, token_batch
from maelm_fast.finetuning.squad import squad_scores
from maelm_fast.finetuning.windows import Windows, cut_windows

THRESHOLD = 0.0
"""Of null odds, fixed: ours; "no answer" wins where it has the higher score."""


def span_loss(logits: Tensor, layout: Layout, legal: Tensor, targets: Tensor) -> Tensor:
    """Half the sum of the negative log-likelihoods of start and end, mean over the windows; 0-d fp32.

    Window by window it equals (F.cross_entropy(start, first) + F.cross_entropy(end, last)) / 2 on logits that are -inf
    where `legal` is not.

    logits: (T, 2) start and end. legal: (T,) bool. targets: (S, 2) int64, rows of the window that are legal.
    """
    bounds = layout.cu_seqlens.long()
    lengths = bounds.diff()
    window = torch.repeat_interleave(lengths, output_size=layout.num_tokens)  # (T,)
    logits = logits.float().masked_fill(~legal[:, None], float("-inf"))
    shape = (len(layout.lengths), 2)
    highest = logits.new_full(shape, float("-inf")).scatter_reduce(
        0, window[:, None].expand(-1, 2), logits.detach(), reduce="amax"
    )
    sums = logits.new_zeros(shape).index_add(0, window, (logits - highest[window]).exp())
    chosen = logits.gather(0, bounds[:-1, None] + targets)
    return (sums.log() + highest - chosen).mean()


class SpanProblem(Problem):
    """Questions about passages, of which some have no answer. Items are windows."""

    def __init__(self, data: TaskData, encoder: TextEncoder, config: FinetuneConfig) -> None:
        self.data, self.answer_length = data, config.answer_length
        size = min(config.max_length, encoder.max_length)
        stride = min(config.stride, max(size // 3, 1))  # ours, for small models: 128 fits windows of 384 and more

        def cut(examples: Any) -> Windows:
            assert isinstance(examples, SpanExamples)
            return cut_windows(examples, encoder.tokenizer, size, stride, config.question_length)

        self.train = cut(data.train)
        self.validation = {name: cut(split) for name, split in data.validation.items()}
        self.lengths: Sequence[int] = self.train.inputs.lengths
        self.validation_inputs = concatenated([windows.inputs for windows in self.validation.values()])
        self.truncation: dict[str, Any] = {
            "max_length": size,
            "stride": stride,
            **{name: windows.report() for name, windows in {"train": self.train, **self.validation}.items()},
        }

    def model(self, encoder: TextEncoder, config: FinetuneConfig) -> SpanModel:
        return SpanModel(encoder, config.seed)

    def loss(
        self, model: nn.Module, indices: NDArray[np.int64], device: torch.device, dropout_seed: Tensor | int | None
    ) -> Tensor:
        batch = token_batch(self.train.inputs, indices).to(device)
        legal = to_device(torch.from_numpy(legal_rows(self.train, indices)), device)
        targets = to_device(torch.from_numpy(self.train.targets[indices]), device)
        return span_loss(model(batch, dropout_seed), batch.layout, legal, targets)

    def evaluate(self, model: nn.Module, device: torch.device, precision: str) -> Evaluation:
        metrics, predictions, errors = {}, [], {}
        for split, windows in self.validation.items():
            examples = windows.examples
            logits = predict(model, windows.inputs, device, precision, each_token=True)
            decoded = decode(windows, logits, self.answer_length)
            texts = dict(zip(examples.ids, decoded.texts, strict=True))
            odds = dict(zip(examples.ids, decoded.null_odds.tolist(), strict=True))
            metrics[split] = squad_scores(texts, odds, examples, THRESHOLD)
            errors[split] = error_examples(examples, decoded, THRESHOLD)
            predictions += [
                {
                    "id": identity,
                    "split": split,
                    "label": gold_texts(examples, i),
                    "prediction": "" if odds[identity] > THRESHOLD else texts[identity],
                    "text": texts[identity],
                    "null_odds": odds[identity],
                }
                for i, identity in enumerate(examples.ids)
            ]
        return Evaluation(metrics, predictions, {"errors": errors})


def legal_rows(windows: Windows, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
    """(T,) whether a token of these windows may start or end an answer: [CLS], which is none, and the passage's."""
    lengths = np.array([len(windows.inputs.ids[i]) for i in indices])
    row = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    begin = np.repeat(windows.begin[indices], lengths)
    end = begin + np.repeat(windows.count[indices], lengths)
    legal: NDArray[np.bool_] = (row == 0) | ((row >= begin) & (row < end))
    return legal
