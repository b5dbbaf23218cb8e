"""A task asked as a cloze: the prompts, a model that scores the label words, and training it like any other problem.

Classification: softmax over the label words' scores, cross-entropy. Regression (STS-B): of the two poles' label words,
the probability of the high one's says where in its range the score lies; the loss is the KL divergence from the true
mixture of the two to it (both Gao et al. 2021).

Shapes: S prompts, K label words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from maelm_fast.encoders import TextEncoder, TokenBatch, to_device
from maelm_fast.finetuning.config import FinetuneConfig
from maelm_fast.finetuning.examples import TaskData
from maelm_fast.finetuning.problem import SentenceProblem, token_batch
from maelm_fast.paper.prompting.templates import Prompts, Template, label_ids


class ClozeModel(nn.Module):
    """A masked language model that answers in label words only. Nothing in it is new: no parameter is added."""

    label_ids: Tensor

    def __init__(self, encoder: TextEncoder, label_ids: list[int], regression: bool) -> None:
        super().__init__()
        self.encoder, self.regression = encoder, regression
        self.register_buffer("label_ids", torch.tensor(label_ids), persistent=False)

    def scores(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        """(S, K) fp32: the label words' logits."""
        logits: Tensor = self.encoder.fill(batch, dropout_seed)
        return logits.index_select(1, self.label_ids).float()

    def forward(self, batch: TokenBatch, dropout_seed: Tensor | int | None = None) -> Tensor:
        """(S, K) fp32 logits of the classes; regression: (S, 1), the probability of the high pole."""
        scores = self.scores(batch, dropout_seed)
        return scores.softmax(dim=1)[:, 1:] if self.regression else scores


@dataclass(frozen=True)
class _Asked:
    """What a SentenceProblem asks of an encoder."""

    tokenizer: Prompts
    max_length: int


class ClozeProblem(SentenceProblem):
    """A classification or regression task through a template."""

    def __init__(self, data: TaskData, encoder: TextEncoder, template: Template, config: FinetuneConfig) -> None:
        """Raises UserError if a label word is not one token of the encoder's, or the template does not fit."""
        asked: Any = _Asked(Prompts(encoder.tokenizer, template), encoder.max_length)
        self.label_ids = label_ids(encoder.tokenizer, template)
        super().__init__(data, asked, config)

    def model(self, encoder: Any, config: FinetuneConfig) -> ClozeModel:  # type: ignore[override]
        """encoder: with its head."""
        return ClozeModel(encoder, self.label_ids, self.task.kind == "regression")

    def loss(
        self, model: nn.Module, indices: NDArray[np.int64], device: torch.device, dropout_seed: Tensor | int | None
    ) -> Tensor:
        if self.task.kind != "regression":
            return super().loss(model, indices, device, dropout_seed)
        assert isinstance(model, ClozeModel)
        high = to_device(self.targets[torch.from_numpy(indices)], device)
        found = model.scores(token_batch(self.train, indices).to(device), dropout_seed).log_softmax(dim=1)
        return F.kl_div(found, torch.stack([1 - high, high], dim=1), reduction="batchmean")
