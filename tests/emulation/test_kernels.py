"""Under the plugin: every kernel variant of the presets, attention over many tiles, an update, and broken kernels."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maelm_fast import ops, presets
from maelm_fast.batch import PackedBatch
from maelm_fast.config import MaskingConfig
from maelm_fast.kernels.attention_tiles import CANDIDATES, TILES, trying
from maelm_fast.masking import Masker
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.optim import build_optimizer
from maelm_fast.training.step import Numbers, TrainStep
from tests.emulation.kernels import RECORD, StandIn
from tests.emulation.machine import Kernel
from tests.emulation.memory import Fault
from tests.ops import (
    attention_checks,
    test_add_norm,
    test_embed_packed,
    test_mask_and_pack,
    test_masked_cross_entropy,
)
from tests.ops.checks import check_against_reference, deterministic, gapped_layout, poisoned_memory
from tests.training.test_step import KERNELS, OPS, VOCABULARY, batch_of, run_config

WIDTHS, T5_REACH = (128, 512, 768, 1024), 91
check_attention = functools.partial(attention_checks.check_kernel, dtype=torch.bfloat16, positions=512)
gapped = functools.partial(gapped_layout, 512)
FLOATS = (torch.float32, torch.bfloat16)


def kernel(module: str, name: str) -> StandIn:
    found = getattr(importlib.import_module(f"maelm_fast.kernels.{module}"), f"_{name}_kernel")
    assert isinstance(found, StandIn)
    return found


# Every variant that is compiled ahead of time for an A100, but for fp16.


def add_norm() -> None:
    for width in WIDTHS:
        for dtype, parameters in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2):
            for p in (0.0, 0.1):
                tensors = test_add_norm.inputs(1 + 5 * (1024 // width), width, dtype, parameters)
                check_against_reference(*test_add_norm.both("triton", p), tensors)
                check_against_reference(*test_add_norm.twice("triton", p), tensors)


def embed_packed() -> None:
    for width in WIDTHS:
        for dtype, parameters in ((None, torch.float32), (torch.bfloat16, torch.float32), (None, torch.bfloat16)):
            for p in (0.0, 0.1):
                for fixed_order in (False, True):
                    with deterministic(fixed_order):
                        tensors = test_embed_packed.inputs(1 + 5 * (1024 // width), width, parameters)
                        check_against_reference(*test_embed_packed.both("triton", p, dtype=dtype), tensors, floor=1e-5)


def feed_forward() -> None:
    module = importlib.import_module("maelm_fast.kernels.feed_forward")
    for width in (512, 2048, 3072, 4096):
        for dtype, of_bias in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2):
            h, bias, grad = torch.randn(67, width).to(dtype), torch.randn(width).to(of_bias), torch.randn(67, width)
            exact = h.double().requires_grad_()
            expected = F.gelu(exact + bias.double())
            expected.backward(grad.to(dtype).double())
            with poisoned_memory():
                forward, grad_h, of_kept = module.bias_gelu(h, bias), *(grad.to(dtype, copy=True) for _ in range(2))
                again, grad_bias = module.bias_gelu_bwd_(grad_h, h, bias)
                _, bias_of_kept = module.bias_gelu_bwd_(of_kept, h, bias, again)
            close = functools.partial(torch.testing.assert_close, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            assert all(map(torch.equal, (forward, of_kept, bias_of_kept), (again, grad_h, grad_bias)))
            close(forward.double(), expected.detach())
            close(grad_h.double(), exact.grad)
            torch.testing.assert_close(grad_bias.double(), exact.grad.sum(0), rtol=1e-5, atol=1e-5)


def masked_cross_entropy() -> None:
    for vocab in (1024, 32_768, 64_000):
        for dtype in FLOATS:
            *floats, labels = test_masked_cross_entropy.inputs(2, 8, vocab, vocab - 3, dtype)
            test_masked_cross_entropy.compare([*floats, labels], vocab - 3, "triton")
            for autocast in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    call = functools.partial(ops.masked_cross_entropy, labels=labels, vocab_size=vocab - 3)
                    leaves = [t.float().requires_grad_() if autocast else t for t in floats]  # the bias stays fp32
                    loss, _ = call(*leaves, backend="triton")
                    with torch.no_grad():
                        assert torch.equal(call(*leaves, backend="triton")[0], loss)
                    expected, _ = call(*(t.detach().float() for t in floats), backend="reference")
                    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)


def mask_and_pack() -> None:
    for lengths in ((501, 1, 0), (4096,)):
        for special in (False, True):
            for kind in test_mask_and_pack.KINDS:
                for sees_mask in (False, True):
                    masking = MaskingConfig(special_tokens=special, **kind)
                    test_mask_and_pack.check("triton", lengths, masking, sees_mask, seed=2**62 + 12345)


def attention() -> None:
    for dim in (32, 64, 96, 128):
        for reach in (0, T5_REACH):
            for p in (0.0, 0.1):
                check_attention(gapped([3, 140]), None, reach, p=p, dim=dim)
                for candidate in CANDIDATES if dim == 64 else ():
                    with trying(candidate):
                        check_attention(gapped([3, 140]), None, reach, p=p, dim=dim)


LAUNCHES = """
import json
from benchmarks.kernel_launches import OPS, launches
print(json.dumps([(l.op, l.kernel, l.calls, json.loads(l.data)) for l in launches(list(OPS)) if l.arch == 80]))
"""


@functools.cache
def launched() -> list[Any]:
    """(op, kernel, calls, what Triton makes it of) of each launch of the presets on an A100."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LAUNCHES], env=environment, capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("op", [add_norm, attention, embed_packed, feed_forward, mask_and_pack, masked_cross_entropy])
