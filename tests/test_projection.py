"""The counts behind the projection against what a step on the kernels' path takes and returns, with fake tensors, which
run nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import ceilings, projection
from benchmarks.projection import CARDS, Card, Layer, Lengths, Step, Work, clocks_a_pair, issued, seconds, step_of
from benchmarks.shares import CLASSES
from maelm_fast import native, ops
from maelm_fast.config import MaskingConfig, ModelConfig
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops import dispatch, stacked

FULL = (64,) * 24
KERNELS = dict.fromkeys(
    ("attention", "add_norm", "embed_packed", "linear", "feed_forward", "masked_cross_entropy"), "triton"
)
MODELS = ("tiny", "tiny_cross", "roberta_tiny")


class Recorder(TorchDispatchMode):
    """By operator, bytes of the tensors that it is given and returns; and the FLOPs of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = function.__name__.split(".")[0]
        self.bytes[name] += sum(x.nbytes for x in [*given, *(x for x in tree_leaves(out) if isinstance(x, Tensor))])
        if name in ("mm", "addmm"):
            (m, k), n = given[-2].shape, given[-1].shape[1]
            self.flops += 2 * m * k * n
        return out


def of(name: str, dropout: float = 0.0) -> ModelConfig:
    config = step_of(name, 1, 64, 0.15, dropout, dropout > 0).config
    return dataclasses.replace(config, decoder_relative_bias=config.decoder_relative_bias and dropout > 0)


@functools.cache
def traced(config: ModelConfig, itemsize: int, kernels: bool = True) -> tuple[Step, Recorder]:
    """What is counted, and what a step was seen to do. Without kernels every product is an operator."""
    if kernels and not dispatch.interpreted():
        pytest.skip("on the CPU the kernels' path is open to the interpreter only")
    if config.decoder != "none" and not native.has("scatter_to_decoder", "cpu"):
        pytest.skip("without the extension scatter_to_decoder, which has no Triton kernel, is several operators")
    draw = np.random.default_rng(0)
    rows = [draw.integers(5, config.vocab_size - 1, n) for n in FULL]
    every = np.arange(len(rows))
    vocabulary = Vocabulary(config.vocab_size, config.vocab_size - 1, (config.vocab_size - 1,))
    batch = pack(rows, every, np.zeros_like(every), Masker(MaskingConfig(), vocabulary, 0, config.decoder == "none"))
    step = Step(config, Lengths(*batch.lengths), itemsize)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = MaeLm(config)
        model.train()
        with Recorder() as recorder, ops.backends(**(KERNELS if kernels else {"attention": "reference"})):
            with torch.autocast("cpu", torch.bfloat16, enabled=itemsize == 2):
                loss = model(batch, torch.tensor(7))[0]
            loss.backward()
    return step, recorder


def moved_as(step: Step, kind: str) -> int:
    return sum(work.bytes for work in step.work() if work.kind == kind)


