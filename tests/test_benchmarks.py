"""The benchmark harness at a size that takes seconds: its gate must hold, be able to fail, and rows add up."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._autograd import DeviceType

pytest.importorskip("transformers")

from benchmarks import contestants, gates, measure, shares, train_step
from benchmarks.contestants import Contestant, Settings
from benchmarks.measure import Failed
from benchmarks.shares import CLASSES
from maelm_fast.model.block import Block
from tests.processes import started

SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "ffn_size": 128, "vocab_size": 512}
SETTINGS = Settings(batch=2, seq=64, dropout=0.1, bias=True, shape="tiny", changes=SMALL)
GATED = ["tiny", "roberta_tiny", "hf", "padded"]


def here(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "alone", here)
    monkeypatch.setattr(train_step.Apart, "__call__", lambda self, *call: here(*call))


ABOUT = set(
    "date commit device threads load torch transformers model precision batch seq rate dropout bias lengths compiled "
    "skipped".split()
)
ROW = ABOUT | set(
    "rounds tokens_per_s step_ms ratios cpu_ratios mflop_per_token tflop_per_s mfu peak_memory_mb first_loss seconds "
    "kernels other joules_per_mtoken graphs recompiles gate".split()
)


@pytest.mark.usefixtures("in_this_process")
def test_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train_step, "PROFILED_STEPS", 1)
    monkeypatch.setitem(train_step.PART_STEPS, "cpu", 1)
    out = tmp_path / "results" / "rows.jsonl"
    arguments = [
        "--device",
        "cpu",
        "--models",
        "tiny,roberta_tiny",
        "--peers",
        "hf,padded",
        "--seq",
        "32",
        "--batch",
        "2",
    ]
    train_step.main([*arguments, "--rounds", "3", "--dropouts", "0.1", "--lengths", "documents", "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["model"], row["rounds"]) for row in lines] == [(name, 3) for name in GATED]
    rows = {row["model"]: row for row in lines}
    assert [row["bias"] for row in rows.values()] == ["t5", "t5", "none", "t5"]
    assert len({row["date"] for row in rows.values()}) == 1
    for name, row in rows.items():
        assert set(row) == ROW
        assert (row["dropout"], row["lengths"], row["compiled"], row["skipped"]) == (0.1, "documents", False, None)
        assert (row["mfu"], row["joules_per_mtoken"], row["graphs"], row["recompiles"]) == (None,) * 4
        assert set(row["ratios"]) == set(row["cpu_ratios"]) == set(rows) - {name}
        assert set(row["seconds"]) == {"data", "forward", "backward", "optimizer"}
        assert min(row["seconds"].values()) > 0
        assert list(row["kernels"]) == list(CLASSES)
        assert sum(row["kernels"].values()) == pytest.approx(1.0)
        assert row["tokens_per_s"]["q1"] <= row["tokens_per_s"]["median"] <= row["tokens_per_s"]["q3"]
        for other, ratio in row["ratios"].items():  # of three rounds the medians are one round's
            assert ratio["median"] * rows[other]["ratios"][name]["median"] == pytest.approx(1.0, abs=0.01)
    assert rows["hf"]["mflop_per_token"] > rows["roberta_tiny"]["mflop_per_token"]
    assert rows["padded"]["mflop_per_token"] > rows["tiny"]["mflop_per_token"]
    assert "10% masked" not in (printed := capsys.readouterr().out)
    assert "15% masked, dropout 0.1, bias, documents; 2 x 32 tokens" in printed


def rows_of(names: list[str], rounds: int = 1, profiled: bool = False) -> list[dict[str, Any]]:
    """Of each its last one."""
    made = train_step.compare(names, SETTINGS, rounds, measure.Apart(), profiled)
    return list({row["model"]: row for row in made}.values())


def test_a_row_has_the_highest_load_of_its_run_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work may begin after the run does, and end before it."""
    loads = iter([1.0, 1.0, 3.5, 1.2])  # at the start, and when each row is made

    def none(*arguments: Any) -> Any:
        raise ImportError

    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr(train_step, "entered", none)
    assert [row["load"] for row in rows_of(["tiny", "roberta_tiny", "hf"])] == [1.0, 3.5, 3.5]


