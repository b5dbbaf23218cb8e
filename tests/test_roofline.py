"""The counts behind the roofline against what real steps take, return and keep: a step on the CPU, and a step on the
kernels' path with fake tensors, which run nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import ceilings, cost, roofline
from benchmarks.classes import CLASSES
from benchmarks.cost import Cost, Step
from maelm_fast import native, ops
from maelm_fast.config import MaskingConfig, ModelConfig
from maelm_fast.data.masking import pack
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker, Vocabulary
from maelm_fast.model.flops import training_flops
from maelm_fast.model.maelm import MaeLm
from maelm_fast.ops import dispatch

FULL, MIXED = (64,) * 24, (64, 33, 50, 64, 1, 20) * 8
KERNELS = dict.fromkeys(("attention", "add_norm", "embed_packed", "feed_forward", "masked_cross_entropy"), "triton")
MODELS = ("tiny", "tiny_cross", "roberta_tiny")
ROW = {
    "date": "2026-01-01T00:00:00+00:00", "commit": "0", "device": "NVIDIA H200", "threads": 1, "load": 0.0,
    "torch": "2",
}  # fmt: skip


def needs_compiled_attention() -> None:
    if not native.has("attention", "cpu"):
        pytest.skip("without the extension a CPU's step uses another attention, which is not counted")


class Recorder(TorchDispatchMode):
    """Calls of each operator, bytes of the tensors that it is given and returns, and FLOPs of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = function.__name__.split(".")[0]
        self.calls[name] += 1
        self.bytes[name] += sum(x.nbytes for x in [*given, *(x for x in tree_leaves(out) if isinstance(x, Tensor))])
        if name in ("mm", "addmm"):
            (m, k), n = given[-2].shape, given[-1].shape[1]
            self.flops += 2 * m * k * n
        return out


def of(name: str, dropout: float = 0.0, bias: bool = False) -> ModelConfig:
    config = roofline.model_config(name, dropout, bias)
    return dataclasses.replace(config, decoder_relative_bias=config.decoder_relative_bias and bias)


@functools.cache
def traced(config: ModelConfig, original: tuple[int, ...], on: str) -> tuple[Step, Recorder, dict[int, Tensor]]:
    """What is counted, what a step was seen to do, and what it kept, by storage. on: cpu, or kernels with fp32 or bf16,
    whose tensors are fake."""
    if on != "cpu" and not dispatch.interpreted():
        pytest.skip("on the CPU the kernels' path is open to the interpreter only")
    if on == "cpu":
        needs_compiled_attention()
    elif config.decoder != "none" and not native.has("scatter_to_decoder", "cpu"):
        pytest.skip("without the extension scatter_to_decoder, which has no Triton kernel, is several operators")
    draw = np.random.default_rng(0)
    rows = [draw.integers(5, config.vocab_size - 1, n) for n in original]
    every = np.arange(len(rows))
    vocabulary = Vocabulary(config.vocab_size, config.vocab_size - 1, (config.vocab_size - 1,))
    batch = pack(rows, every, np.zeros_like(every), Masker(MaskingConfig(), vocabulary, 0, config.decoder == "none"))
    step = Step(config, cost.lengths_of(batch), "bf16" if on == "bf16" else "fp32", "cpu" if on == "cpu" else "cuda")
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x
        return x

    fake: AbstractContextManager[Any] = nullcontext() if on == "cpu" else FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = MaeLm(config)
        model.train()
        recorder = Recorder()
        saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=on == "bf16")
        with recorder, ops.backends(**({} if on == "cpu" else KERNELS)):
            with saving, autocast:
                loss = model(batch, torch.tensor(7))[0]
            loss.backward()
        excluded = [*model.parameters(), *(x for x in vars(batch).values() if isinstance(x, Tensor))]
    for x in excluded:
        kept.pop(x.untyped_storage()._cdata, None)
    return step, recorder, kept


def total(step: Step, wanted: Callable[[Cost], bool]) -> int:
    return sum(c.bytes * c.launches for c in cost.count(step) if wanted(c))


