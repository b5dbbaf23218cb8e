"""What makes each row of the paper's ablations that row, and that a packed batch computes what padded sequences do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from maelm_fast import ops, presets
from maelm_fast.batch import PackedBatch, layout_of
from maelm_fast.config import BackendConfig, MaskingConfig, ModelConfig, RunConfig
from maelm_fast.data.masking import pack_masked
from maelm_fast.errors import UserError
from maelm_fast.model.decoder import CausalDecoder
from maelm_fast.model.encoder import consecutive_positions
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops import AttentionLayout
from tests.model.checks import SMALL, VOCABULARY, assert_packed_equals_padded, batch_for, build, show

LENGTHS = [40, 1, 17, 2]
WITH_DECODER = ["self", "cross", "self_cross", "causal_cross"]
REFERENCE = BackendConfig(**dict.fromkeys(BackendConfig.__dataclass_fields__, "reference"))  # type: ignore[arg-type]
Changes = dict[str, Any]


def input_of(model: MaeLm, batch: PackedBatch, encoded: Tensor) -> Tensor:
    """What the decoder's first block gets."""
    assert model.decoder is not None
    seen: list[Tensor] = []
    handle = model.decoder.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.decoder(encoded, batch, model.encoder.token_table, model.mask_id)
    handle.remove()
    return seen[0]


def decode(model: MaeLm, batch: PackedBatch, encoded: Tensor) -> Tensor:
    assert model.decoder is not None
    out: Tensor = model.decoder(encoded, batch, model.encoder.token_table, model.mask_id)
    return out


