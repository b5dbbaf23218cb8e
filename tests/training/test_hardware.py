"""The precision a run takes, on a machine that has bf16 matrix instructions and on one that has not."""

from __future__ import annotations

import pytest
import torch

from maelm_fast.config import RuntimeConfig
from maelm_fast.model.flops import peak_flops
from maelm_fast.training import hardware


@pytest.mark.parametrize(
    ("asked", "device", "has_bf16", "taken", "warned"),
    [
        ("auto", "cpu", False, "fp32", False),
        ("auto", "cpu", True, "bf16", False),
        ("auto", "cuda", True, "bf16", False),
        ("auto", "cuda", False, "fp32", False),
        ("bf16", "cuda", False, "bf16", True),
        ("bf16", "cpu", False, "bf16", True),
        ("bf16", "cpu", True, "bf16", False),
        ("fp32", "cpu", True, "fp32", False),
        ("fp32", "cuda", False, "fp32", False),
    ],
)
def test_precision(
    asked: str,
    device: str,
    has_bf16: bool,
    taken: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hardware, "cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0) if has_bf16 else (7, 5))
    assert hardware.choose_precision(RuntimeConfig(precision=asked), torch.device(device)) == taken  # type: ignore[arg-type]
    assert ("no bf16 matrix instructions" in caplog.text) is warned


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
    ],
)
def test_peaks_are_those_of_the_card(name: str, tera: int) -> None:
    assert peak_flops(name) == tera * 1e12
    assert peak_flops("Tesla T4") is None


def test_a_deterministic_run_is_so_only_inside() -> None:
    def state() -> tuple[bool, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            not torch.utils.deterministic.fill_uninitialized_memory,
            not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        )

    before = state()
    with hardware.deterministic(True):
        assert state() == (True, True, True)
    assert state() == before
    with hardware.deterministic(False):
        assert state() == before


def test_want_of_memory_is_seen_behind_the_error_of_the_recording_that_it_broke_off() -> None:
    def broken_off() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError) as caught:
        broken_off()
    assert hardware.is_out_of_memory(caught.value)
    assert not hardware.is_out_of_memory(RuntimeError("operation failed due to a previous error during capture"))