@pytest.mark.parametrize("name", ["base", "base_cross", "roberta_base", "tiny"])
@pytest.mark.parametrize("original", [(512,) * 4, (512, 300, 64, 9, 1)], ids=["full", "mixed"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_products_are_those_of_the_package(name: str, original: tuple[int, ...], dropout: float) -> None:
    """But that the chunks of the vocabulary's projection are of one size, and its table has a row for [MASK] too."""
    config = of(name, dropout)
    masked = tuple(int(n * 0.15 + 0.5) for n in original)
    seen = original if config.decoder == "none" else tuple(n - m for n, m in zip(original, masked, strict=True))
    step = Step(config, Lengths(seen, original, masked))
    products = sum(6 * math.prod(shape) for shape in step.products())
    pairs = {(layer.queries, layer.keys): 0 for layer in step.layers()}
    for layer in step.layers():
        pairs[layer.queries, layer.keys] += sum(q * k for q, k in zip(layer.queries, layer.keys, strict=True))
    attention = 6 * 2 * sum(pairs.values()) * config.hidden_size
    assert products + attention == pytest.approx(training_flops(config, *step.lengths), rel=2e-3)
    assert products + attention >= training_flops(config, *step.lengths)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bytes_of_row_kernels_are_those_of_their_tensors(name: str, dropout: float) -> None:
    step, recorder = traced(of(name, dropout), 2)
    names = ("embed_packed", "add_norm", "scatter_to_decoder", "native_layer_norm")
    seen = sum(moved for op, moved in recorder.bytes.items() if op.startswith(names))
    if name == "tiny_cross":  # whose masked slots read no encoder row
        seen -= 2 * sum(step.lengths.encoder) * step.config.hidden_size * step.a
    assert moved_as(step, "norm") == pytest.approx(seen, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_everything_else_is_that_of_a_step(name: str) -> None:
    """In fp32. Products to the FLOP; additions, copies and sums to 2% of their bytes, since vectors are left out."""
    with mock.patch.object(stacked, "stack_of", return_value=None):  # as of attention that does not write them so
        step, recorder = traced(of(name), 4, kernels=False)
    linear = [shape for shape in step.products() if shape[2] != step.config.table_size]
    assert sum(6 * math.prod(shape) for shape in linear) == recorder.flops
    beside = recorder.bytes["stack"]
    step, recorder = traced(of(name), 4)
    assert recorder.bytes["stack"] == 0  # our attention has written them so
    seen = beside + sum(recorder.bytes[op] for op in ("add", "add_", "sum", "select_backward", "slice_backward"))
    d = step.config.hidden_size
    for layer in step.layers():
        seen += sum(rows * len(names) for rows, names in layer.products) * d * 4  # summed by our attention
        if layer.queries is not layer.keys:  # seen as one operator: zeros as large as the result, then the copy
            seen += 3 * d * (d + 1) * 4
        if layer.chosen:  # seen whole
            seen += (5 * sum(layer.queries) + sum(layer.keys)) * d * 4
    assert moved_as(step, "other") == pytest.approx(seen, rel=0.02)


def test_gelus_output_is_kept_where_a_run_would_keep_it() -> None:
    """That spares the blocks one of six passes, and the head, which has PyTorch's GELU, none of five."""
    few, many = (projection.projected("base", CARDS["a100"], batch) for batch in (256, 512))
    assert (few["keep_gelu"], many["keep_gelu"]) == (True, False)
    blocks, head = (12 * 435 + 3 * 512 + 77) * 3072, 77 * 768
    spared = many["ms"]["gelu"][0] / (2 * few["ms"]["gelu"][0])
    assert spared == pytest.approx((6 * blocks + 5 * head) / (5 * blocks + 5 * head), rel=1e-4)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_our_attention_is_as_fast_as_flash_attention_2_but_for_what_is_counted_more(card: Card) -> None:
    def taken(bias: bool, dropout: bool, *kernels: str) -> float:
        layer = Layer((1,), (1,), dropout, bias)
        work = (Work("attention", 0, 7 * 2 * 64 * 10**9, kernel, 10**9, layer) for kernel in kernels)
        return sum(seconds(one, card, 1.0, 64) for one in work)

    ours = [taken(*both, *projection.OUR_PRODUCTS) for both in ((False, False), (True, False), (True, True))]
    assert ours[0] == pytest.approx(taken(False, False, "varlen"))
    assert ours == sorted(ours)
    clocks = clocks_a_pair("dq", True, True, card, 64)
    assert max(clocks) == clocks[2] == issued(card.arch, "dq", True, True) / 128  # instruction slots


def test_counts_are_those_executed_under_the_newest_triton() -> None:
    """Without moves, and on sm_90 without sm_80's products."""
    written = [json.loads(line) for line in projection.EXECUTED.read_text().splitlines()]
    of_kernel = {"kernel": "attention_dkv", "bias": True, "dropout": False, "triton": "3.9.0"}
    last = [row for row in written if of_kernel.items() <= row.items()][-1]["instructions"]
    assert issued(80, "dkv", True, False) == pytest.approx(sum(last.values()) - last["moves"])
    assert issued(80, "dkv", True, False) - issued(90, "dkv", True, False) == pytest.approx(last["products"])


def test_rows_are_ranges_and_say_what_they_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "projection.jsonl"
    assert projection.main(["--devices", "h200", "--dropout", "0.1", "--bias", "--out", str(out)]) == 0
    assert "a projection; assumed or observed elsewhere" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["model"] for row in rows] == ["base", "base_cross", "roberta_base"]
    for row in rows:
        assert row["tokens_per_s"][0] < row["tokens_per_s"][1]
        assert row["ms"].keys() == CLASSES.keys()
        assert [kind for kind, (slow, fast) in row["ms"].items() if slow != fast] == ["gemm"]
        assert 256 * 512 / row["tokens_per_s"][1] == pytest.approx(sum(ms[1] for ms in row["ms"].values()) / 1000, 1e-3)


def test_ceilings_are_rates_of_a_steps_products(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every call counts as a millisecond."""
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)

    def turns(calls: dict[str, Any], device: str, rounds: int) -> Any:
        return {name: [1e-3 for _ in [call()]] for name, call in calls.items()}, {}

    monkeypatch.setattr(ceilings, "turns", turns)
    out = tmp_path / "ceilings.jsonl"
    arguments = ["--device", "cpu", "--precision", "fp32", "--models", "tiny", "--batch", "2", "--seq", "64"]
    assert ceilings.main([*arguments, "--rounds", "1", "--out", str(out)]) == 0
    copy, products = (json.loads(line) for line in out.read_text().splitlines())
    assert copy["per_s"]["median"] == pytest.approx(2 * 2**20 / 1e-3 / 1e9, rel=1e-3)
    shapes = list(step_of("tiny", 2, 64, 0.15, 0.1, True, 4).products())
    flops, taken = sum(6 * math.prod(shape) for shape in shapes), len(shapes) * 1e-3
    assert products["per_s"]["median"] == pytest.approx(flops / taken / 1e12, abs=1e-4)
    assert ceilings.main(["--device", "cpu", "--seq", "1024"]) == 2
    assert "512 positions" in capsys.readouterr().err


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        (["--seq", "1024"], "512 positions"),
        (["--models", "based"], "based"),
        (["--rate", "1.5"], "between 0 and 1"),
        (["--batch", "0"], "at least 1"),
    ):
        assert projection.main(wrong) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    for other in ({"decoder": "self_cross"}, {"decoder_hidden_size": 512}):
        with pytest.raises(UserError, match="not counted"):
            Step(dataclasses.replace(of("base"), **other), Lengths((435,), (512,), (77,)))
