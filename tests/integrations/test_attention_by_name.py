"""`attn_implementation="maelm"` in transformers' encoders, against their own attention in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from maelm_fast import ops
from maelm_fast.batch import layout_of
from maelm_fast.ops import AttentionLayout, PositionBias
from maelm_fast.ops.registration import native_reason

transformers = pytest.importorskip("transformers")
attention_module = pytest.importorskip("maelm_fast.integrations.transformers.attention")

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
LOCAL = {"local_attention": 8, "global_attn_every_n_layers": 3, **ENDS}
FAMILIES: dict[str, dict[str, Any]] = {
    "roberta": {},
    "bert": {},
    "electra": {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 40},
    "eurobert": {"num_key_value_heads": 1, **ENDS},  # queries share keys
    "modernbert": LOCAL,
}
LENGTH = 24
BATCHES = {
    "ragged": [[1] * n + [0] * (LENGTH - n) for n in (24, 5, 17)],
    "left-padded": [[0] * (LENGTH - n) + [1] * n for n in (24, 5, 17)],
    "with holes": [[1, 1, 0, 1] * 6, [0] * 3 + [1] * 9 + [0] * 12, [1] * 24],
    "one token": [[1], [1]],
    "ones": [[1] * LENGTH] * 2,
    "no mask": [[1] * LENGTH] * 2,
}


def model_of(family: str, attention: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **changes})
    return transformers.AutoModel.from_config(config, attn_implementation=attention).double().eval()


def pair(family: str, other: str = "sdpa") -> tuple[Any, Any]:
    stock = model_of(family, other)
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation("maelm")
    return stock, ours


def batch_of(kind: str) -> tuple[Tensor, Tensor | None]:
    mask = torch.tensor(BATCHES[kind])
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(1))
    return ids.where(mask.bool(), 1), None if kind == "no mask" else mask


def states_and_gradients(model: Any, kept: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What the kept tokens become, and every parameter's gradient."""
    model.zero_grad()
    states = model(**inputs).last_hidden_state[kept]
    states.backward(torch.randn(states.shape, dtype=states.dtype, generator=torch.Generator().manual_seed(2)))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return states.detach(), found


def assert_same(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=1e-12)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_stock_s(family: str, kind: str) -> None:
    upcasts = family in ("modernbert", "eurobert")  # their eager softmax is in fp32
    stock, ours = pair(family, "eager" if kind == "with holes" and not upcasts else "sdpa")
    ids, mask = batch_of(kind)
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert_same(states_and_gradients(ours, kept, **inputs), states_and_gradients(stock, kept, **inputs))