@pytest.mark.usefixtures("in_this_process")
def test_what_cannot_run_is_a_row_with_the_reason_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any) -> Any:
        raise ImportError("No module named 'transformers'")

    def too_large(settings: Settings) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 TiB")

    monkeypatch.setattr(contestants, "hugging_face_roberta", missing)
    monkeypatch.setattr(gates, "_padded", too_large)
    monkeypatch.setattr(gates, "copy_weights", lambda ours, theirs: None)
    rows = rows_of(["hf_compiled", "hf", "padded", "tiny"])
    reasons = {row["model"]: row["skipped"] for row in rows}
    assert reasons.pop("hf").startswith("gate: hf, our weights and ours, as hf disagree")
    assert reasons == {
        "hf_compiled": "ImportError: No module named 'transformers'",
        "padded": "out of memory: CUDA out of memory.",
        "tiny": None,
    }
    assert [row["model"] for row in rows if train_step.is_wrong(row)] == ["hf"]
    assert rows[-1]["ratios"] == {}
    assert rows[-1]["kernels"] is None
    assert [set(row) for row in rows] == [ABOUT] * 3 + [ROW]
    assert "\n".join(train_step.shown(rows)).count("Not run: ") == 3


@pytest.mark.usefixtures("in_this_process")
def test_who_fails_while_being_timed_loses_its_turns_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turn, turns = Contestant.turn, []

    def fails_in_round_two(self: Contestant) -> tuple[float, float]:
        turns.append(self.name)
        if self.name == "roberta_tiny" and turns.count(self.name) == 3:
            raise RuntimeError("a bug\nmore")
        return turn(self)

    monkeypatch.setattr(Contestant, "turn", fails_in_round_two)
    rows = rows_of(["tiny", "roberta_tiny", "tiny_cross"], rounds=3)
    assert {row["model"]: (row.get("rounds"), row["skipped"]) for row in rows} == {
        "tiny": (3, None),
        "roberta_tiny": (None, "RuntimeError: a bug"),
        "tiny_cross": (3, None),
    }
    assert turns.count("roberta_tiny") == 3
    assert [set(row.get("ratios", ())) for row in rows] == [{"tiny_cross"}, set(), {"tiny"}]
    assert [train_step.is_wrong(row) for row in rows] == [False, True, False]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("turns", "left"), [(1, [("tiny", 1, 0)]), (5, [("tiny", 1, 1), ("roberta_tiny", 1, 1)])])
def test_a_run_that_is_cut_off_leaves_rows_of_the_rounds_it_had(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    turns: int,
    left: list[tuple[str, int, int]],
) -> None:
    """After one turn: the first contestant is warm. After five: both are, and the second round is not over."""
    turn, made = Contestant.turn, []

    def interrupted(self: Contestant) -> Any:
        if len(made) == turns:
            raise KeyboardInterrupt
        made.append(self.name)
        return turn(self)

    monkeypatch.setattr(Contestant, "turn", interrupted)
    out = tmp_path / "rows.jsonl"
    arguments = ["--models", "tiny,roberta_tiny", "--peers", "", "--seq", "32", "--batch", "2", "--no-profile"]
    out.write_text('{"date": "another run\'s", "model": "tiny"}\n')
    with pytest.raises(KeyboardInterrupt):
        train_step.main(["--device", "cpu", *arguments, "--dropouts", "0.1", "--rounds", "3", "--out", str(out)])
    _, *rows = map(json.loads, out.read_text().splitlines())
    assert [(row["model"], row["rounds"], len(row["ratios"])) for row in rows] == left
    for row in rows:
        assert set(row) == ROW
        assert row["tokens_per_s"]["median"] > 0
    assert ("a round takes about" in capsys.readouterr().out) == (turns == 5)


@pytest.mark.usefixtures("in_this_process")
def test_micro_batches_are_the_same_tokens_in_one_update() -> None:
    settings = Settings(**{**vars(SETTINGS), "batch": 8, "dropout": 0.0})
    whole, cut = Contestant("tiny", settings), Contestant("tiny_accumulated", settings)
    assert whole.tokens == cut.tokens == sum(batch.counts.original for batch in cut._micro_batches)
    assert len(cut._micro_batches) == contestants.MICRO_BATCHES
    assert cut.step().item() == pytest.approx(whole.step().item(), rel=0.05)  # other masks


