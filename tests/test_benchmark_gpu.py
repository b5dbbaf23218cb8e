"""What make gpu runs: every step is named with its limit, and one that fails or hangs keeps no other from running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Step
from maelm_fast import native

ROOT = Path(__file__).resolve().parents[1]
SECOND = 1 / 60


def test_every_target_ends_well_within_eight_minutes() -> None:
    for name, steps in gpu.targets().items():
        assert sum(step.limit for step in steps) <= 7.5, name
        assert all(step.estimate < step.limit for step in steps)
    assert list(gpu.targets()) == ["gate", "headline", "attention", "rest"]
    assert sum(step.estimate for step in gpu.targets()["gate"]) < 3


def test_steps_name_what_exists() -> None:
    for step in (step for steps in gpu.targets().values() for step in steps):
        for word in step.command:
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word
        if step.command[0].startswith("benchmarks."):
            assert (ROOT / f"{step.command[0].replace('.', '/')}.py").exists()


def test_the_makefile_has_every_target(tmp_path: Path) -> None:
    for target, rest in (("gpu", ""), ("gpu-gate", "gate"), ("gpu-rest", "rest"), ("gpu-list", "--list")):
        command = ["make", "--no-print-directory", "--dry-run", target, "PYTHON=python9", f"RESULTS={tmp_path}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.split() == f"PYTHONPATH=. python9 -m benchmarks.gpu {rest} --results {tmp_path}".split()


def step(name: str, code: str, limit: float = 1.0) -> Step:
    return Step(name, ("timeit", "-n", "1", "-r", "1", code), 0.5, limit)


def test_what_fails_or_hangs_keeps_nothing_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forks = "import subprocess as s; s.run(['sleep', '60'])"  # a child that holds the output open is stopped too
    steps = [step("bad", "raise ValueError"), step("hangs", forks, SECOND), step("good", "print('it ran')")]
    monkeypatch.setattr(gpu, "targets", lambda: {"first": steps[:2], "second": steps[2:]})
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    assert gpu.main(["--results", str(tmp_path / "new")]) == 1
    last = capsys.readouterr().out.splitlines()[-3:]
    assert [line.rsplit(",", 1)[0] for line in last] == [
        "gpu-first: bad: failed (1)",
        "gpu-first: hangs: stopped",
        "gpu-second: good: passed",
    ]
    assert float(last[1].split()[-2]) < 0.3
    assert "it ran" in (tmp_path / "new" / "gpu.log").read_text()
    assert gpu.main(["second", "--results", str(tmp_path)]) == 0


def test_without_a_gpu_nothing_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["gate"])
    assert "no CUDA device is visible" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["gates"])
    assert "unknown target gates; there are: gate, headline, attention, rest" in capsys.readouterr().err


def test_list_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["attention", "rest", "--list", "--results", "R"]) == 0
    listed = capsys.readouterr().out
    assert "gpu-attention: about 4.0 min, an estimate; at most 6.5" in listed
    assert "-m benchmarks.attention --device cuda --cases kept --out R/attention_cuda.jsonl" in listed
    assert "kept, bias, dropout 0: 256 x 435 of 512 positions" in listed
    assert "base_graph" in listed
    assert "small_graph            32768 tokens" in listed
    assert "masked_cross_entropy: ours, pytorch, compiled, liger" in listed


@pytest.mark.parametrize("compiler", [None, "/opt/bin/nvcc"])
def test_a_compiler_whose_op_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(native, "host", lambda: None)
    monkeypatch.setattr(native, "reasons", {"host": "it was not built", "ops": "no"})
    monkeypatch.setattr(native, "has", lambda op, device: (op, device) != ("scatter_to_decoder", "cuda"))
    monkeypatch.setattr(native, "why_not", lambda device: f"no code for {device}")
    problems = ["the extension: setup.py ended with 1", "the host code: it was not built"]
    if compiler:
        problems.append("scatter_to_decoder: /opt/bin/nvcc is there, but no code for cuda")
    assert gpu.built(1) == problems
    monkeypatch.setattr(native, "host", lambda: sys)
    monkeypatch.setattr(native, "has", lambda op, device: True)
    assert gpu.built(0) == []
