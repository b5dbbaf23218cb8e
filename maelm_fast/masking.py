"""What draws masks, whoever draws them: the loader's C++, plain PyTorch, or a kernel on the device.

The masked positions of a sequence are those with the n smallest Philox words, keyed by (seed, epoch, sample id), one
word per position; ties go to the lower position. Those that the encoder reads as [MASK], where it reads some, are the
ones with the smallest words among them. Hence the same masks at any batch size and worker count, and from any
implementation that draws the same words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from maelm_fast.config import MaskingConfig, require

VALIDATION_EPOCH = 0xFFFFFFFF  # an epoch no run reaches: validation masks are the same at every evaluation


@dataclass(frozen=True)
class Vocabulary:
    """What masking has to know of a tokenizer. special: ids of the special tokens, mask_id among them."""

    size: int
    mask_id: int
    special: tuple[int, ...]


@dataclass(frozen=True)
class Masker:
    """All that the masks of a sequence depend on, but for its tokens and its key (epoch, sample id).

    seed: 64 bits. encoder_sees_mask: False removes the [MASK] tokens from the encoder's row (MAE-LM), all but
    masking.shown of them; True leaves them in (standard MLM). With the BERT and the random policy the tokens shown as
    random or unchanged stay in the encoder's row either way, and are predicted all the same.

    masking: with one rate, which of a run is masking.final's but for its training updates.

    Raises UserError if the policy draws random tokens and there is none that is not special."""

    masking: MaskingConfig
    vocabulary: Vocabulary
    seed: int
    encoder_sees_mask: bool

    def __post_init__(self) -> None:
        if self.masking.rate_end is not None:
            raise ValueError("a masker has one rate: masking.final, or RunConfig.mask_rate of an update")
        require(
            self.masking.policy == "mask" or len(self.special) < self.vocabulary.size,
            f"masking.policy {self.masking.policy} has no token to draw from: all of the vocabulary are special",
        )

    def at_rate(self, rate: float) -> Masker:
        """The same, but for the share that is masked."""
        return replace(self, masking=replace(self.masking, rate=rate))

    @property
    def special(self) -> list[int]:
        """The special tokens of the vocabulary, ascending, each once."""
        return sorted({token for token in self.vocabulary.special if 0 <= token < self.vocabulary.size})

    @property
    def removes_by_policy(self) -> bool:
        """Whether the policy's words say which masked tokens leave the encoder's row."""
        return self.masking.policy == "bert" and not self.encoder_sees_mask

    @property
    def sizes_follow_from_lengths(self) -> bool:
        """Whether the sizes of a batch do; else from its tokens or from the policy's words."""
        return self.masking.special_tokens and not self.removes_by_policy

    @property
    def shown(self) -> float:
        """The share of the masked tokens that stay in the encoder's row, if the policy's words do not say it."""
        return 1.0 if self.encoder_sees_mask or self.masking.policy == "random" else self.masking.shown