def fails(how: str) -> str:
    if how == "exit":
        os._exit(1)
    raise (ImportError if how == "import" else Failed)(f"{how}: it cannot\nmore")


@pytest.mark.parametrize(("gib", "keep"), [(1, True), (0.02, False)])
def test_gelus_output_is_kept_as_by_a_run(gib: float, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.memory, "can_estimate", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gib * 2**30, 2**40))
    model = Contestant("tiny", SETTINGS).model
    assert {block.keep_gelu for block in model.modules() if isinstance(block, Block)} == {keep}


def test_a_process_apart_may_fail_and_die() -> None:
    apart = measure.Apart()
    here, there = os.getpid(), apart(os.getpid)
    for how, why in (("gate", "gate: it cannot\nmore"), ("import", "ImportError: import: it cannot")):
        with pytest.raises(Failed) as error:
            apart(fails, how)
        assert str(error.value) == why
    assert apart(os.getpid) == there != here
    with pytest.raises(Failed, match="its process died"):
        apart(fails, "exit")
    assert apart(os.getpid) not in (here, there)
    apart.close()


def test_what_is_measured_in_another_process_ends_with_this_one(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    (parent,) = started(1, partial(measure.alone, Path.read_bytes, fifo))
    with fifo.open("wb") as file:  # opened when the child reads, which it does until this is closed
        parent.kill()
        parent.join()
        closed = select.poll()
        closed.register(file, 0)  # what remains to be told: there is no reader any more
        assert closed.poll(60_000)


def test_turns_without_the_call_that_fails() -> None:
    calls: list[int] = []

    def second_fails(number: int) -> None:
        calls.append(number)
        if number == 1 and calls.count(1) > 3:
            raise ValueError("enough")

    taken, failed = measure.turns({str(n): partial(second_fails, n) for n in range(3)}, "cpu", 2)
    assert failed == {"1": "ValueError: enough"}
    assert {name: len(seconds) for name, seconds in taken.items()} == {"0": 2, "2": 2}


def test_a_compilation_after_the_first_step_is_counted() -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend="eager")
    double(torch.zeros(3))
    record = train_step.Record(Contestant("tiny", SETTINGS), {}, 0.0, 0.0, 1)
    with record.watched():
        double(torch.ones(3))
    assert record.recompiles == 0
    with record.watched():
        double(torch.zeros(3, dtype=torch.int64))
    assert record.recompiles == 1


