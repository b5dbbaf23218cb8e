"""Everything a fine-tuning run can be told, as one frozen dataclass, and nothing else: no torch, no parsing.

Defaults are of the paper's Tables 4 and 5 where they have one value; where they have several, the one that published
searches of this model family end at most often. Where the paper is silent the comment says whose choice it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maelm_fast.config import require


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """One fine-tuning run: a task, an encoder, a seed."""

    lr: float = 3e-5
    """Peak learning rate: linear warm-up from 0, then linear decay to 0."""
    epochs: int = 3
    """Passes over the training examples."""
    batch_size: int = 32
    """Examples per step; for SQuAD windows, of which a long passage has several."""
    warmup: float = 0.06
    """Share of all steps."""
    max_length: int = 512
    """Tokens of an input, special ones included; a model with fewer positions takes fewer. Longer inputs are cut, the
    longer text of a pair first, and counted (ours: the released code leaves such examples out)."""
    dropout: float = 0.1
    """Of the encoder, instead of what it was pretrained with, and of the head."""
    weight_decay: float = 0.01
    """On every parameter (released code)."""
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    clip_norm: float = 0.0
    """Global L2 norm of the gradient; 0, as in the paper, is no clipping."""
    evaluations_per_epoch: int = 2
    """On the development set; the best of them by the task's own metric is what the paper reports (sister releases)."""
    question_length: int = 64
    """SQuAD: tokens of a question; longer ones are cut and counted (released code)."""
    stride: int = 128
    """SQuAD: tokens between the starts of two windows of a passage (released code), but a third of a window at most
    (ours), so that windows of less than 384 tokens overlap too."""
    answer_length: int = 30
    """SQuAD: tokens of a predicted answer at most (released code)."""
    seed: int = 0
    """Of the head's initialisation, the order of the examples and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: autocast over fp32 weights. auto: bf16, but fp32 on a CPU without bf16 matrix instructions."""
    micro_batch_tokens: int = 16_384
    """Tokens of a forward pass in training, padding not counted, which a step has several of if its examples are
    longer. Changes memory and speed, not what is computed, up to rounding and to which numbers dropout takes."""

    def __post_init__(self) -> None:
        counts = "epochs batch_size evaluations_per_epoch question_length stride answer_length micro_batch_tokens"
        for name in counts.split():
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        require(self.lr > 0, f"lr must be positive, not {self.lr}")
        require(0.0 <= self.warmup < 1.0, f"warmup is a share of the steps, in [0, 1), not {self.warmup}")
        require(0.0 <= self.dropout < 1.0, f"dropout must lie in [0, 1), not {self.dropout}")
        require(self.weight_decay >= 0, f"weight_decay must not be negative, not {self.weight_decay}")
        require(
            len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas),
            f"betas must be two numbers in [0, 1), not {list(self.betas)}",
        )
        require(self.eps > 0, f"eps must be positive, not {self.eps}")
        require(self.clip_norm >= 0, f"clip_norm must not be negative (0 is off), not {self.clip_norm}")
        require(self.seed >= 0, f"seed must not be negative, not {self.seed}")
        require(self.max_length >= 8, f"max_length must be at least 8, not {self.max_length}")