def test_every_variant_of_the_presets(op: Callable[[], None]) -> None:
    op()
    expected = {}
    for name, kernel_name, calls, made_of in launched():
        signature = made_of["signature"]
        if name == op.__name__ and "*fp16" not in signature.values() and not all("rare" in call for call in calls):
            places = [index for (index,) in made_of["constant_keys"]]
            values = dict(zip(places, made_of["constant_vals"], strict=True))
            variant = tuple((n, values.get(i, kind)) for i, (n, kind) in enumerate(signature.items()))
            expected[kernel_name, variant, made_of["options"]["num_warps"]] = calls
    assert [(kernel_name, calls) for (kernel_name, *rest), calls in expected.items()
            if (kernel_name, *rest) not in RECORD.variants] == []  # fmt: skip
    assert len(expected) >= 9


# Attention with an A100's tiles: forward 128 queries, backward 64 queries or keys (32 at head dim 128). Two programs a
# head walk through the query tiles.

AROUND_A_TILE = [1, 63, 64, 65, 0, 127, 128, 129, 31, 33]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("reach", [0, 20, T5_REACH])
def test_attention_over_many_tiles(reach: int, dim: int) -> None:
    check = functools.partial(check_attention, reach=reach, p=0.1, dim=dim, own_rounding=True)
    check(gapped(AROUND_A_TILE), None)
    check(gapped([300, 0, 90]), gapped([129, 50, 0], seed=1))


def misaligned(x: Tensor, step: int) -> Tensor:
    """An equal tensor that starts one element after a multiple of 16 bytes, in rows that do not."""
    assert step == 1
    larger = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
    larger[..., 1:-2] = x
    return larger[..., 1:-2]


@pytest.mark.parametrize(
    "dim", [32, pytest.param(64, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)]
)
def test_attention_of_misaligned_views(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_checks, "strided", misaligned)
    check_attention(gapped([200, 7]), None, T5_REACH, p=0.1, dim=dim, step=1)


# The update.


def packed_by_the_kernel(lengths: tuple[int, ...]) -> PackedBatch:
    ids = torch.from_numpy(np.random.default_rng(0).integers(4, 1023, sum(lengths))).int()
    masker = Masker(MaskingConfig(), VOCABULARY, 0, False)
    return ops.mask_and_pack(ids, lengths, range(len(lengths)), 0, masker, backend="triton")