@pytest.mark.parametrize("name", ["base", "base_cross", "roberta_base", "tiny"])
@pytest.mark.parametrize("original", [(512,) * 4, (512, 300, 64, 9, 1)], ids=["full", "mixed"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("bias", [False, True])
def test_model_flops_are_those_of_the_package(name: str, original: tuple[int, ...], device: str, bias: bool) -> None:
    if device == "cpu":
        needs_compiled_attention()
    config = of(name, 0.1 if bias else 0.0, bias)
    lengths = cost.masked_lengths(config, original, 0.15)
    step = Step(config, lengths, "fp32" if device == "cpu" else "bf16", device)
    costs = cost.count(step)
    assert sum(c.model_flops * c.launches for c in costs) == training_flops(config, *lengths)
    assert sum(c.flops * c.launches for c in costs) > training_flops(config, *lengths)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("on", ["cpu", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bytes_of_row_kernels_are_those_of_their_tensors(name: str, on: str, dropout: float) -> None:
    step, recorder, _ = traced(of(name, dropout, dropout > 0), FULL, on)
    for op in ("embed_packed", "add_norm", "scatter_to_decoder"):
        for phase, suffix in (("forward", "fwd"), ("backward", "bwd")):
            backend = "native" if on == "cpu" or op == "scatter_to_decoder" else "triton"
            seen = recorder.bytes[f"{op}_{backend}_{suffix}"]
            if op == "scatter_to_decoder" and name == "tiny_cross":  # whose masked slots read no encoder row
                seen -= sum(step.lengths.encoder) * step.config.hidden_size * step.itemsize
            assert total(step, lambda c, op=op, phase=phase: (c.op, c.phase) == (op, phase)) == seen, (op, phase)  # type: ignore[misc]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("original", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_on_a_cpu_is_that_of_a_step(name: str, original: tuple[int, ...], bias: bool) -> None:
    """Two operators a layer; bytes within 2%, since positions, starts and the bias by distance are left out."""
    config = of(name, 0.1 if bias else 0.0, bias)
    step, recorder, _ = traced(config, original, "cpu")
    layers = config.num_layers + (0 if config.decoder == "none" else config.decoder_layers)
    for phase, suffix in (("forward", "fwd"), ("backward", "bwd")):
        counted = [c for c in cost.count(step) if (c.kind, c.phase) == ("attention", phase)]
        assert sum(c.launches for c in counted) == recorder.calls[f"attention_native_{suffix}"] == layers
        seen = recorder.bytes[f"attention_native_{suffix}"]
        assert sum(c.bytes * c.launches for c in counted) == pytest.approx(seen, rel=0.02)


def test_bytes_of_gelu_are_those_of_its_tensors() -> None:
    step, recorder, _ = traced(of("tiny"), MIXED, "cpu")
    seen = recorder.bytes["gelu"] + recorder.bytes["gelu_backward"]
    assert total(step, lambda c: c.op == "gelu") == seen > 0
    if not dispatch.interpreted():
        pytest.skip("on the CPU kernels run under the interpreter only")
    feed_forward = pytest.importorskip("maelm_fast.kernels.feed_forward")
    assert feed_forward.GROUP == cost.GELU_GROUP
    h, grad, bias = torch.randn(100, 64), torch.randn(100, 64), torch.randn(64)
    forward, backward = cost._Counter(dataclasses.replace(step, device="cuda")).gelu("", 1, 100, 64, with_bias=True)
    out = feed_forward.bias_gelu(h, bias)
    assert (forward.read, forward.written) == (h.nbytes + bias.nbytes, out.nbytes)
    again, _ = feed_forward.bias_gelu_bwd_(grad, h, bias)
    groups = -(-100 // feed_forward.GROUP) * bias.nbytes
    assert backward.read == h.nbytes + grad.nbytes + bias.nbytes
    assert backward.written == grad.nbytes + again.nbytes + groups


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("original", [FULL, MIXED], ids=["full", "mixed"])
def test_products_are_those_of_a_step(name: str, original: tuple[int, ...]) -> None:
    step, recorder, _ = traced(of(name), original, "cpu")
    counted = [c for c in cost.count(step) if c.kind == "gemm" and c.op != "vocabulary projection"]
    assert sum(c.flops * c.launches for c in counted) == recorder.flops


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_everything_else(name: str) -> None:
    """Additions, copies and sums of the kernels' path in fp32; within 2%, since vectors are left out."""
    step, recorder, _ = traced(of(name), FULL, "fp32")
    seen = sum(recorder.bytes[op] for op in ("add", "add_", "stack", "sum", "select_backward", "slice_backward"))
    # seen as one operator: zeros as large as the result, into which the argument is copied
    zeros = [c for c in cost.count(step) if c.op == "gradients of weight slices"]
    d = step.config.hidden_size
    seen += sum(c.launches * 3 * d * (d + 1) * 4 for c in zeros)
    elsewhere = ("ffn_out bias gradient", "chosen rows")  # within the feed-forward's operator; and seen whole
    assert total(step, lambda c: c.kind == "other" and c.op not in elsewhere) == pytest.approx(seen, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("on", ["cpu", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
def test_saved_bytes_are_those_that_autograd_keeps(name: str, on: str, bias: bool) -> None:
    config = of(name, 0.1 if bias else 0.0, bias)
    step, _, kept = traced(config, FULL, on)
    d, f = config.hidden_size, config.ffn_size
    weights = {(3 * d, d), (d, 3 * d), (d, d), (f, d), (d, f), (2 * d, d), (d, 2 * d)}
    activations = sum(x.untyped_storage().nbytes() for x in kept.values() if tuple(x.shape) not in weights)
    predicted = cost.saved(step)
    predicted.pop("weights in bf16", None)
    assert sum(predicted.values()) == pytest.approx(activations, rel=0.01)


def test_more_sequences_take_longer_and_more_memory() -> None:
    config = of("base")
    device = roofline.Device("h200", ceilings.CARDS["h200"], None)
    many = [Step(config, cost.masked_lengths(config, [512] * n, 0.15)) for n in (1, 8, 64, 256)]
    times = [roofline.predict("base", step, device).seconds for step in many]
    memory = [cost.peak_memory(step) for step in many]
    assert times == sorted(times)
    assert memory == sorted(memory)
    assert len(set(times)) == len(set(memory)) == 4
    assert times[-1] / 256 < times[0]  # what the update takes is shared


def test_attention_of_ours_is_bound_as_its_counts_say() -> None:
    """kernels/README.md: 0.53 clocks a score with bias on sm_90, 1.3 ms a layer for 256 sequences of 435."""
    card = ceilings.CARDS["h100"]
    pairs = 12 * 256 * 435**2
    taken = 0.0
    for kernel in ("fwd", "dq", "dkv"):
        limits = roofline.attention_limits(cost.Scores(kernel, pairs, 64, True, False), 0, card)
        assert max(limits, key=lambda name: limits[name]) == "instruction slots"
        taken += max(limits.values())
    assert taken * roofline.OURS[90].share == pytest.approx(1.3e-3, rel=0.03)


def table_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert roofline.main(arguments) == 0
    return capsys.readouterr().out


def test_table_has_every_class_and_says_projection(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = tmp_path / "train_step_cuda.jsonl"
    measured.write_text("")
    out = tmp_path / "roofline_cuda.jsonl"
    options = ("--device", "h200", "--measured", str(measured))
    printed = table_of(capsys, *options, "--out", str(out))
    for model in ("base", "base_cross", "roberta_base"):
        assert f"projection: {model}, 256 x 512 tokens, 15% masked, bf16, dropout 0, no bias" in printed
    for kind in CLASSES:
        assert printed.count(f"\n  {kind} ") == 3
    assert "goal 600,000, stretch 680,000" in printed
    assert "goal 705,000" in printed
    assert "no measured ceilings; published and observed elsewhere" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["projection"] for row in rows] == [True] * 3
    assert all(set(row["ms"]) == set(CLASSES) for row in rows)
    by_op = table_of(capsys, *options, "--models", "base", "--by", "op", "--dropout", "0.1", "--bias")
    assert "encoder attention dkv, backward" in by_op
    assert "goal 500,000" in by_op
    assert "base over roberta_base: 0.8" in printed
    assert "tokens/s; goal 0.85\n" in printed
    assert "tokens/s; goal 1\n" in printed  # base_cross at 15%
    other = table_of(capsys, *options, "--seq", "128", "--rate", "0.4")
    assert "; goal" not in other  # goals are for sequences of 512


def test_measured_steps_stand_beside(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = tmp_path / "train_step_cuda.jsonl"
    row = ROW | {
        "model": "base", "batch": 256, "seq": 512, "rate": 0.15, "dropout": 0.0, "bias": "none", "precision": "bf16",
        "lengths": "full", "tokens_per_s": {"median": 500e3, "q1": 490e3, "q3": 510e3},
        "kernels": dict.fromkeys(CLASSES, 1 / len(CLASSES)),
    }  # fmt: skip
    others = [
        row | {"seq": 128},
        row | {"lengths": "documents"},
        row | {"dropout": 0.1},
        row | {"device": "NVIDIA A100"},
    ]
    measured.write_text("".join(json.dumps(x) + "\n" for x in [row, *others]))
    printed = table_of(capsys, "--device", "h200", "--models", "base", "--measured", str(measured))
    assert "projection" not in printed
    assert "measured 500,000.0 [490,000.0, 510,000.0]" in printed
    total_line = next(line for line in printed.splitlines() if line.startswith("  total"))
    assert f"{1000 * 256 * 512 / 500e3:.2f}" in total_line
    gemm_line = next(line for line in printed.splitlines() if line.startswith("  gemm"))
    assert f"{1000 * 256 * 512 / 500e3 / len(CLASSES):.2f}" in gemm_line


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small operands, each call once, as if it took a millisecond."""
    monkeypatch.setitem(ceilings.SQUARE, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(ceilings, "ATTENTION_BYTES", 1 << 18)
    monkeypatch.setattr(ceilings, "turns", lambda calls, device, rounds: [[1e-3 for _ in [call()]] for call in calls])


TINY = ("--batch", "2", "--seq", "64", "--dropout", "0.1", "--bias")


@pytest.mark.usefixtures("quick")
def test_measured_ceilings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    needs_compiled_attention()
    path, nothing = tmp_path / "ceilings_cpu.jsonl", tmp_path / "train_step_cpu.jsonl"
    nothing.write_text("")
    step = ("--device", "cpu", "--models", "tiny,tiny_cross", *TINY)
    printed = table_of(capsys, *step, "--measure", "--rounds", "1", "--out", str(path))
    assert "attention bwd 54 54 64 4 32 True True" in printed
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({json.dumps([row["ceiling"], row["shape"]]) for row in rows}) == len(rows)
    newer = [{"ceiling": "copy", "shape": None, "per_s": {"median": 1e9}}]
    newer += [row | {"per_s": {"median": 1e6}} for row in rows if row["ceiling"] == "attention"]
    older = [{"ceiling": "function", "shape": "dropout"}, {"ceiling": "product", "shape": ["scores", 64, 64, 32, 4]}]
    path.write_text("".join(json.dumps(rows[-1] | row) + "\n" for row in [*older, *rows, *newer]))
    out = tmp_path / "roofline_cpu.jsonl"
    files = ("--ceilings", str(path), "--measured", str(nothing))
    printed = table_of(capsys, *step, *files, "--out", str(out))
    assert "1 GB/s, a copy" in printed
    assert "1 to 1 million pairs/s" in printed
    assert "projection" not in printed
    assert "\n  dropout " not in printed
    assert "not measured at this shape" not in printed
    # three layers of 54 of 64 tokens and one of the 10 others, each forward and backward
    pairs = 2 * 2 * 4 * (3 * 54 * 54 + 10 * 64)
    assert json.loads(out.read_text().splitlines()[0])["ms"]["attention"] == pytest.approx(pairs / 1e3)
    assert "not measured at this shape" in table_of(capsys, *step, "--batch", "3", *files)
    found = ceilings.load(path, "fp32")
    assert found is not None
    product = next(p for p in found.products if p.layout == "forward")
    assert found.rate(product._replace(m=product.m + 1)) == found.rate(product)


@pytest.mark.usefixtures("quick")
def test_attention_of_another_shape_has_to_be_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs_compiled_attention()
    monkeypatch.setattr(roofline, "RESULTS", tmp_path)
    path = tmp_path / "ceilings_cpu.jsonl"
    table_of(capsys, "--device", "cpu", "--models", "tiny", *TINY, "--measure", "--rounds", "1", "--out", str(path))
    other = ("--models", "tiny", *TINY, "--seq", "32")
    assert roofline.main(["--device", "cpu", *other]) == 2
    error = capsys.readouterr().err
    assert "no measured rate of attention fwd of 27 queries and 27 keys at 32 positions, 4 x 32, bias, dropout" in error
    assert error.count("\n") == 1
    printed = table_of(capsys, *other)
    assert printed.count("projection: tiny") == 2
    assert "cpu, not predicted: no measured rate of attention" in printed


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("extras", [False, True])
def test_what_is_measured_of_attention(direction: str, extras: bool) -> None:
    needs_compiled_attention()
    shape = cost.Attention(direction, 10, 54, 64, 4, 32, extras, extras)
    pairs, call = ceilings._attention(shape)
    with Recorder() as recorder:
        results = call()
    assert recorder.calls == {f"attention_native_{direction}": 1}
    rows = len(results[0])  # out, or the gradient of q
    assert (rows % 10, pairs) == (0, rows * 4 * 54)
    assert 4 * 32 * 4 * (rows + 2 * rows // 10 * 54) >= ceilings.ATTENTION_BYTES
    if direction == "bwd":
        assert [tuple(x.shape) for x in results[1:3]] == [(rows // 10 * 54, 4, 32)] * 2
        assert bool(results[3].numel()) == extras


def test_a_cpu_without_the_compiled_attention_is_not_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = ["--device", "cpu", "--models", "tiny", *TINY, "--measure"]
    narrow = dataclasses.replace(of("tiny"), num_heads=16)
    if native.has("attention", "cpu"):
        assert roofline.main([*measure, "--precision", "bf16"]) == 2
        assert "a CPU's step is counted in fp32 only" in capsys.readouterr().err
        with pytest.raises(UserError, match="head_dim 8"):
            Step(narrow, cost.masked_lengths(narrow, [64], 0.15), "fp32", "cpu")
    monkeypatch.setattr(native, "has", lambda op, device: False)
    assert roofline.main(measure) == 2
    error = capsys.readouterr().err
    assert "a CPU's step is counted with the compiled attention only: " in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not a row of ceilings"),
        ('{"ceiling": "product", "shape": [1]}', "line 1: not a row of ceilings"),
        (
            json.dumps(ROW | {"dtype": "fp32", "ceiling": "attention", "shape": ["fwd", 54], "per_s": {"median": 1.0}}),
            "line 1: not a row of ceilings",
        ),
        (json.dumps(ROW | {"dtype": "fp32", "ceiling": "speed", "shape": None, "per_s": {"median": 1.0}}), "line 1"),
        (
            json.dumps(ROW | {"dtype": "fp32", "ceiling": "copy", "shape": None, "per_s": {"median": 1.0}}),
            "lack square",
        ),
        (json.dumps(ROW | {"dtype": "bf16", "ceiling": "copy", "shape": None, "per_s": {"median": 1.0}}), "no fp32"),
        (None, "no file"),
    ],
)
def test_bad_ceilings_take_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str | None, message: str
) -> None:
    path = tmp_path / "ceilings.jsonl"
    if line is not None:
        path.write_text(line + "\n")
    assert roofline.main(["--device", "cpu", "--ceilings", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--device", "h200", "--seq", "1024"]) == 2
    assert "512 positions" in capsys.readouterr().err
    assert roofline.main(["--device", "h200", "--models", "based"]) == 2
    assert roofline.main(["--device", "h200", "--precision", "fp32"]) == 2  # all of a GPU's rates are bf16's
    assert "in bf16 only" in capsys.readouterr().err
    for other in ({"decoder": "self_cross"}, {"decoder_hidden_size": 512}):
        with pytest.raises(UserError, match="not counted"):
            Step(dataclasses.replace(of("base"), **other), cost.masked_lengths(of("base"), [512], 0.15))
    for wrong in (["--rate", "1.5"], ["--batch", "0"], ["--ceilings", "x"]):
        with pytest.raises(SystemExit) as stopped:
            roofline.main(wrong)
        assert stopped.value.code == 2
    with pytest.raises(UserError):
        roofline.device_of("cpu", "bf16", Path("absent.jsonl"))
