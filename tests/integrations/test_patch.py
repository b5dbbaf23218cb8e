"""patch() against the models as they come, in float64: outputs, losses, every gradient; and what it refuses."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from maelm_fast import ops
from maelm_fast.errors import UserError
from maelm_fast.integrations.transformers.families import FAMILIES, add_norm
from maelm_fast.integrations.transformers.patch import Patched, patch, unpatch
from tests.integrations.encoders import (
    LENGTHS,
    assert_gradients,
    batch_of,
    config_of,
    gradients,
    model_of,
    step,
)

EXACT = 1e-11
TASKS = ("SequenceClassification", "TokenClassification", "MultipleChoice", "QuestionAnswering")


def pair(family: str, task: str = "MaskedLM", dropout: float = 0.0, **options: Any) -> tuple[Any, Any]:
    stock = model_of(config_of(family, dropout), task)
    return stock, patch(copy.deepcopy(stock), **options)


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_states_and_every_gradient_are_stock_s(family: str, kind: str) -> None:
    stock, ours = pair(family)
    batch = batch_of(kind)
    (expected, theirs), (actual, found) = step(stock, **batch), step(ours, **batch)
    tolerance = 1e-6 if family == "modernbert" else EXACT  # whose own loss is in float32
    torch.testing.assert_close(actual.loss, expected.loss, rtol=tolerance, atol=0.0, check_dtype=False)
    assert_gradients(found, theirs, tolerance)
    assert actual.logits is None
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    kept = inputs["attention_mask"].bool()
    states = []
    for model in (stock, ours):
        model.zero_grad()
        out = model.base_model(**inputs, output_hidden_states=True)
        for x in out.hidden_states:
            states.append(x.detach())
        last = out.last_hidden_state[kept]
        last.backward(torch.randn(last.shape, dtype=last.dtype, generator=torch.Generator().manual_seed(2)))
    assert_gradients(gradients(ours), gradients(stock), EXACT)
    assert len(states) == 2 * (len(states) // 2)
    for theirs_x, ours_x in zip(states[: len(states) // 2], states[len(states) // 2 :], strict=True):
        torch.testing.assert_close(ours_x[kept], theirs_x[kept], rtol=EXACT, atol=EXACT)
        assert not ours_x[~kept].any()


@pytest.mark.parametrize("off", ["unpad", "norm", "head", "unpad and attention"])
@pytest.mark.parametrize("family", ["roberta", "distilbert", "modernbert"])
def test_each_part_alone_off(family: str, off: str) -> None:
    stock, ours = pair(family, **dict.fromkeys(off.split(" and "), False))
    batch = batch_of("ragged")
    (expected, theirs), (actual, found) = step(stock, **batch), step(ours, **batch)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0.0, check_dtype=False)
    assert_gradients(found, theirs, 1e-6)
    assert (actual.logits is None) == (off != "head")


def task_labels(task: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model with this head is called with."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    count = len(inputs["input_ids"])
    if task == "QuestionAnswering":
        return {**inputs, "start_positions": torch.zeros(count).long(), "end_positions": torch.zeros(count).long()}
    if task == "TokenClassification":
        return {**inputs, "labels": (batch["labels"] % 2).where(batch["labels"] != -100, -100)}
    if task == "MultipleChoice":
        return {**{name: x.view(count // 2, 2, -1) for name, x in inputs.items()}, "labels": torch.tensor([1, 0])}
    return {**inputs, "labels": torch.arange(count) % 2}


@pytest.mark.parametrize("kind", ["ragged", "left-padded"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ["roberta", "bert", "electra", "distilbert", "mpnet", "modernbert"])
def test_heads_of_tasks(family: str, task: str, kind: str) -> None:
    stock, ours = pair(family, task)
    inputs = task_labels(task, batch_of(kind))
    (expected, theirs), (actual, found) = step(stock, **inputs), step(ours, **inputs)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=EXACT, atol=EXACT)
    assert_gradients(found, theirs, EXACT)
    kept = inputs["attention_mask"].bool() if task == "TokenClassification" else ...
    if task != "QuestionAnswering":
        torch.testing.assert_close(actual.logits[kept], expected.logits[kept], rtol=EXACT, atol=EXACT)
    if "labels" in inputs:  # accumulated: the sum over what Trainer counted
        more = ours(**inputs, num_items_in_batch=torch.tensor(40)).loss
        torch.testing.assert_close(more, actual.loss * (inputs["labels"] != -100).sum() / 40, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("family", ["roberta", "bert", "mpnet", "electra", "modernbert"])
def test_other_inputs(family: str) -> None:
    stock, ours = pair(family, "")
    batch = batch_of("ragged")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    embeddings = stock.get_input_embeddings()(ids).detach()
    given = torch.randint(0, 140, ids.shape)
    calls = [{"inputs_embeds": embeddings}, {"input_ids": ids, "position_ids": given}, {"input_ids": ids.roll(3, 1)}]
    if family in ("bert", "electra"):
        calls.append({"input_ids": ids, "token_type_ids": ids % 2})
    for inputs in calls:
        expected, actual = (model(**inputs, attention_mask=mask) for model in (stock, ours))
        kept = mask.bool()
        torch.testing.assert_close(
            actual.last_hidden_state[kept], expected.last_hidden_state[kept], rtol=EXACT, atol=EXACT
        )
        if (pooled := getattr(expected, "pooler_output", None)) is not None:
            torch.testing.assert_close(actual.pooler_output, pooled, rtol=EXACT, atol=EXACT)
    expected, actual = (model(ids, mask, return_dict=False)[0] for model in (stock, ours))
    torch.testing.assert_close(actual[kept], expected[kept], rtol=EXACT, atol=EXACT)


def test_a_mask_with_holes_and_no_mask() -> None:
    for family in ("bert", "mpnet", "modernbert"):
        stock, ours = pair(family)
        ids = batch_of("full")["input_ids"]
        holes = torch.tensor([[1, 1, 0, 1] * 3 + [1], [1] * 13])
        for mask in (holes, None):
            expected, actual = (model.base_model(ids, attention_mask=mask)[0] for model in (stock, ours))
            kept = holes.bool() if mask is not None else torch.ones_like(ids).bool()
            torch.testing.assert_close(actual[kept], expected[kept], rtol=EXACT, atol=EXACT)


def test_logits_are_the_usual_ones_without_labels_and_in_evaluation_mode() -> None:
    stock, ours = pair("roberta")
    batch = batch_of("ragged")
    kept = batch["attention_mask"].bool()
    unlabelled = {name: x for name, x in batch.items() if name != "labels"}
    for inputs, training in ((unlabelled, True), (unlabelled, False), (batch, False)):
        expected, actual = (model.train(training)(**inputs) for model in (stock, ours))
        torch.testing.assert_close(actual.logits[kept], expected.logits[kept], rtol=EXACT, atol=EXACT)
        assert actual.logits.shape == expected.logits.shape
        assert (actual.loss is None) == (expected.loss is None)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=EXACT, atol=0.0)
    loss, logits = ours(**batch, return_dict=False)
    assert torch.equal(loss, actual.loss)
    assert torch.equal(logits, actual.logits)


def test_the_loss_is_a_sum_over_num_items_in_batch() -> None:
    stock, ours = pair("roberta")
    batch = batch_of("ragged")
    asked = int((batch["labels"] != -100).sum())
    mean = stock(**batch).loss
    for model in (ours.train(), ours.eval()):
        for items in (100, torch.tensor(100)):
            torch.testing.assert_close(
                model(**batch, num_items_in_batch=items).loss, mean * asked / 100, rtol=EXACT, atol=0.0
            )
    none = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert ours.train()(**none).loss.isnan()  # as stock's
    assert ours(**none, num_items_in_batch=100).loss == 0


def test_dropout_takes_its_share() -> None:
    ours = patch(model_of(config_of("roberta", 0.25)))
    module = ours.roberta.encoder.layer[0].output
    with torch.no_grad():
        module.dense.weight.zero_()
        module.dense.bias.fill_(1.0)
    out = module(torch.zeros(400, 40).double(), torch.zeros(400, 32).double())
    below = (out - module.LayerNorm.bias) / module.LayerNorm.weight < 0  # a row's mean lies between dropped and kept
    assert below.double().mean() == pytest.approx(0.25, abs=0.02)
    for family in ("roberta", "mpnet"):
        model = patch(model_of(config_of(family, 0.25)))
        with mock.patch.object(ops, "attention", side_effect=ops.attention) as called:
            model.base_model(torch.full((3000, 1), 7))
        (q, k, v, layout), options = called.call_args_list[0].args[:4], called.call_args_list[0].kwargs
        mixed = ops.attention(q, k, torch.ones_like(v), layout, **options)  # one token: its weight is 1, kept or not
        assert (mixed == 0).all(-1).double().mean() == pytest.approx(0.25, abs=0.02), family


def test_dropout_is_reproducible_and_differs_by_layer_and_step() -> None:
    ours = patch(model_of(config_of("roberta", 0.1)))
    batch, seeds = batch_of("ragged"), []
    real = {name: getattr(ops, name) for name in ("attention", "add_norm")}

    def recorded(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert kwargs["dropout_p"] == 0.1
            seeds.append(int(kwargs["seed"]))
            return real[name](*args, **kwargs)

        return call

    losses = []
    with mock.patch.multiple(ops, **{name: recorded(name) for name in real}):
        for start in (3, None, 3):
            if start is not None:
                torch.manual_seed(start)
            losses.append(ours(**batch).loss.item())
    assert losses[0] == losses[2] != losses[1]
    sites = 2 * 3  # per layer: attention, its output, the feed-forward's
    assert len(seeds) == 3 * sites
    assert len(set(seeds)) == 2 * sites
    assert seeds[:sites] == seeds[2 * sites :]
    ours.eval()
    assert ours(**batch).loss == ours(**batch).loss


@pytest.mark.parametrize("family", ["roberta", "mpnet", "distilbert", "modernbert"])
def test_bf16_autocast(family: str) -> None:
    stock = model_of(config_of(family), dtype=torch.float32)
    ours = patch(copy.deepcopy(stock))
    batch = batch_of("ragged")
    exact, exact_gradients = step(stock, **batch)

    def narrow(model: Any) -> tuple[float, dict[str, float]]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        model.zero_grad()
        loss.backward()
        found = gradients(model)
        apart = {name: float((found[name] - g).norm()) for name, g in exact_gradients.items()}
        return abs(loss.item() - exact.loss.item()), apart

    (off, apart), (allowed, theirs) = narrow(ours), narrow(stock)
    assert off <= allowed + 0.01 * exact.loss.item()
    scale = max(float(g.norm()) for g in exact_gradients.values())
    for name, distance in apart.items():
        assert distance <= 2 * theirs[name] + 0.01 * scale, name


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatched_it_is_stock_bit_for_bit(family: str) -> None:
    stock = model_of(config_of(family, 0.1))
    model = copy.deepcopy(stock)
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    assert patch(model) is model
    assert unpatch(model) is model
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == stock.config.to_dict()
    assert model.config._attn_implementation == stock.config._attn_implementation
    batch = batch_of("ragged")
    results = []
    for one in (stock, model):
        torch.manual_seed(5)
        results.append(step(one, **batch))
    assert torch.equal(results[0][0].logits, results[1][0].logits)
    assert all(torch.equal(g, results[1][1][name]) for name, g in results[0][1].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_stock_saves(family: str, tmp_path: Any) -> None:
    stock, ours = pair(family)
    stock.save_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    files = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
    for name in files:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    again = patch(type(stock).from_pretrained(tmp_path / "ours", dtype=torch.float64).train())
    batch = batch_of("ragged")
    assert torch.equal(again(**batch).loss, ours(**batch).loss)
    other = patch(model_of(config_of(family)))
    other.load_state_dict(stock.state_dict())


def test_only_this_instance_changes() -> None:
    """A model built from the same config object, and a copy of the patched one, are models of their own."""
    config, batch = config_of("roberta"), batch_of("ragged")
    stock, ours = model_of(config), patch(model_of(config))
    assert stock.config is config
    assert stock.config._attn_implementation == "sdpa"
    assert ours.config._attn_implementation == "maelm"
    assert all(module.config is ours.config for module in ours.modules() if hasattr(module, "config"))
    assert not any(isinstance(value, Patched) for module in stock.modules() for value in module.__dict__.values())
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        expected = ours(**batch).loss.item()
        with torch.no_grad():
            copied.lm_head.dense.weight.zero_()
            copied.roberta.encoder.layer[0].output.dense.weight.zero_()
        assert copied(**batch).loss.item() != expected
        assert ours(**batch).loss.item() == expected
        assert unpatch(copied)(**batch).logits is not None
        assert ours(**batch).logits is None


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("family", ["roberta", "distilbert", "modernbert"])
def test_gradient_checkpointing(family: str) -> None:
    """Of DistilBERT's block stock's forward runs then, with dropout of its own."""
    ours = patch(model_of(config_of(family, 0.0 if family == "distilbert" else 0.1)))
    batch, found, layers = batch_of("ragged"), [], ours.config.num_hidden_layers
    for checkpointed in (False, True):
        if checkpointed:
            ours.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        with mock.patch.object(ops, "attention", side_effect=ops.attention) as called:
            found.append(step(ours, **batch)[1])
        assert called.call_count == layers * (1 + checkpointed)
    assert_gradients(found[1], found[0], 1e-12)
    with pytest.raises(UserError, match=r"attention weights .* not under gradient checkpointing"):
        ours(**batch, output_attentions=True)


FALLS_BACK = {
    "attention weights are asked for": {"output_attentions": True},
    r"the attention mask is not \(batch, length\)": {
        "attention_mask": batch_of("ragged")["attention_mask"][:, None, None].double().log()
    },
    "a row is padding throughout": {
        "attention_mask": batch_of("ragged")["attention_mask"] * torch.tensor([[1], [1], [0], [1]])
    },
    "encoder_hidden_states is for decoders": {"encoder_hidden_states": torch.zeros(4, 3, 32).double()},
}


@pytest.mark.parametrize("why", FALLS_BACK)
def test_what_it_cannot_do_runs_as_stock_and_says_so_once(why: str, caplog: pytest.LogCaptureFixture) -> None:
    stock, ours = pair("bert", "", norm=False)
    inputs = {**batch_of("ragged"), **FALLS_BACK[why]}
    del inputs["labels"]
    with caplog.at_level(logging.WARNING):
        expected, actual = stock(**inputs), ours(**inputs)
        ours(**inputs)
    assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
    (record,) = [r for r in caplog.records if r.name.startswith("maelm_fast")]
    assert record.getMessage().startswith("BertModel runs as without patch() where")
    assert re.search(why, record.getMessage())
    assert ours.config._attn_implementation == "maelm"


def test_a_packed_row_of_the_caller_s() -> None:
    """As DataCollatorWithFlattening makes it: the attention keeps the texts apart, here as everywhere."""
    stock, ours = pair("roberta")
    batch = batch_of("ragged")
    kept = batch["attention_mask"].bool()
    lengths = kept.sum(1)
    bounds = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    positions = torch.cat([torch.arange(n) + 2 for n in lengths.tolist()])[None]
    packed = {
        "input_ids": batch["input_ids"][kept][None],
        "labels": batch["labels"][kept][None],
        "position_ids": positions,
    }
    expected = stock(**batch).loss
    for more in ({}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}, {"sequence_lengths": lengths.tolist()}):
        torch.testing.assert_close(ours(**packed, **more).loss, expected, rtol=EXACT, atol=0.0)
    padded = ours(**batch, sequence_lengths=lengths.tolist()).loss
    torch.testing.assert_close(padded, expected, rtol=EXACT, atol=0.0)
    with pytest.raises(UserError, match="not for MPNetModel"):
        patch(model_of(config_of("mpnet"), ""))(packed["input_ids"], cu_seq_lens_q=bounds)


def test_refusals() -> None:
    from transformers import AutoConfig, AutoModel

    def refused(match: str, model: Any, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            patch(model, **options)

    decoder = AutoModel.from_config(
        AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
    )
    refused("'gpt2' is not supported; there are: roberta, xlm-roberta, .*modernbert", decoder)
    refused("no model of transformers", torch.nn.Linear(1, 1))
    refused("a decoder", AutoModel.from_config(config_of("bert", is_decoder=True)))
    model = model_of(config_of("roberta"))
    refused("needs attention=True", model, attention=False)
    refused("chosen by name, which mpnet cannot", model_of(config_of("mpnet")), unpad=False)
    with pytest.raises(UserError, match="not patched"):
        unpatch(model)
    patch(model)
    refused("is patched already", model)
    refused("is patched already", model.roberta)
    with pytest.raises(UserError, match="part of a RobertaForMaskedLM"):
        unpatch(model.roberta)
    batch = batch_of("ragged")
    batch["labels"] = batch["input_ids"].clone()
    with pytest.raises(UserError, match=r"^labels stand at padding.*make them -100"):
        model(**batch)
    unpatch(model)
    model.roberta.encoder.layer[1].output.forward = lambda *args: None
    refused("RobertaOutput has a forward of its own already", model)
    assert not any("maelm_patch" in module.__dict__ for module in model.modules())


def test_a_class_of_somebody_else_s() -> None:
    """Its forward may do anything with what it gets."""
    stock = model_of(config_of("roberta"))

    class MineForMaskedLM(type(stock)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.loss = out.loss + 1.0
            return out

    mine = copy.deepcopy(stock)
    mine.__class__ = MineForMaskedLM
    batch = batch_of("ragged")
    torch.testing.assert_close(patch(mine)(**batch).loss, stock(**batch).loss + 1.0, rtol=EXACT, atol=0.0)


def test_add_norm_is_in_place_of_the_modules() -> None:
    ours = patch(model_of(config_of("distilbert")))
    with mock.patch(f"{add_norm.__module__}.add_norm", side_effect=add_norm) as called:
        ours(**batch_of("ragged"))
    assert called.call_count == 2 * 2


def test_a_sublayer_of_somebody_else_s_keeps_its_own_forward() -> None:
    """Its name ends as that of a sublayer does that patch() knows, but it computes something else."""
    from transformers.models.roberta.modeling_roberta import RobertaOutput

    class MyRobertaOutput(RobertaOutput):
        def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
            return 2.0 * super().forward(hidden_states, input_tensor)

    stock = model_of(config_of("roberta"), "MaskedLM")
    stock.base_model.encoder.layer[0].output.__class__ = MyRobertaOutput
    ours = patch(copy.deepcopy(stock))
    batch = batch_of("ragged")
    (expected, _), (actual, _) = step(stock, **batch), step(ours, **batch)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=EXACT, atol=0.0, check_dtype=False)
