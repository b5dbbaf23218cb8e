"""The command line finds every command and its help."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest

from maelm_fast import __version__, presets
from maelm_fast.cli.main import COMMANDS, main
from maelm_fast.cli.pretrain import parse
from maelm_fast.stop import Stopped


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([command, "--help"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 0
    assert f"maelm-fast {command}" in capsys.readouterr().out


def test_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"maelm-fast {__version__}\n"


@pytest.mark.parametrize(
    ("ended_by", "code"),
    [(KeyboardInterrupt(), 130), (Stopped(3), 143), (Stopped(3, signal.SIGINT), 130), (BrokenPipeError(), 0)],
)
def test_an_end_from_outside_is_quiet(
    ended_by: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal, before or while something trains, and `| head` that has seen enough."""

    def ended(_: list[str]) -> int:
        raise ended_by

    monkeypatch.setattr("maelm_fast.cli.presets.main", ended)
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    monkeypatch.setattr(stderr, "close", lambda: None)
    assert main(["presets"]) == code
    assert stderr.getvalue() == capsys.readouterr().out == ""


def test_presets_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == presets.names()
    assert main(["presets", "base++"]) == 0
    assert "relative_buckets: 64" in capsys.readouterr().out


def test_options_yaml_and_order_of_precedence(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optim:\n  lr: 1e-3\n  betas: [0.9, 0.95]\nmodel: {dropout: 0.3}\nseed: 7\n")
    common = ["base", "--data", "d", "--out", "o"]
    run = parse([*common, "--config", str(file), "--optim.lr", "2e-3"])["run"]
    assert (run.optim.lr, run.optim.betas, run.model.dropout, run.seed) == (2e-3, (0.9, 0.95), 0.3, 7)
    assert run.optim.max_steps == presets.get("base").optim.max_steps
    assert parse(common)["run"] == presets.get("base")


@pytest.mark.parametrize("old", ["reproduce", "sweep", "prompt", "theory"])
def test_a_command_that_moved_says_where_to(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([old, "--help"]) == 2
    new = "paper EXPERIMENT" if old == "reproduce" else f"paper {old}"
    assert capsys.readouterr().err == f"error: 'maelm-fast {old}' is now 'maelm-fast {new}'\n"


@pytest.mark.parametrize("what", ["fig1", "sweep", "prompt", "theory"])
def test_the_papers_commands_have_help(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["paper", what, "--help"])
    assert "usage: maelm-fast paper" in capsys.readouterr().out
