"""MAE-LM computed the way its authors' released code computes it, in plain PyTorch: what the packed model replaces.

Everything is a padded tensor, the longest sequence rounded up to a multiple of 8. Buckets of distances are gathered as
(B, L, L) int64, the bias is written out as (B, H, L, L), attention materialises its weights and drops some of them, the
decoder's input is filled by boolean masks, all its layers compute every slot, and the head reads the masked ones.

The parameters are a MaeLm's, so that the two can be compared on the same weights. Kinder than the release in two
points: queries, keys and values are one product, and nothing is read back for logging.

Shapes: B sequences, L padded length, d hidden size, H heads, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from maelm_fast.batch import PackedBatch
from maelm_fast.model.decoder import SelfDecoder
from maelm_fast.model.maelm import MaeLm
from maelm_fast.model.position_bias import RelativeBias

_MULTIPLE = 8


class PaddedInputs(NamedTuple):
    """ids, positions: (B, Lv) int64, visible tokens. visible: (B, Lv), slots, masked: (B, L), bool: what is no padding,
    in the encoder and in the decoder, and what is to be predicted. labels: (M,) int64."""

    ids: Tensor
    positions: Tensor
    visible: Tensor
    slots: Tensor
    masked: Tensor
    labels: Tensor

    def to(self, device: str) -> PaddedInputs:
        return PaddedInputs(*(tensor.to(device) for tensor in self))


def padded(values: Tensor, lengths: Sequence[int], pad: int = 0, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Packed values (N,) as (B, L), and where they are real, (B, L) bool. L is the longest length, rounded up."""
    length = -(-max(lengths) // multiple) * multiple
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    out = torch.full(real.shape, pad, dtype=torch.int64)
    out[real] = values.long()
    return out, real


def padded_inputs(batch: PackedBatch) -> PaddedInputs:
    """Of a batch on the host."""
    ids, visible = padded(batch.ids, batch.visible.lengths, multiple=_MULTIPLE)
    positions, _ = padded(batch.visible.positions, batch.visible.lengths, multiple=_MULTIPLE)
    to_predict = torch.zeros(batch.counts.original, dtype=torch.int64)
    to_predict[batch.masked_index.long()] = 1
    masked, slots = padded(to_predict, batch.decoder.lengths, multiple=_MULTIPLE)
    return PaddedInputs(ids, positions, visible, slots, masked.bool(), batch.labels.long())


class PaddedMaeLm(nn.Module):
    """ours: a MaeLm with a self-attention decoder."""

    def __init__(self, ours: MaeLm) -> None:
        super().__init__()
        self.ours = ours
        self.heads, self.dropout = ours.config.num_heads, ours.config.dropout
        self.vocab_size, self.mask_id = ours.config.vocab_size, ours.mask_id
        self.register_buffer("encoder_buckets", _buckets(ours.encoder.relative_bias), persistent=False)
        self.register_buffer(
            "decoder_buckets", _buckets(cast(SelfDecoder, ours.decoder).relative_bias), persistent=False
        )

    encoder_buckets: Tensor | None
    decoder_buckets: Tensor | None

    def forward(self, inputs: PaddedInputs) -> Tensor:
        """Mean loss of the masked tokens, 0-d."""
        encoded = self._encode(inputs)
        decoder: Any = self.ours.decoder
        table = self.ours.encoder.token_table
        x = encoded.new_zeros(*inputs.slots.shape, encoded.shape[-1])
        x[inputs.slots & ~inputs.masked] = encoded[inputs.visible]
        x[inputs.masked] = table[self.mask_id].to(x.dtype)
        x = decoder.embedding_norm(x + decoder.position_table[: x.shape[1]])
        slots = torch.arange(x.shape[1], device=x.device)[None]
        bias = _bias(self.decoder_buckets, decoder.relative_bias, slots, inputs.slots)
        for block in decoder.blocks:
            x = self._block(block, x, bias, 0.0)
        head = self.ours.head
        scores = F.linear(head.norm(F.gelu(_linear(x[inputs.masked], head.dense))), table, head.vocabulary_bias)
        return F.cross_entropy(scores[:, : self.vocab_size].float(), inputs.labels)

    def _encode(self, inputs: PaddedInputs) -> Tensor:
        """(B, Lv, d)"""
        encoder: Any = self.ours.encoder
        p = self.dropout if self.training else 0.0
        x = F.embedding(inputs.ids, encoder.token_table) + F.embedding(inputs.positions, encoder.position_table)
        x = F.dropout(encoder.embedding_norm(x), p) * inputs.visible[..., None]
        bias = _bias(self.encoder_buckets, encoder.relative_bias, inputs.positions, inputs.visible)
        for block in encoder.blocks:
            x = self._block(block, x, bias, p)
        return x

    def _block(self, block: Any, x: Tensor, bias: Tensor, p: float) -> Tensor:
        """x: (B, L, d). bias: of _bias."""
        mixed = _linear(self._attention(_linear(x, block.attention.qkv), bias, p), block.attention.out)
        x = block.attention_norm(x + F.dropout(mixed, p))
        hidden = _linear(F.gelu(_linear(x, block.ffn_in)), block.ffn_out)
        out: Tensor = block.ffn_norm(x + F.dropout(hidden, p))
        return out

    def _attention(self, qkv: Tensor, bias: Tensor, p: float) -> Tensor:
        """qkv: (B, L, 3d). Returns (B, L, d)."""
        with record_function("attention"):  # benchmarks/shares.py looks for the name
            q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, head_dim) each
            scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2) + bias
            # Its own dtype: autocast would have fp32, the release has 16 bits throughout.
            weights = F.dropout(F.softmax(scores, dim=-1, dtype=scores.dtype), p)
            out: Tensor = (weights @ v).transpose(1, 2).flatten(2)
            return out


def _linear(x: Tensor, layer: Any) -> Tensor:
    """PyTorch's product, where a call of the layer would be ops.linear's."""
    return F.linear(x, layer.weight, layer.bias)


def _buckets(relative: RelativeBias | None) -> Tensor | None:
    """(P, P): of every query and key position."""
    if relative is None:
        return None
    place = torch.arange(relative.positions)
    return relative.buckets[place[None, :] - place[:, None] + relative.positions - 1]


def _bias(buckets: Tensor | None, relative: Any, positions: Tensor, real: Tensor) -> Tensor:
    """What is added to the scores, (B, H, L, L), without relative bias (B, 1, 1, L); -inf where there is no key.
    positions: (B or 1, L)."""
    with record_function("attention"):
        on = real.device
        dtype = torch.get_autocast_dtype(on.type) if torch.is_autocast_enabled(on.type) else torch.float32
        no_pads = torch.zeros(real.shape, device=on, dtype=dtype).masked_fill(~real, float("-inf"))[:, None, None, :]
        if buckets is None:
            return no_pads
        between = buckets[positions[:, :, None], positions[:, None, :]]  # (B, L, L)
        return no_pads + F.embedding(between, relative.weight.to(dtype)).permute(0, 3, 1, 2)