def test_list_names_every_case_and_contestant_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_step, "Contestant", None)
    arguments = ["--device", "cuda", "--list", "--rates", "0.15,0.4", "--dropouts", "0,0.1", "--biases", "off,on"]
    arguments += ["--lengths", "full,documents", "--models", "base,base_compiled,roberta_base", "--batch", "4"]
    assert train_step.main([*arguments, "--peers", "hf,hf_compiled,padded"]) == 0
    listed = capsys.readouterr().out
    for rate in ("15%", "40%"):
        for setting in ("dropout 0, no bias", "dropout 0, bias", "dropout 0.1, no bias", "dropout 0.1, bias"):
            assert f"{rate} masked, {setting}, full: 4 x 512 to 512, 2048 tokens" in listed
            assert f"{rate} masked, {setting}, documents: 4 x " in listed
    for name in ("base", "base_compiled", "roberta_base", "hf", "hf_compiled", "padded"):
        assert listed.count(f"\n  {name} ") == 16
    assert "  base                   2048 tokens, 308 masked, 1.3348 TFLOP a step, 651.7 MFLOP a token" in listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "bas"], "unknown preset 'bas'"),
        (["--models", ""], "names no preset"),
        (["--models", "base,hf"], "hf belongs to --peers"),
        (["--models", "base,base"], "named twice"),
        (["--models", "base_graph"], "base_graph needs a GPU"),
        (["--models", "base_accumulated"], "base_accumulated needs a multiple of 8 sequences, not 4"),
        (["--peers", "hf_graph"], "hf_graph: _graph is for presets"),
        (["--peers", "bert"], "unknown peer bert"),
        (["--models", "roberta_base", "--peers", "padded"], "roberta_base has no self-attention decoder"),
        (["--seq", "513"], "base has 512 positions, not 513"),
        (["--batch", "0"], "--batch: must be at least 1"),
        (["--rates", "1.5"], "rate must lie between 0 and 1"),
        (["--dropouts", "much"], "--dropouts: numbers separated by commas, not much"),
        (["--biases", "yes"], "--biases: unknown yes; there are: off, on"),
        (["--lengths", "long"], "--lengths: unknown long; there are: full, documents"),
        (["--rounds", "0"], "--rounds: must be at least 1"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_step.main(["--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_documents_are_a_quarter_full_and_the_rest_spread() -> None:
    lengths = np.array(Settings(batch=64, lengths="documents").sequence_lengths())
    assert (lengths == Settings(batch=64, lengths="documents").sequence_lengths()).all()
    assert 0.2 < (lengths == 512).mean() < 0.27
    assert 0.4 < (np.median(lengths) / 512) < 0.55
    assert lengths.min() >= 8
    assert len(set(lengths)) > 40


def test_fresh_batches_have_other_masks_and_the_same_counts() -> None:
    one = Contestant("tiny", SETTINGS)
    before = one.inputs
    one.fresh(epoch=1)
    assert not torch.equal(one.inputs.masked_index, before.masked_index)
    assert one.inputs.masked.lengths == before.masked.lengths


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "gemm",
            [
                "aten::mm",
                "aten::addmm",
                "aten::linear",
                "autograd::engine::evaluate_function: AddmmBackward0",
                "MmBackward0",
                "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
                "ampere_bf16_s16816gemm_bf16_128x128_ldg8",
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
                "triton_tem_fused_mm_3",
                "_ZN7cutlass13device_kernelI4gemm",
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)",
            ],
        ),
        (
            "attention",
            [
                "aten::bmm",
                "BmmBackward0",
                "aten::scaled_dot_product_attention",
                "aten::_softmax",
                "aten::_softmax_backward_data",
                "aten::_scaled_dot_product_flash_attention_for_cpu",
                "ChunkedAttentionBackward",
                "maelm_fast::attention_triton_fwd",
                "maelm_fast::keep_weights_native_fwd",
                "_attention_fwd_kernel",
                "_attention_dkv_kernel",
                "SpreadLineBackward",
                "triton_tem_fused_flex_attention_0",
                "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>",
                "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::Collective>>>(Params)",
                "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
                "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
                "triton_per_fused__softmax_add_dropout_4",
            ],
        ),
        (
            "norm",
            [
                "aten::native_layer_norm",
                "NativeLayerNormBackward0",
                "maelm_fast::add_norm_native_bwd",
                "_embed_packed_bwd_kernel",
                "_joined_runs_kernel",
                "maelm_fast::scatter_to_decoder_native_fwd",
                "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
                "_add_norm_fwd_kernel",
                "triton_per_fused_add_addmm_native_layer_norm_12",
                "cpp_fused_add_native_dropout_native_layer_norm_2",
            ],
        ),
        (
            "gelu",
            [
                "aten::gelu",
                "aten::gelu_backward",
                "_feed_forward_bwd_kernel",
                "triton_poi_fused_addmm_gelu_3",
                "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(float)::lambda>",
            ],
        ),
        (
            "loss",
            [
                "aten::_log_softmax",
                "LogSoftmaxBackward0",
                "NllLossBackward0",
                "_masked_cross_entropy_kernel",
                "void (anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, LogSoftMaxForwardEpilogue>",
                "triton_red_fused__log_softmax_nll_loss_forward_7",
            ],
        ),
        ("dropout", ["aten::dropout", "aten::bernoulli_", "NativeDropoutBackward0", "fused_dropout_kernel_vec"]),
        (
            "optimizer",
            [
                "Optimizer.step#AdamW.step",
                "aten::_fused_adamw_",
                "aten::_foreach_norm",
                "aten::linalg_vector_norm",
                "void at::native::multi_tensor_apply_kernel<TensorListMetadata, FusedAdamMathFunctor<float, 4>>",
            ],
        ),
        (
            None,
            [
                "aten::add",
                "aten::copy_",
                "aten::index",
                "Memcpy HtoD (Pinned -> Device)",
                "aten::cat",
                "aten::mul",
                "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
                "aten::comm",
                "_mask_and_pack_fwd_kernel",
                "triton_poi_fused_addmm_view_1",
                "Torch-Compiled Region: 0/0",
                "## Call CompiledFxGraph f7attn ##",
            ],
        ),
    ],
)
def test_class_of_a_name(kind: str | None, names: list[str]) -> None:
    assert {name: shares.class_of(name) for name in names} == dict.fromkeys(names, kind)


