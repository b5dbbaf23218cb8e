"""The command line finds every command and its help."""

from __future__ import annotations

import importlib
import io
import logging
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maelm_fast import __version__, presets
from maelm_fast.cli.common import parse
from maelm_fast.cli.main import COMMANDS, Stderr, main
from maelm_fast.cli.pretrain import parsed
from maelm_fast.stop import Stopped
from maelm_fast.training.rundir import RunDir


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
    _, run = parsed([*common, "--config", str(file), "--optim.lr", "2e-3"])
    assert (run.optim.lr, run.optim.betas, run.model.dropout, run.seed) == (2e-3, (0.9, 0.95), 0.3, 7)
    assert run.optim.max_steps == presets.get("base").optim.max_steps
    assert parsed(common)[1] == presets.get("base")


def test_options_are_spelt_with_hyphens_or_underscores_and_the_usual_ones_are_short() -> None:
    common = ["tiny", "--data", "~/store", "--out=~/runs/x"]
    options, long = parsed([*common, "--optim.batch_size", "8", "--optim.max-steps=90", "--optim.warmup_steps", "9"])
    _, short = parsed([*common, "--batch_size", "8", "--steps", "90", "--warmup", "0.1"])
    assert long == short
    assert (long.optim.batch_size, long.optim.max_steps, long.optim.warmup_steps) == (8, 90, 9)
    assert (options.data, options.out) == (Path.home() / "store", Path.home() / "runs" / "x")


@pytest.mark.parametrize("preset", presets.names())
def test_a_short_run_needs_one_option(preset: str) -> None:
    """It warms up for the preset's share of its steps."""
    full, common = presets.get(preset).optim, [preset, "--data", "d", "--out", "o"]
    assert parsed(common)[1].optim.warmup_steps == full.warmup_steps
    short = parsed([*common, "--steps", "50"])[1].optim
    assert (short.max_steps, short.warmup_steps) == (50, round(50 * full.warmup_steps / full.max_steps))
    assert type(short.warmup_steps) is int


COMMAND_LINES = [
    *([name] for name in COMMANDS if name not in ("data", "checkpoint", "paper", "doctor")),
    ["data", "prepare"],
    ["data", "show"],
    *(["checkpoint", name] for name in ("list", "verify", "consolidate", "prune")),
    ["paper", "fig1"],
    ["paper", "sweep"],
    ["paper", "prompt"],
    ["paper", "theory"],
]


@pytest.mark.parametrize("command", COMMAND_LINES, ids=" ".join)
def test_help_is_a_screen_with_examples_that_are_right(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    helped(command, "--help")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    name = "experiment" if command[1:] == ["fig1"] else command[-1] if command[0] == "paper" else command[0]
    module = importlib.import_module(f"maelm_fast.cli.{'paper.' if command[0] == 'paper' else ''}{name}")
    monkeypatch.setattr(module, "parse", lambda *given, **settings: parsed_well(parse(*given, **settings)))
    examples = " ".join(lines[1 : lines.index("", 2)]).replace("\\", "").split("maelm-fast ")[1:]
    assert len(examples) >= 2
    for example in examples:
        with pytest.raises(Parsed):
            main(shlex.split(example.partition(" > ")[0]))


class Parsed(Exception):
    pass


def parsed_well(_: object) -> None:
    raise Parsed


def helped(command: list[str], option: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command, option])


def test_all_of_the_help_has_the_presets_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    helped(["pretrain", "tiny"], "--help-all")
    told = " ".join(capsys.readouterr().out.split())
    assert "--model.hidden-size N (default: 128)" in told
    assert "--runtime.backend.attention {auto,flash," in told
    helped(["pretrain", "tiny"], "--help")
    assert "--model.hidden-size" not in capsys.readouterr().out


def test_help_imports_no_torch() -> None:
    code = "import sys; from maelm_fast.cli.main import main; main(['--help']); print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("old", ["reproduce", "sweep", "prompt", "theory"])
def test_a_command_that_moved_says_where_to(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([old, "--help"]) == 2
    new = "paper EXPERIMENT" if old == "reproduce" else f"paper {old}"
    assert capsys.readouterr().err == f"error: 'maelm-fast {old}' is now 'maelm-fast {new}'\n"


def test_a_run_goes_on_with_the_warm_up_that_it_was_started_with(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one of an older version, which had the preset's number of updates and not its share."""
    command = ["pretrain", "tiny", "--data", str(store), "--out", str(tmp_path / "run"), "--steps", "3"]
    assert main([*command, "--warmup", "2"]) == 0
    assert main(command) == 0
    assert "already finished" in capsys.readouterr().out
    assert main([*command, "--warmup", "1"]) == 2
    assert "was started with optim.warmup_steps=2" in capsys.readouterr().err


def test_a_run_goes_on_with_what_it_was_started_with_and_not_with_todays_preset(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be another in a newer version, as may what was asked for at its start; but it is not turned into what
    is asked for now."""
    command = ["pretrain", "tiny", "--data", str(store), "--out", str(tmp_path / "run")]
    assert main([*command, "--steps", "3", "--seed", "5", "--masking.rate", "0.3", "--model.num-layers", "1"]) == 0
    started = RunDir(tmp_path / "run").read_config()[1]
    changed = presets.change(presets.get("tiny"), masking={"rate": 0.5}, optim={"lr": 9e-3}, model={"ffn_size": 256})
    monkeypatch.setitem(presets._PRESETS, "tiny", lambda: changed)
    assert main(command) == 0
    assert "already finished (max_steps) at step 3" in capsys.readouterr().out
    assert RunDir(tmp_path / "run").read_config()[1] == started
    assert main([*command, "--lr", "9e-3"]) == 2
    assert "was started with optim.lr=0.001; use the same" in capsys.readouterr().err
    assert main(["pretrain", "tiny_cross", *command[2:]]) == 2
    assert "was started with " in capsys.readouterr().err


def test_what_is_logged_goes_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a progress line is shown, rich has put its own there."""
    handler = Stderr()
    monkeypatch.setattr("sys.stderr", now := io.StringIO())
    handler.emit(logging.makeLogRecord({"msg": "above the line"}))
    assert now.getvalue() == "above the line\n"