@pytest.mark.parametrize("lengths", [(64,), pytest.param((64, 64, 3, 50), marks=pytest.mark.slow)])
def test_an_update_of_tiny(lengths: tuple[int, ...]) -> None:
    """In bf16, every kernel executed forward and backward: the numbers, and each weight's gradient, are plain
    PyTorch's; what bf16 itself costs, against fp32, is the measure."""
    config = presets.get("tiny")
    before = RECORD.variants.copy()
    batch = packed_by_the_kernel(lengths)
    results: dict[str, tuple[Numbers, dict[str, Tensor]]] = {}
    for name, backends, precision in (
        ("kernels", KERNELS, "bf16"), ("pytorch", dict.fromkeys(OPS, "reference"), "bf16"),
        ("exact", dict.fromkeys(OPS, "reference"), "fp32"),
    ):  # fmt: skip
        torch.manual_seed(0)
        model, gradients = MaeLm(config.model).train(), {}
        for key, weight in model.named_parameters():
            weight.register_post_accumulate_grad_hook(
                lambda w, key=key, into=gradients: into.update({key: w.grad.clone()})
            )
        step = TrainStep(model, build_optimizer(model, config.optim), 1.0, precision)
        with ops.backends(**backends):
            results[name] = Numbers(*step([batch], torch.tensor([5]), 1e-3).tolist()), gradients
    (numbers, mine), (theirs, plain), (_, exact) = results.values()
    assert numbers.loss == pytest.approx(theirs.loss, rel=2e-3)
    assert numbers.norm == pytest.approx(theirs.norm, rel=1e-2)
    assert mine.keys() == plain.keys() == exact.keys()
    assert len(mine) > 50
    for key, gradient in exact.items():
        rounding = (plain[key] - gradient).norm()
        assert (mine[key] - gradient).norm() <= 1.5 * rounding + 1e-3 * gradient.norm(), key
    assert len({name for name, *_ in RECORD.variants - before}) == 12


def test_updates_of_other_lengths_and_seeds_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched, not executed: what the kernels would have written is of no account."""
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)
    model = MaeLm(run_config().model).train()
    step = TrainStep(model, build_optimizer(model, run_config().optim), 1.0, "bf16")

    def compiled(update: list[tuple[int, ...]]) -> set[str]:
        monkeypatch.setattr(RECORD, "binaries", set())
        with ops.backends(**KERNELS):
            step([batch_of(1, lengths) for lengths in update], torch.arange(len(update)), 1e-3)
        return RECORD.binaries

    first = compiled([(64,) * 4])
    assert len(first) > 12
    for update in ([(64,) * 4] * 3, [(64,) * 3, (128, 3, 77, 1, 90), (16,), (5,) * 16]):
        assert compiled(update) <= first


# Broken on purpose.


@pytest.fixture
def broken() -> Iterator[Callable[..., str]]:
    """Runs a check on a kernel whose PTX was changed: what was noticed. Such faults are not counted."""
    faults = len(RECORD.faults)

    def run(which: StandIn, change: Callable[[str], str], check: Callable[[], None]) -> str:
        which.changed = change
        try:
            check()
        except Fault as fault:
            return str(fault)
        except AssertionError:
            return "wrong numbers"
        finally:
            which.changed = str
        return ""

    yield run
    del RECORD.faults[faults:]


def replaced(pattern: str, by: str, number: int | None = None) -> Callable[[str], str]:
    """Of PTX: the pattern's places, or the one of that number, changed."""

    def change(text: str) -> str:
        places = list(re.finditer(pattern, text))
        for place in reversed(places if number is None else places[number : number + 1]):
            text = text[: place.start()] + place.expand(by) + text[place.end() :]
        assert places
        return text

    return change


BARRIER = r"bar\.sync\s+0;"


def attend(dim: int = 64) -> None:
    """Three query tiles of the backward kernels, near and far key tiles."""
    check_attention(gapped([150]), None, 20, p=0.1, dim=dim)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "harmless"), [("fwd", 1), ("dq", 0), ("dkv", 1)])