def event(name: str, parent: Any = None, **fields: Any) -> Any:
    defaults = {
        "name": name,
        "cpu_parent": parent,
        "sequence_nr": -1,
        "kernels": [],
        "self_cpu_time_total": 1.0,
        "device_type": DeviceType.CPU,
        "is_user_annotation": False,
        "self_device_time_total": 0.0,
    }
    return SimpleNamespace(**{**defaults, **fields})


def step_events() -> Iterator[Any]:
    """Dropout within attention and the copy that its gradient takes; a product and the sum within the loss."""
    scope = event("attention")
    yield scope
    forward = event("aten::mul", event("aten::dropout", scope), sequence_nr=7)
    yield forward
    node = event("autograd::engine::evaluate_function: MulBackward0", sequence_nr=7)
    yield event("aten::copy_", event("MulBackward0", node, sequence_nr=7))
    loss = event("maelm_fast::masked_cross_entropy_pytorch_fwd")
    yield event("aten::mm", loss)
    yield event("aten::sum", loss)
    yield event("maelm_fast::loss_rows_native_bwd")
    yield event("GeneratedBackwardFor_maelm_fast_linear_native_fwd_default")
    yield event("aten::add")


def test_an_operator_takes_the_class_of_what_is_around_it_and_of_its_forward_operator() -> None:
    kinds = [kind for _, kind, _ in shares.times(step_events(), "cpu")]
    assert kinds == ["attention", "attention", "attention", "gemm", "loss", "loss", "gemm", "other"]


def test_a_kernel_takes_its_operators_class_and_one_without_operator_its_own() -> None:
    def kernel(name: str, duration: float) -> Any:
        return SimpleNamespace(name=name, duration=duration)

    def on_device(name: str, duration: float, annotation: bool = False) -> Any:
        fields = {"device_type": DeviceType.CUDA, "self_device_time_total": duration, "is_user_annotation": annotation}
        return event(name, **fields)

    events = [
        event("aten::copy_", event("attention"), kernels=[kernel("elementwise", 2.0)]),
        event("aten::add", kernels=[kernel("elementwise", 3.0)]),
        event("aten::mm", kernels=[kernel("nvjet", 5.0), kernel("splitKreduce", 1.0)]),
        on_device("elementwise", 5.0),
        on_device("nvjet", 5.0),
        on_device("splitKreduce", 1.0),
        on_device("_add_norm_fwd_kernel", 4.0),
        on_device("Optimizer.step#AdamW.step", 50.0, annotation=True),
    ]
    assert list(shares.times(events, "cuda")) == [
        ("elementwise", "attention", 2.0),
        ("elementwise", "other", 3.0),
        ("nvjet", "gemm", 5.0),
        ("splitKreduce", "gemm", 1.0),
        ("_add_norm_fwd_kernel", "norm", 4.0),
    ]


@pytest.mark.parametrize("name", ["tiny", "padded"])
def test_shares_of_a_step(name: str) -> None:
    one = Contestant(name, Settings(**{**vars(SETTINGS), "lengths": "documents"}))
    by_class, rest = shares.shares(one.step, "cpu", 1)
    assert sum(by_class.values()) == pytest.approx(1.0)
    assert all((by_class[kind] > 0) == (kind != "dropout" or name == "padded") for kind in CLASSES)
    assert not [found for found in rest if shares.class_of(found) not in (None, "gemm")]
    assert not {"aten::where", "aten::masked_fill_", "aten::_softmax", "aten::bincount"} & set(rest)
