"""What the benchmarks compare with: the same weights must give our loss and our gradients, padded or not, and a count
of FLOPs must be what PyTorch counts while the model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from benchmarks import peers
from benchmarks.contestants import Contestant, Settings, model_flops
from benchmarks.padded import PaddedMaeLm, padded_inputs
from maelm_fast.model.maelm import MaeLm

SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "ffn_size": 128, "vocab_size": 512}
SETTINGS = Settings(batch=4, seq=64, dropout=0.0, bias=True, shape="tiny", changes=SMALL)
LENGTHS = pytest.mark.parametrize("lengths", ["full", "documents"])


def with_(**fields: Any) -> Settings:
    return Settings(**{**vars(SETTINGS), **fields})


@LENGTHS
def test_hugging_face_copy_has_our_loss_and_gradients(lengths: str) -> None:
    settings = with_(lengths=lengths)
    config = settings.model_config("hf")
    ours, theirs = MaeLm(config), peers.hugging_face_roberta(config)
    peers.copy_weights(ours, theirs)
    batch = settings.packed(config.vocab_size, encoder_sees_mask=True)
    inputs = peers.hugging_face_inputs(batch)
    assert ("attention_mask" in inputs) == (lengths == "documents")
    loss, their_loss = ours(batch)[0] / batch.counts.masked, theirs(**inputs).loss
    torch.testing.assert_close(loss, their_loss)
    loss.backward()
    their_loss.backward()
    grads: dict[str, Any] = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    torch.testing.assert_close(ours.encoder.token_table.grad, grads["roberta.embeddings.word_embeddings.weight"])
    positions = grads["roberta.embeddings.position_embeddings.weight"]
    torch.testing.assert_close(ours.encoder.position_table.grad, positions[2:])
    first: Any = ours.encoder.blocks[0]
    values = grads["roberta.encoder.layer.0.attention.self.value.weight"]
    torch.testing.assert_close(first.attention.qkv.weight.grad[-config.hidden_size :], values)


@LENGTHS
@pytest.mark.parametrize("bias", ["none", "t5", "released"])
@pytest.mark.parametrize("decoder_bias", [False, True])
def test_padded_has_our_loss_and_gradients(lengths: str, bias: str, decoder_bias: bool) -> None:
    settings = with_(lengths=lengths, changes={**SMALL, "relative_bias": bias, "decoder_relative_bias": decoder_bias})
    ours = MaeLm(settings.model_config("padded"))
    batch = settings.packed(ours.config.vocab_size, encoder_sees_mask=False)
    (ours(batch)[0] / batch.counts.masked).backward()
    packed = {name: parameter.grad for name, parameter in ours.named_parameters()}
    ours.zero_grad(set_to_none=True)
    loss = PaddedMaeLm(ours)(padded_inputs(batch))
    torch.testing.assert_close(loss, ours(batch)[0] / batch.counts.masked, rtol=1e-5, atol=0.0)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in ours.named_parameters()}
    torch.testing.assert_close(grads, packed, rtol=1e-3, atol=1e-6)  # names the one that differs


def test_padded_inputs_are_as_long_as_the_longest_sequence_rounded_up_to_eight() -> None:
    batch = with_(lengths="documents").packed(512, encoder_sees_mask=False)
    inputs = padded_inputs(batch)
    assert inputs.ids.shape == (4, 56)  # 54 of 64 are visible
    assert inputs.masked.shape == (4, 64)
    assert inputs.visible.sum(1).tolist() == list(batch.visible.lengths)
    assert inputs.slots.sum(1).tolist() == list(batch.decoder.lengths)
    assert inputs.masked.sum(1).tolist() == list(batch.masked.lengths)


def test_padded_in_bf16_is_near_fp32() -> None:
    loss, exact = (Contestant("padded", with_(precision=name)).forward().item() for name in ("bf16", "fp32"))
    assert loss == pytest.approx(exact, rel=0.01)
    assert loss != exact


def test_padded_drops_weights_in_training() -> None:
    one = Contestant("padded", with_(dropout=0.1))
    assert one.loss().item() != one.loss().item()
    one.model.eval()
    assert one.loss().item() == one.loss().item()


@pytest.mark.parametrize("name", ["hf", "padded"])
def test_flops_are_what_pytorch_counts(name: str) -> None:
    """A quarter masked leaves 48 of 64 visible, a multiple of 8; no window is shorter than the sequences."""
    one = Contestant(name, with_(rate=0.25, bias=False))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        one.loss()
    assert 3 * counter.get_total_flops() == one.flops


def test_pads_count_no_flops() -> None:
    settings = with_(lengths="documents")
    alone = [with_(batch=1, seq=n) for n in settings.sequence_lengths()]
    for kind in ("hf", "padded"):
        config, sees_mask = settings.model_config(kind), kind == "hf"
        flops = model_flops(kind, config, settings.packed(config.vocab_size, sees_mask))
        assert flops == sum(model_flops(kind, config, one.packed(config.vocab_size, sees_mask)) for one in alone)
