"""The doctor's lists agree with pyproject.toml, and what it finds decides its exit code."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from maelm_fast import native
from maelm_fast.cli import doctor
from maelm_fast.config import BackendConfig
from maelm_fast.errors import UserError

PYPROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
OPS = tuple(field.name for field in dataclasses.fields(BackendConfig))
FIXED = re.compile(r"[\w-]+")


def names(requirements: list[str]) -> set[str]:
    return {match[0].lower() for requirement in requirements if (match := FIXED.match(requirement))}


def hide(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Makes packages look absent (None) or of another version."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return real(name)
        if versions[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(versions[name])

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_its_lists_are_those_of_pyproject() -> None:
    project = PYPROJECT["project"]
    assert {*doctor.REQUIRED, "triton"} == names(project["dependencies"])
    assert f"torch>={doctor._dotted(doctor.TORCH)}" in project["dependencies"]
    assert project["requires-python"] == f">={doctor._dotted(doctor.PYTHON)}"
    assert doctor.OPTIONAL.keys() - {"triton"} <= set().union(*map(names, project["optional-dependencies"].values()))


def test_here_all_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    for word in ("maelm_fast", "torch", "PyTorch build", "host code", *OPS, "tiny model on cpu"):
        assert word in printed
    assert "fail" not in printed
    assert "\x1b" not in printed
    assert all(line == line.rstrip() for line in printed.splitlines())


def test_an_optional_package_that_is_missing_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, scipy=None)
    rows = {row.name: row for row in doctor.package_rows()}
    assert rows["scipy"].state == "note"
    assert "pip install scipy" in rows["scipy"].found


@pytest.mark.parametrize("version", [None, "2.9.1", "2.10.0+cpu"])
def test_a_required_package_missing_or_too_old_fails_without_importing_the_rest(
    version: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, torch=version)
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "not fine: torch" in printed
    assert "self-test" not in printed


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("libcudart.so: cannot open shared object file")])
def test_a_package_that_is_installed_but_broken_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> list[doctor.Row]:
        raise error

    monkeypatch.setattr(doctor, "hardware_rows", broken)
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert str(error) in printed
    assert "not fine: import" in printed


def test_a_self_test_that_is_not_finite_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from maelm_fast.model.maelm import MaeLm

    def forward(model: MaeLm, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        return model.encoder.token_table.sum() * float("inf"), torch.zeros(())

    monkeypatch.setattr(MaeLm, "forward", forward)
    monkeypatch.setattr(doctor, "_devices", lambda: ["cpu"])
    assert doctor.main([]) == 1
    assert "not finite" in capsys.readouterr().out


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(doctor, "_devices", lambda: ["cpu"])
    row = next(row for row in doctor.backend_rows() if row.name == "add_norm")
    assert row.state == "ok"
    assert "not triton: the tensors are on the CPU" in row.found


def test_the_backend_that_auto_takes_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from maelm_fast.ops import dispatch

    monkeypatch.setattr(doctor, "_devices", lambda: ["cpu"])
    monkeypatch.setattr(dispatch, "native_reasons", lambda op, *tensors: ["not built here"])
    monkeypatch.setattr(native, "reasons", {"ops": "not built here"})
    rows = {row.name: row.found for row in doctor.backend_rows()}
    assert rows["embed_packed"].startswith("cpu: reference (")
    assert "not native: the extension is missing, see above" in rows["embed_packed"]
    assert rows["mask_and_pack"].startswith("cpu: host (")


def test_every_op_is_tried() -> None:
    assert [row.name for row in doctor.backend_rows()] == list(OPS)


def test_without_the_extension_it_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "host", lambda: None)
    monkeypatch.setattr(native, "ops", lambda: False)
    monkeypatch.setattr(native, "reasons", {"host": "no compiler", "ops": "no compiler"})
    rows = doctor.extension_rows()
    assert [row.state for row in rows] == ["note", "note"]
    assert "NumPy" in rows[0].found
    assert "plain PyTorch" in rows[1].found


def test_it_needs_nothing_but_the_standard_library_to_start() -> None:
    code = "import sys, maelm_fast.cli.doctor; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="takes no '--fix'"):
        doctor.main(["--fix"])