PACKED = [[7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [20], [30, 31], [40, 41, 42, 43, 44]]


@pytest.mark.parametrize("told", ["boundaries", "lengths", "positions"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_stock_s_padded_batch(family: str, told: str) -> None:
    """As transformers' collator packs. ModernBERT and distilbert hand no position_ids on: boundaries must be given."""
    stock, ours = pair(family)
    start = 2 if family == "roberta" else 0
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=told == "boundaries", position_ids_start=start
    )
    row = dict(collator([{"input_ids": ids} for ids in PACKED]))
    del row["labels"]
    if told == "lengths":
        row["sequence_lengths"] = [len(ids) for ids in PACKED]
    if told == "positions" and family in ("modernbert", "distilbert"):
        pytest.skip("its layers get no position_ids")
    longest = max(map(len, PACKED))
    padded = torch.tensor([ids + [1] * (longest - len(ids)) for ids in PACKED])
    kept = padded != 1
    expected = states_and_gradients(stock, kept, input_ids=padded, attention_mask=kept.long())
    assert_same(states_and_gradients(ours, torch.ones_like(row["input_ids"]).bool(), **row), expected)


def test_layers_share_a_layout_and_forwards_do_not() -> None:
    stock, ours = pair("bert")
    ids, mask = batch_of("ragged")
    assert mask is not None
    mask = mask.bool()  # of the dtype that transformers would make of it, so it arrives as it is
    with mock.patch.object(ops, "layout_from_mask", wraps=ops.layout_from_mask) as made:
        before = ours(ids, attention_mask=mask).last_hidden_state
        assert made.call_count == 1
        mask[0, 10:] = False  # the same tensor in the next forward
        after = ours(ids, attention_mask=mask).last_hidden_state
        assert made.call_count == 2
    assert not torch.equal(before[0, :10], after[0, :10])
    expected = stock(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(after[mask], expected[mask], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_known_lengths_save_the_host_s_read(family: str) -> None:
    _, ours = pair(family)
    ids, mask = batch_of("left-padded")
    assert mask is not None
    expected = ours(ids, attention_mask=mask).last_hidden_state
    lengths = mask.sum(1).tolist()
    with mock.patch.object(Tensor, "tolist", side_effect=AssertionError("a read")):
        actual = ours(ids, attention_mask=mask, sequence_lengths=lengths).last_hidden_state
    assert torch.equal(actual, expected)


def test_checkpointed_layers_find_the_layout_again() -> None:
    _, ours = pair("bert")
    ids, mask = batch_of("ragged")
    assert mask is not None
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = states_and_gradients(ours, mask.bool(), **inputs)
    ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with mock.patch.object(ops, "layout_from_mask", wraps=ops.layout_from_mask) as made:
        assert_same(states_and_gradients(ours, mask.bool(), **inputs), expected)
        assert made.call_count == 1


def called(query: Tensor, key: Tensor, value: Tensor, shared: Any = None, **arguments: Any) -> Tensor:
    module = SimpleNamespace(is_causal=False)
    result: Tensor = attention_module.attention(module, query, key, value, shared, **arguments)[0]
    return result


def rows(batch: int = 2, heads: int = 3, length: int = 16, dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(batch, heads, length, dim, dtype=torch.float64, generator=generator) for _ in range(3)]


def test_dropout_drops_its_share_and_follows_torch_s_generator() -> None:
    zeros, one_hot = torch.zeros(2, 3, 64, 64), torch.eye(64).expand(2, 3, 64, 64)

    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return called(zeros, zeros, one_hot, dropout=0.25)

    first = weights(0)
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 64 / 0.75])
    share = float((first == 0).double().mean())
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / first.numel()) ** 0.5
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))
    assert not torch.equal(called(zeros, zeros, one_hot, dropout=0.25), called(zeros, zeros, one_hot, dropout=0.25))


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return ((scores + bias).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 4])
def test_a_bias_by_distance_with_and_without_a_window(window: int | None) -> None:
    line = torch.randn(3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    distance = torch.arange(16)[None] - torch.arange(16)[:, None]
    written_out = line[:, distance.clamp(-5, 5) + 5]
    if window is not None:
        written_out = written_out.masked_fill(distance.abs() >= window, float("-inf"))
    actual = called(*rows(), position_bias=PositionBias(line, 16), sliding_window=window)
    torch.testing.assert_close(actual, dense(*rows(), written_out), rtol=1e-12, atol=1e-12)


def test_a_layout_of_one_s_own() -> None:
    """Positions with gaps: a window counts them."""
    query, key, value = rows(batch=1, length=6)
    positions = torch.tensor([0, 3, 4, 1, 2, 9], dtype=torch.int32)
    layout = AttentionLayout(layout_of((3, 3), positions))
    distance = positions[None, :] - positions[:, None]
    owner = torch.tensor([0, 0, 0, 1, 1, 1])
    hidden = (distance.abs() >= 3) | (owner[None] != owner[:, None])
    bias = torch.zeros(6, 6, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    actual = called(query, key, value, layout=layout, sliding_window=3)
    torch.testing.assert_close(actual, dense(query, key, value, bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("known", [True, False])
def test_compiled(known: bool) -> None:
    """One graph where the lengths are known and the kernel is compiled; else the host's read of the mask parts it."""
    ours = pair("roberta")[1].float()
    ids, mask = batch_of("ragged")
    assert mask is not None
    extra = {"sequence_lengths": tuple(mask.sum(1).tolist())} if known else {}
    expected = ours(ids, attention_mask=mask).last_hidden_state
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=known and not native_reason("attention", "cpu"))
    assert torch.equal(compiled(input_ids=ids, attention_mask=mask, **extra).last_hidden_state, expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "4-D mask": ({"attention_mask": torch.ones(3, 1, LENGTH, LENGTH)}, "mask of shape"),
    "3-D mask": ({"attention_mask": torch.ones(3, LENGTH, LENGTH)}, "give one of shape"),
    "a longer mask": ({"attention_mask": torch.ones(3, LENGTH + 2)}, "a cache, a prefix"),
    "weights": ({"output_attentions": True}, "output_attentions: its weights are never written out; use .*'eager'"),
    "boundaries and a mask": (
        {"attention_mask": torch.ones(1, 6), "cu_seq_lens_q": torch.tensor([0, 2, 6])},
        "for one packed row; give a batch of 1 and no attention_mask",
    ),
    "boundaries of a batch": ({"cu_seq_lens_q": torch.tensor([0, 2, 6])}, "for one packed row"),
    "lengths without a mask": ({"sequence_lengths": [24, 5, 17]}, "sequence_lengths without an attention_mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_it_refuses(name: str) -> None:
    arguments, message = REFUSED[name]
    ids = torch.full((1, 6) if "and a mask" in name else (3, LENGTH), 7)
    with pytest.raises(ValueError, match=message):
        model_of("bert", "maelm")(ids, **arguments)


def test_boundaries_that_are_not_the_row_s_are_refused() -> None:
    query, key, value = rows(batch=1, length=6)
    starts = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match="has 6 tokens, its sequences 5"):
        called(query, key, value, cu_seq_lens_q=torch.tensor([0, 2, 5]))
    with pytest.raises(ValueError, match="do not count up by one"):
        called(query, key, value, position_ids=torch.tensor([[0, 1, 2, 4, 5, 6]]))
    with pytest.raises(ValueError, match="cu_seq_lens_k are not"):
        called(query, key, value, cu_seq_lens_q=starts, cu_seq_lens_k=torch.tensor([0, 6]))
    with pytest.raises(RuntimeError, match="cu_seq_lens_k are not"):
        called(query, key, value, cu_seq_lens_q=starts, cu_seq_lens_k=torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match="the model's mask has none"):
        called(query, key, value, attention_module.SharedMask(None, None), sliding_window=3)
    with pytest.raises(ValueError, match="has no softcap"):
        called(query, key, value, softcap=30.0)
    with pytest.raises(ValueError, match="6 queries but 4 keys"):
        called(query, key[:, :, :4], value[:, :, :4])


def test_decoders_are_refused() -> None:
    ids = torch.full((2, 6), 7)
    with pytest.raises(ValueError, match="not bidirectional"):
        model_of("bert", "maelm", is_decoder=True)(ids)
    config = transformers.AutoConfig.for_model("bart", vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1)
    with pytest.raises(ValueError, match="attention 'maelm': the model is a decoder, or has one"):
        transformers.AutoModel.from_config(config, attn_implementation="maelm")(ids)


def test_a_model_that_computes_attention_itself_says_so() -> None:
    """transformers takes the name for such a model too."""
    config = transformers.AutoConfig.for_model("mpnet", **SMALL)
    ids, mask = batch_of("ragged")
    model = transformers.AutoModel.from_config(config, attn_implementation="maelm")
    with pytest.raises(ValueError, match=r"computes its attention itself.*patch the model"):
        model(ids, attention_mask=mask)