def random_rows(batch: PackedBatch, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.counts.visible, SMALL.hidden_size, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", presets.variants())
def test_every_variant_packed_equals_padded(name: str) -> None:
    """Loss and all gradients, fp64; in the decoder a relative bias too, as in small and tiny."""
    base = RunConfig(model=replace(SMALL, decoder_relative_bias=True), masking=MaskingConfig(rate=0.3))
    run = presets.variant(base, name)
    model = build(**{field: getattr(run.model, field) for field in ModelConfig.__dataclass_fields__})
    policy = "bert" if run.masking.policy == "bert" else "mask"
    batch = batch_for(model, LENGTHS, run.masking.rate, policy=policy)
    if run.masking.shown or run.masking.policy == "random":
        batch = show(batch, run.masking.shown or 1.0, random=run.masking.policy == "random")
        assert batch.counts.visible > batch.counts.original - batch.counts.masked
    assert_packed_equals_padded(model, batch)


MIXED: list[Changes] = [
    {"decoder": "cross", "decoder_resets_mask": True},
    {"decoder": "self_cross", "decoder_hidden_size": 24, "decoder_num_heads": 4, "decoder_resets_mask": True},
    {"decoder": "cross", "decoder_hidden_size": 8, "positions": "misaligned"},
    {"decoder": "causal_cross", "decoder_hidden_size": 8, "positions": "misaligned", "relative_bias": "none"},
    {"decoder_layers": 1, "decoder": "self_cross", "decoder_num_heads": 1},
]


@pytest.mark.parametrize("fields", MIXED)
def test_combinations_packed_equal_padded(fields: Changes) -> None:
    model = build(**fields)
    assert_packed_equals_padded(model, show(batch_for(model, LENGTHS, 0.4), 0.5))


@pytest.mark.parametrize("fields", [{"decoder": d} for d in WITH_DECODER] + MIXED)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_gradients_reach_every_parameter_and_are_finite(fields: Changes, share: float) -> None:
    model = build(**fields)
    batch = show(batch_for(model, [1, 2, 30], 0.9), share)
    model(batch)[0].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_original_ids_are_the_tokens_before_masking() -> None:
    model = build()
    want = batch_for(build(decoder="none"), LENGTHS, 0.001).ids  # nothing masked: the tokens themselves
    for batch in (
        batch_for(model, LENGTHS, 0.5),
        batch_for(model, LENGTHS, 0.95),
        batch_for(model, LENGTHS, 0.5, policy="bert"),
        batch_for(build(decoder="none"), LENGTHS, 0.5, policy="bert"),
        show(batch_for(model, LENGTHS, 0.5), 0.5),
        show(batch_for(model, LENGTHS, 0.5), 1.0, random=True),
    ):
        assert torch.equal(batch.original_ids, want)
    everything = batch_for(model, [1, 2, 1], 0.9)
    assert everything.counts.visible == 0
    assert torch.equal(everything.original_ids, everything.labels)


# Causal self-attention and cross-attention


def test_causal_decoder_predicts_every_token_and_the_others_the_masked_ones() -> None:
    for decoder in [*WITH_DECODER, "none"]:
        model = build(decoder=decoder)
        batch = batch_for(model, LENGTHS)
        count = batch.counts.original if decoder == "causal_cross" else batch.counts.masked
        labels = batch.original_ids if decoder == "causal_cross" else batch.labels
        assert model.predicted_tokens(batch.counts) == count == len(model.labels(batch))
        assert len(model.predicted_states(batch)) == count
        assert torch.equal(model.labels(batch), labels)


@pytest.mark.parametrize("relative", [False, True])
def test_causal_decoder_sees_no_token_from_its_own_on(relative: bool) -> None:
    """Every masked token in turn becomes another, the encoder's output staying as it was: no state up to its slot
    changes, nor any in another sequence; the next one does."""
    model = build(decoder="causal_cross", decoder_relative_bias=relative)
    batch = batch_for(model, LENGTHS, 0.5)
    encoded = random_rows(batch, 0)
    before = decode(model, batch, encoded)
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for i, slot in enumerate(batch.masked_index.tolist()):
        labels = batch.labels.clone()
        labels[i] = 4 if labels[i] != 4 else 5
        changed = (decode(model, replace(batch, labels=labels), encoded) != before).any(1)
        after = (owner == owner[slot]) & (torch.arange(len(owner)) > slot)
        assert torch.equal(changed, after)


def test_causal_decoder_starts_from_mask_and_attends_to_the_encoder() -> None:
    model = build(decoder="causal_cross")
    batch = batch_for(model, [1, 30])
    encoded = random_rows(batch, 0).requires_grad_()
    decoder, table = model.decoder, model.encoder.token_table
    assert decoder is not None
    start = table[99:100]
    want = torch.cat([start, start, table[batch.original_ids[1:-1].long()]])
    positions = decoder.position_table[batch.decoder.positions.long()]
    torch.testing.assert_close(input_of(model, batch, encoded), decoder.embedding_norm(want + positions))
    (grad,) = torch.autograd.grad(decode(model, batch, encoded).square().sum(), encoded)
    assert (grad.abs().sum(1) > 0).all()


def test_causal_decoder_does_not_fill_masks() -> None:
    model = build(decoder="causal_cross")
    batch = pack_masked([torch.tensor([5, 99, 7]).numpy()], VOCABULARY, encoder_sees_mask=False)
    with pytest.raises(UserError, match="cannot fill in"):
        model.logits(batch)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("backend", ["grouped", "triton"])
def test_causal_attention_is_the_same_on_every_backend(backend: str, relative: bool) -> None:
    """Sequences of several of the kernel's tiles, run by Triton's interpreter where there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32
    if backend == "triton":
        pytest.importorskip("triton")
        dtype = torch.bfloat16 if device.type == "cuda" else dtype
    torch.manual_seed(0)
    config = replace(SMALL, decoder="causal_cross", hidden_size=32, decoder_relative_bias=relative)
    decoder = MaeLm(config).to(device).decoder
    assert isinstance(decoder, CausalDecoder)
    table = [decoder.relative_bias.weight] if decoder.relative_bias is not None else []
    for weight in table:
        torch.nn.init.normal_(weight)
    layout = AttentionLayout(layout_of([37, 1]).to(device))
    q, k, v, g = (torch.randn(38, 2, 16, dtype=dtype, device=device) for _ in range(4))

    def result(name: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = ops.attention(*leaves, layout, decoder.causal_bias(), backend=name)
        return [out, *torch.autograd.grad(out, [*leaves, *table], g)]

    precision = 3e-2 if dtype == torch.bfloat16 else 1e-4
    results = result(backend)
    for mine, theirs in zip(results, result("reference"), strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs, rtol=precision, atol=precision)
    torch.testing.assert_close(results[0][[0, 37]], v[[0, 37]])  # the first tokens, which have only themselves


# Self-attention and cross-attention


@pytest.mark.parametrize("way", ["slots", "cross-attention"])
def test_self_cross_depends_on_the_encoder_both_ways(way: str) -> None:
    """With either way closed, the encoder's output still gets gradient through the other."""
    model = build(decoder="self_cross")
    assert model.decoder is not None
    batch = batch_for(model, LENGTHS)
    if way == "slots":
        with torch.no_grad():
            for block in model.decoder.blocks:
                block.get_submodule("cross_attention.out").get_parameter("weight").zero_()
    else:
        batch = replace(batch, source=torch.full_like(batch.source, -1))
    encoded = random_rows(batch, 0).requires_grad_()
    (grad,) = torch.autograd.grad(decode(model, batch, encoded).square().sum(), encoded)
    masks = torch.tensor(batch.masked.lengths).repeat_interleave(torch.tensor(batch.visible.lengths)) > 0
    assert torch.equal(grad.abs().sum(1) > 0, masks)  # of sequences in which something is predicted


# [MASK] reset in the decoder's input


@pytest.mark.parametrize("decoder", ["self", "cross", "self_cross"])
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_reset_slots_do_not_depend_on_the_encoder(decoder: str, random: bool, resets: bool) -> None:
    model = build(decoder=decoder, decoder_resets_mask=resets)
    batch = show(batch_for(model, LENGTHS), 1.0, random=random)
    assert batch.counts.visible == batch.counts.original
    first, second = (input_of(model, batch, random_rows(batch, seed)) for seed in (0, 1))
    same = (first == second).all(1)
    masked = torch.ones(len(same), dtype=torch.bool)
    if decoder != "cross":
        masked = torch.zeros(batch.counts.original, dtype=torch.bool).index_fill(0, batch.masked_index.long(), True)
    assert torch.equal(same, masked & resets)
    if resets:  # and what stands there is [MASK] at its position, as where the encoder had nothing
        removed = batch_for(model, LENGTHS)
        assert torch.equal(first[masked], input_of(model, removed, random_rows(removed, 0))[masked])


# Positions


def test_misaligned_positions_count_the_visible_tokens() -> None:
    """The encoder computes what it would of the visible tokens alone, whatever was taken out between them; the aligned
    one does not. The decoder's positions stay."""
    model = build(positions="misaligned")
    aligned = build()
    aligned.load_state_dict(model.state_dict())
    batch = batch_for(model, LENGTHS)
    alone = layout_of(batch.visible.lengths)
    assert not torch.equal(alone.positions, batch.visible.positions)
    got = model.encoder(batch.ids, batch.visible)
    assert torch.equal(got, aligned.encoder(batch.ids, alone))
    assert not torch.equal(got, aligned.encoder(batch.ids, batch.visible))
    assert torch.equal(input_of(model, batch, got), input_of(aligned, batch, got))


@pytest.mark.parametrize("lengths", [[0, 3, 0, 0, 2, 1, 0], [5], [0], []])
def test_consecutive_positions_of_empty_sequences_too(lengths: list[int]) -> None:
    layout = layout_of(lengths)
    got = consecutive_positions(replace(layout, positions=torch.full_like(layout.positions, 7)))
    assert got.dtype == torch.int32
    assert torch.equal(got, layout.positions)


# Width of the decoder


@pytest.mark.parametrize("decoder", WITH_DECODER)
def test_decoder_width(decoder: str) -> None:
    config = replace(SMALL, decoder=decoder, decoder_hidden_size=24)  # type: ignore[arg-type]
    model = MaeLm(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if "encoder." not in name}
    assert shapes["decoder.projection.weight"] == (24, 16)
    assert shapes["decoder.projection.bias"] == (24,)
    assert shapes["decoder.position_table"] == (512, 24)
    assert shapes["decoder.blocks.0.attention.qkv.weight"] == (72, 24)
    assert shapes["decoder.blocks.1.ffn_in.weight"] == (36, 24)  # 1.5 times its width, as the encoder's
    assert shapes["head.dense.weight"] == (24, 24)
    assert shapes["head.out.weight"] == (16, 24)
    assert "head.out.bias" not in shapes
    assert model.decoder is not None
    assert model.decoder.blocks[0].get_submodule("attention").heads == (3, 8)


def test_a_decoder_of_the_encoders_width_has_no_projection() -> None:
    plain, named = (MaeLm(replace(SMALL, decoder_hidden_size=width)) for width in (None, SMALL.hidden_size))
    assert plain.state_dict().keys() == named.state_dict().keys()
    assert not [name for name in plain.state_dict() if "projection" in name or name == "head.out.weight"]


BLOCK = """attention.qkv.weight attention.qkv.bias attention.out.weight attention.out.bias attention_norm.weight
attention_norm.bias ffn_in.weight ffn_in.bias ffn_out.weight ffn_out.bias ffn_norm.weight ffn_norm.bias""".split()


@pytest.mark.parametrize("decoder", ["self", "cross", "none"])
def test_parameter_names_are_those_of_earlier_checkpoints(decoder: str) -> None:
    config = replace(SMALL, decoder=decoder, num_layers=1, decoder_layers=1)  # type: ignore[arg-type]
    norm = ["embedding_norm.weight", "embedding_norm.bias"]
    stack = ["position_table", *norm, *(f"blocks.0.{name}" for name in BLOCK)]
    names = [f"encoder.{name}" for name in ("token_table", "relative_bias.weight", *stack)]
    names += [f"decoder.{name}" for name in stack] if decoder != "none" else []
    names += [f"head.{name}" for name in ("dense.weight", "dense.bias", "norm.weight", "norm.bias", "vocabulary_bias")]
    assert sorted(MaeLm(config).state_dict()) == sorted(names)


# FLOPs, and what is refused


@pytest.mark.parametrize(
    "fields",
    [
        *({"decoder": d, "decoder_hidden_size": w} for d in WITH_DECODER for w in (None, 24)),
        {"decoder": "none"},
        {"decoder": "self", "positions": "misaligned", "decoder_num_heads": 4},
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_flops_are_those_that_run(fields: Changes, share: float) -> None:
    """Forward and backward by PyTorch's own counter; the vocabulary is a multiple of 64, so that no row is padding.
    PyTorch's has one row more, that of [MASK], where there is a projection."""
    config = replace(SMALL, vocab_size=128, **fields)
    model = MaeLm(config)
    batch = batch_for(model, [30, 17])
    if config.decoder != "none":
        batch = show(batch, share)
    counter = FlopCounterMode(display=False)
    with ops.backends(REFERENCE), counter:
        model(batch)[0].backward()
    counted = training_flops(config, *batch.lengths)
    mask_row = 3 * 2 * 16 * 24 if config.decoder_hidden_size else 0
    assert counter.get_total_flops() == counted + mask_row


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ModelConfig(decoder="none", decoder_hidden_size=512), "decoder_hidden_size is set but means nothing"),
        (lambda: ModelConfig(decoder="none", decoder_num_heads=4), "decoder_num_heads is set but means nothing"),
        (lambda: ModelConfig(decoder="none", decoder_resets_mask=True), "decoder_resets_mask is set but means nothing"),
        (lambda: ModelConfig(decoder="none", positions="misaligned"), "positions is set but means nothing"),
        (lambda: ModelConfig(decoder="causal_cross", decoder_resets_mask=True), "reads tokens"),
        (lambda: ModelConfig(decoder_hidden_size=500), "500 is not a multiple of 64, .* set model.decoder_num_heads"),
        (lambda: ModelConfig(decoder_hidden_size=512, decoder_num_heads=12), "512 is not a multiple of 12"),
        (lambda: ModelConfig(decoder_hidden_size=0), "decoder_hidden_size must be positive"),
        (lambda: ModelConfig(init_std=-0.02), "init_std must be positive"),
        (lambda: MaskingConfig(shown=1.5), "masking.shown must lie in"),
        (lambda: MaskingConfig(shown=0.5, policy="bert"), "with masking.policy bert"),
        (lambda: MaskingConfig(shown=0.5, policy="random"), "with masking.policy random"),
        (
            lambda: RunConfig(model=ModelConfig(decoder="none"), masking=MaskingConfig(shown=0.5)),
            "without a decoder the encoder reads every",
        ),
        (lambda: RunConfig(model=ModelConfig(decoder_resets_mask=True)), "changes nothing"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        make()
    assert "\n" not in str(error.value)