def test_every_barrier_of_attention_is_missed(name: str, harmless: int, broken: Callable[..., str]) -> None:
    """Two warps meet in shared memory, or in the band. Harmless: the first behind a loop that ends with one."""
    which, texts = kernel("attention", f"attention_{name}"), []
    broken(which, lambda text: texts.append(text) or text, attend)
    barriers = len(re.findall(BARRIER, texts[0]))
    noticed = [broken(which, replaced(BARRIER, "", i), attend) for i in range(barriers)]
    assert sum("another warp" not in fault and "on the way" not in fault for fault in noticed) == harmless
    assert barriers > 5


@pytest.mark.parametrize(
    ("name", "pattern", "by", "notices"),
    [
        ("dq", BARRIER, "", "with no barrier between"),
        ("dq", r"setp\.lt\.u32 p(\d), (%r\d+), (%r\d+);", r"setp.lt.u32 p\1, \3, \2;", ""),
        ("dkv", r"mad\.wide\.s32 a, (%r\d+), -4,", r"mad.wide.s32 a, \1, 4,", ""),
        ("fwd", r"setp\.lt\.s32 p(\d*),", r"setp.le.s32 p\1,", "outside of every tensor"),
        ("fwd", r"@p ld\.global\.nc\.b32", "ld.global.nc.b32", "outside of every tensor"),
        ("fwd", r"cp\.async\.wait_group\s+0;", "cp.async.wait_group 1;", "an asynchronous copy is on the way"),
        ("fwd", r"(mma\S+ \{[^}]*\}, \{[^}]*\}, \{) (\S+), (\S+) \}", r"\1 \3, \2 }", "wrong numbers"),
    ],
    ids=[
        "barrier",
        "operands of assembly",
        "sign in assembly",
        "an absent key's position",
        "a read without a predicate",
        "wait",
        "operands of a product",
    ],
)
def test_attention_broken(name: str, pattern: str, by: str, notices: str, broken: Callable[..., str]) -> None:
    fault = broken(kernel("attention", f"attention_{name}"), replaced(pattern, by), functools.partial(attend, 32))
    assert fault
    assert notices in fault


def test_a_mask_that_is_off_by_one(broken: Callable[..., str]) -> None:
    def check() -> None:
        tensors = test_add_norm.inputs(3, 128, torch.bfloat16)
        check_against_reference(*test_add_norm.both("triton"), tensors)

    fault = broken(kernel("add_norm", "add_norm_fwd"), replaced(r"setp\.lt\.s32", "setp.le.s32"), check)
    assert "outside of every tensor" in fault
    assert "add_norm.py" in fault


def test_threads_that_hold_the_same_score_and_both_add_it(
    broken: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """dq with more warps than its tile is cut into: the band's cells are added to twice."""
    sizes = TILES[80, 32]
    monkeypatch.setitem(TILES, (80, 32), dataclasses.replace(sizes, dq=dataclasses.replace(sizes.dq, warps=8)))
    fault = broken(kernel("attention", "attention_dq"), str, functools.partial(attend, 32))
    assert "another warp" in fault or "two threads write to one place at once" in fault


def test_a_gradient_overwritten_where_another_warp_reads_it(
    broken: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """feed_forward's backward pass works in place: with a tile of fewer elements than threads that is a race."""
    module = importlib.import_module("maelm_fast.kernels.feed_forward")
    grad, h, bias = torch.randn(64, 1), torch.randn(64, 1), torch.randn(1)
    module.bias_gelu_bwd_(grad, h, bias)
    monkeypatch.setattr(module, "launch_bwd", lambda width: {"GROUP": 64, "ROWS": 64, "COLUMNS": 1})
    fault = broken(kernel("feed_forward", "feed_forward_bwd"), str, lambda: module.bias_gelu_bwd_(grad, h, bias))
    assert "another warp read it, with no barrier between" in fault
