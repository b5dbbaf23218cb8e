"""The report on rows made up here: what counts, how it is judged. And: the READMEs say what the rows say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, report_step, rows
from benchmarks.goals import GOALS
from benchmarks.shares import CLASSES

H200 = "NVIDIA H200"


def quartiles(median: float) -> dict[str, float]:
    return {"median": median, "q1": 0.97 * median, "q3": 1.04 * median}


def contestants(speeds: dict[str, float], minute: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Rows of one run of train_step with these tokens/s."""
    shared = {
        "date": f"2026-11-22T10:{minute:02}:00+00:00",
        "commit": "abc1234",
        "device": "AMD EPYC",
        "threads": 2,
        "load": 1.9,
        "torch": "2.13.0+cpu",
        "transformers": "5.23.0",
        "precision": "fp32",
        "batch": 4,
        "seq": 512,
        "rate": 0.15,
        "dropout": 0.1,
        "bias": "t5",
        "lengths": "full",
        "compiled": False,
        "rounds": 5,
        "mflop_per_token": 651.7,
        "tflop_per_s": 0.1,
        "mfu": None,
        "seconds": None,
        "kernels": None,
        "joules_per_mtoken": None,
        "first_loss": 10.5,
        "gate": {},
        "recompiles": None,
        "skipped": None,
    } | changes
    return [
        shared
        | {
            "model": name,
            "bias": "none" if name.startswith("hf") else shared["bias"],
            "tokens_per_s": quartiles(speed),
            "ratios": {other: quartiles(speed / theirs) for other, theirs in speeds.items() if other != name},
            "cpu_ratios": None,
            "peak_memory_mb": 3899,
        }
        for name, speed in speeds.items()
    ]


def skipped(name: str, reason: str, minute: int = 0) -> dict[str, Any]:
    (row,) = contestants({name: 1.0}, minute)
    timing = ("tokens_per_s", "ratios", "cpu_ratios", "mfu", "peak_memory_mb", "seconds", "kernels", "rounds")
    return row | dict.fromkeys(timing) | {"skipped": reason}


SPEEDS = {"base": 190.0, "base_cross": 226.0, "roberta_base": 220.0, "hf": 100.0}
PLAIN = {"base": 186.0, "roberta_base": 228.0, "hf": 153.0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with its READMEs and no rows."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name, regions in report.REGIONS.items():
        parts = [f"before {r}\n<!-- results:{r} -->\nby hand: {r}\n<!-- /results -->\n" for r in regions]
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# Title\n\n" + "".join(parts) + "after\n")
    return tmp_path


def put(root: Path, found: Sequence[dict[str, Any]], name: str = "train_step_cpu.jsonl") -> None:
    with (root / "benchmarks" / "results" / name).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)


def printed(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert report.main(["--root", str(root), *arguments]) == 0
    return capsys.readouterr().out


def test_newest_case_of_a_setting_counts_whole(root: Path) -> None:
    put(root, contestants(SPEEDS, minute=5))
    put(root, contestants({"base": 1.0, "hf_flash": 1.0}, minute=1))  # older, though later in the file
    put(root, contestants(PLAIN, minute=2, dropout=0.0, bias="none"))
    put(root, contestants(SPEEDS, minute=2, device=H200, precision="bf16"), "train_step_cuda.jsonl")
    cases = rows.read(root).cases
    assert [(c.shared["device"], c.dropout, c.bias, list(c.rows)) for c in cases] == [
        (H200, 0.1, "t5", list(SPEEDS)),
        ("AMD EPYC", 0.1, "t5", list(SPEEDS)),
        ("AMD EPYC", 0.0, "none", list(PLAIN)),
    ]
    assert cases[1].rows["base"]["tokens_per_s"]["median"] == 190.0
    assert [c.on_gpu for c in cases] == [True, False, False]


def test_the_last_row_of_a_contestant_counts_and_a_run_that_was_cut_off_only_if_there_is_no_other(root: Path) -> None:
    alone = [row | {"rounds": 1, "ratios": {}} for row in contestants({"base": 150.0, "hf": 90.0}, minute=3)]
    put(root, alone[:1])
    assert rows.read(root).cases[0].rows["base"]["rounds"] == 1
    put(root, [*alone[1:], *contestants({"base": 190.0}, minute=3), skipped("hf", "out of memory", minute=3)])
    (case,) = rows.read(root).cases
    assert (case.rows["base"]["tokens_per_s"]["median"], case.rows["hf"]["skipped"]) == (190.0, "out of memory")
    put(root, contestants(SPEEDS, minute=1))
    (case,) = rows.read(root).cases
    assert list(case.rows) == list(SPEEDS)  # older, but compared


def test_rows_of_what_did_not_run_are_no_part_of_the_tables(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (machine,) = contestants({"base": 1.0})
    for name in ("ops_cuda.jsonl", "attention_cuda.jsonl"):
        put(root, [{**machine, "contestant": "flex", "skipped": "RuntimeError: no"}], name)
    assert not any(rows.read(root).rows.values())
    assert "flex" not in printed(root, capsys)


def test_unknown_files_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(root, [{"x": 1}], "other.jsonl")
    assert report.main(["--root", str(root)]) == 0
    out, err = capsys.readouterr()
    assert report_step.NO_GPU in out
    assert "other.jsonl: not used" in err


def test_case_tables_show_what_was_measured_and_what_was_not(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = contestants(
        SPEEDS,
        mfu=0.412,
        joules_per_mtoken=812.4,
        recompiles=0,
        seconds={"forward": 3.25, "backward": 6.5},
        kernels=dict.fromkeys(CLASSES, 1 / 8),
        cpu_ratios=None,
    )
    put(root, [*found, skipped("hf_flash", "no network"), skipped("hf_compiled", "no compiler")])
    out = printed(root, capsys)
    assert "AMD EPYC, fp32, 4 x 512 tokens, 15% masked, dropout 0.1, T5 bias" in out
    line = next(line for line in out.splitlines() if line.startswith("`base` (MAE-LM) "))
    for text in ("190 [184, 198]", "1.90 [1.84, 1.98]", "0.86 [0.84, 0.90]", "41.2%", "3,899", "812"):
        assert text in line
    assert "Hugging Face `RobertaForMaskedLM`, no relative bias" in out
    assert "Not run: hf_flash, no network." in out
    assert "Not run: hf_compiled, no compiler." in out
    assert "over padded" not in out  # nobody was compared with it
    line = next(line for line in out.splitlines() if "3,250.0" in line)
    assert line.split()[-10:] == ["3,250.0", "6,500.0", *["12%"] * 8]
    command = "--device cpu --models base,base_cross,roberta_base --peers hf,hf_flash,hf_compiled --rates 0.15"
    assert f"`python -m benchmarks.train_step {command} --dropouts 0.1 --biases on --lengths full --batch 4" in out


def test_the_command_under_a_table_is_one_that_train_step_takes() -> None:
    train_step = pytest.importorskip("benchmarks.train_step")
    for changes in ({}, {"dropout": 0.0, "bias": "none", "rate": 0.4, "lengths": "documents"}):
        case = rows.Case({row["model"]: row for row in contestants(SPEEDS, **changes)})
        words = shlex.split(report_step.command(case))
        assert words[:3] == ["python", "-m", "benchmarks.train_step"]
        options = train_step.parser_of().parse_args(words[3:])
        names = train_step.names_of(options)
        assert names == list(SPEEDS)
        (settings,) = train_step.cases(options, names)
        row = case.shared
        assert (settings.dropout, settings.bias) == (row["dropout"], row["bias"] != "none")
        for name in ("precision", "batch", "seq", "rate", "lengths"):
            assert getattr(settings, name) == row[name]


def goals(found: Sequence[dict[str, Any]], model: str) -> list[str]:
    case = rows.Case({row["model"]: row for row in found})
    row = case.rows[model]
    return [goal.verdict(row) for goal in GOALS if goal.applies(row, case.dropout, case.bias)]


def test_goals() -> None:
    assert goals(contestants(SPEEDS), "base") == ["over roberta_base >= 0.85: met"]
    bf16 = contestants(SPEEDS | {"hf_eager": 160.0}, precision="bf16")
    assert goals(bf16, "base") == ["over roberta_base >= 0.85: met", "over hf >= 1.3: not met"]  # eager is faster
    assert goals(contestants(SPEEDS, precision="bf16"), "base")[1:] == ["over hf >= 1.3: met"]
    assert goals(contestants(SPEEDS), "base_cross") == ["over roberta_base >= 1: met"]
    assert goals(contestants(SPEEDS, rate=0.4), "base_cross") == ["over roberta_base >= 1.25: not met"]
    assert goals(contestants(SPEEDS, seq=128), "base") == []
    assert goals(contestants(SPEEDS, lengths="documents"), "base") == []
    speeds = {"base": 650e3, "base_compiled": 690e3, "roberta_base": 700e3, "hf": 300e3, "hf_compiled": 480e3}
    on_h200 = {"device": H200, "precision": "bf16"}
    plain = contestants(speeds, dropout=0.0, bias="none", **on_h200)
    assert goals(plain, "base") == [
        ">= 600,000: met",
        "over roberta_base >= 0.85: met",
        "over hf >= 2: met",
        "over hf_compiled >= 1.3: met",
        "over padded >= 3: not measured",
    ]
    assert goals(plain, "base_compiled")[0] == ">= 600,000: met, and 680,000"
    assert goals(plain, "roberta_base") == [">= 705,000: not met"]
    assert goals(contestants(speeds, **on_h200), "base")[0] == ">= 500,000: met"
    assert goals(contestants(speeds, device="NVIDIA H100", precision="bf16"), "base")[0].startswith("over roberta_base")


def op_row(op: str, phase: str, contestant: str, ratio: float, minute: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "date": f"2026-11-22T10:{minute:02}:00+00:00",
        "commit": "abc1234",
        "device": "AMD EPYC",
        "threads": 2,
        "load": 0.2,
        "torch": "2.13.0+cpu",
        "op": op,
        "phase": phase,
        "contestant": contestant,
        "backend": "native",
        "dtype": "float32",
        "sequences": 8,
        "length": 512,
        "width": 768,
        "ms": quartiles(5.0),
        "ratio": quartiles(ratio),
        "copy_share": None,
    } | changes


def test_ops_table_takes_the_newest_run_of_each_op(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ("forward", "forward+backward")
    put(root, [op_row("add_norm", phase, "ours", 2.0, minute=1) for phase in both], "ops_cpu.jsonl")
    put(root, [op_row("add_norm", phase, "ours", 9.0, minute=0) for phase in both], "ops_cpu.jsonl")
    put(root, [op_row("feed_forward", "forward", "pytorch", 1.0)], "ops_cpu.jsonl")
    host = {"dtype": None, "sequences": None, "length": None, "width": None, "backend": None, "note": "58M tokens/s"}
    put(root, [op_row("mask and pack", "host", "ours", 7.7, **host)], "ops_cpu.jsonl")
    for phase, share in zip(both, (0.8, 0.7), strict=True):
        put(root, [op_row("add_norm", phase, "ours", 3.0, device=H200, copy_share=share)], "ops_cuda.jsonl")
    out = printed(root, capsys)
    assert "2.00 [1.94, 2.08]  2.00 [1.94, 2.08]" in out
    assert "9.00" not in out
    assert "Plain PyTorch is what runs: feed_forward." in out
    assert "7.70 [7.47, 8.01]  58M tokens/s" in out
    assert "80%, 70%" in out
    assert ">= 0.75: not met" in out
    assert "--device cuda --dtype fp32 --sequences 8 --length 512 --width 768" in out


def test_attention_table_and_its_goals(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = op_row("", "", "", 1.0, device=H200) | {
        "case": "kept",
        "bias": True,
        "dropout": 0.1,
        "tokens": 111360,
        "dtype": "bfloat16",
        "tflop_per_s": quartiles(300.0),
        "yardstick": "torch varlen",
    }
    found = [
        shared | {"contestant": name, "phase": phase, "ms": quartiles(ms), "ratio": quartiles(2.0 / ms)}
        for name, ms in {"ours": 2.5, "torch varlen, plain": 2.0, "flex": 3.0}.items()
        for phase in ("fwd", "bwd", "fwd+bwd")
    ]
    put(root, found, "attention_cuda.jsonl")
    out = printed(root, capsys)
    assert "kept, 111,360 tokens, bfloat16  bias, dropout 0.1  ours" in out
    assert "plain varlen >= 0.75: met; flex >= 1.5: not met" in out


def test_the_loaders_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = {name: op_row("", "", "", 1.0)[name] for name in ("date", "commit", "device", "threads", "load", "torch")}
    loader = machine | {
        "store": "synthetic",
        "mode": "full",
        "masks": "host",
        "micro_batch": 256,
        "fill": {"all": 1.0},
        "rss_anon_mb": None,
        "major_faults": 0,
    }
    speeds = [(1e7, 0, 31e6), (1e9, 0, 19e6), (1e7, 2, 11e6), (1e9, 2, 12e6)]
    found = [
        loader | {"store_bytes": size, "workers": workers, "tokens_per_s_per_core": quartiles(speed)}
        for size, workers, speed in speeds
    ]
    put(root, [*found, found[0] | {"micro_batch": 32}], "loader.jsonl")
    out = printed(root, capsys)
    assert "full, 10 MB     host   256          0                 31.0 [30.1, 32.2]" in out
    assert [out.count(f">= 20: {verdict}") for verdict in ("met", "not met")] == [1, 2]
    assert "11.0 [" not in out  # loader processes on a smaller store


def test_a_projection_is_called_one_and_is_a_range(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {name: op_row("", "", "", 1.0)[name] for name in ("date", "commit")} | {
        "device": "NVIDIA A100",
        "model": "base",
        "precision": "bf16",
        "batch": 256,
        "seq": 512,
        "rate": 0.15,
        "dropout": 0.0,
        "bias": "none",
        "products": [0.65, 0.75],
        "tokens_per_s": [220_000, 240_000],
        "mfu": [0.45, 0.5],
        "ms": {kind: [12.0, 12.0] for kind in CLASSES} | {"gemm": [400.0, 350.0]},
    }
    put(root, [row, row | {"dropout": 0.1}, row | {"device": H200}], "projection.jsonl")
    out = printed(root, capsys)
    assert "Projection, not a measurement: NVIDIA A100, bf16, 256 x 512 tokens, 15% masked" in out
    assert out.count("220,000 to 240,000") == 3
    assert out.count("400 to 350") == 3
    assert "products at 0.65 to 0.75 of the peak" in out
    assert ">=" not in out  # no goal is met by arithmetic
    assert report_step.NO_GPU in out


def test_a_headline_is_of_a_quiet_machine_in_bf16(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was timed beside other work is in the tables, with its load, and in no headline: neither it nor its last
    column. Nor is fp32, newer or not, where bf16 was timed."""
    noisy = {name: 2 * speed for name, speed in SPEEDS.items()}
    put(
        root,
        contestants(SPEEDS, batch=2, precision="bf16")
        + contestants(noisy, minute=1, precision="bf16", load=2.6)
        + contestants(PLAIN, minute=2, batch=2, precision="bf16", dropout=0.0, bias="none", load=2.6)
        + contestants(noisy, minute=3, batch=2),
    )
    printed(root, capsys, "--write")
    top, all_tables = (root / "README.md").read_text(), (root / "benchmarks" / "README.md").read_text()
    assert "| `base` (MAE-LM) | 190 [184, 198] | **1.90x** [1.84, 1.98] | 3.8 GB |\n" in top
    assert "without dropout and bias" not in top
    assert "380" not in top
    assert "380 [369, 395]" in all_tables


def test_write_replaces_the_regions_that_have_rows_and_nothing_else(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(root, contestants(SPEEDS) + contestants(PLAIN, minute=1, dropout=0.0, bias="none"))
    assert report.main(["--root", str(root), "--check"]) == 1
    assert "README.md and benchmarks/README.md: not the tables" in capsys.readouterr().out
    assert printed(root, capsys, "--write") == "README.md: written\nbenchmarks/README.md: written\n"
    top, all_tables = (root / "README.md").read_text(), (root / "benchmarks" / "README.md").read_text()
    assert top.startswith("# Title\n\nbefore headline\n<!-- results:headline -->\n\n| one training step")
    assert top.endswith(f"<sub>{report_step.NO_GPU}</sub>\n\n<!-- /results -->\nafter\n")
    assert "| `base` (MAE-LM) | 190 [184, 198] | **1.90x** [1.84, 1.98] | 3.8 GB | 1.22 [1.18, 1.26] |" in top
    assert "| Hugging Face `RobertaForMaskedLM`, no relative bias | 100 [97, 104] | 1 | 3.8 GB | - |" in top
    assert "by hand" not in top
    assert "by hand: train_step" not in all_tables
    assert "| over roberta_base >= 0.85: met |" in all_tables
    for region in ("ops", "attention", "loader"):
        assert f"before {region}\n<!-- results:{region} -->\nby hand: {region}\n<!-- /results -->\n" in all_tables
    assert report.main(["--root", str(root), "--check"]) == 0
    assert printed(root, capsys, "--write") == ""


def test_check_fails_on_drift(root: Path) -> None:
    put(root, contestants(SPEEDS))
    for change in ("rows", "text"):
        assert report.main(["--root", str(root), "--write"]) == 0
        assert report.main(["--root", str(root), "--check"]) == 0
        if change == "rows":
            put(root, contestants(SPEEDS | {"base": 191.0}, minute=1))
        else:
            readme = root / "README.md"
            readme.write_text(readme.read_text().replace("191 [185", "291 [185"))
        assert report.main(["--root", str(root), "--check"]) == 1


def test_a_gpu_gets_its_own_table(root: Path) -> None:
    put(root, contestants(SPEEDS))
    measured = {"device": H200, "precision": "bf16", "joules_per_mtoken": 800.0}
    put(root, contestants({"base": 612345.0, "hf": 3e5}, **measured), "train_step_cuda.jsonl")
    assert report.main(["--root", str(root), "--write"]) == 0
    top = (root / "README.md").read_text()
    assert top.index(f"sequences of 512, {H200}") < top.index("sequences of 512, AMD EPYC")
    assert "| 612,345 [593,975, 636,839] |" in top
    below = (root / "benchmarks" / "README.md").read_text()
    assert "| $ per 1B tokens | kWh per 1B tokens |" in below
    assert "| 1.81 | 0.22 |" in below  # 4 dollars an hour; 800 J for a million tokens
    assert "NVIDIA H200 4.00 dollars an hour, as of 2026-" in below
    assert report_step.NO_GPU not in top + (root / "benchmarks" / "README.md").read_text()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda row: "{", "not a row"),
        (lambda row: "[1]", "not a row"),
        (lambda row: json.dumps({k: v for k, v in row.items() if k != "model"}), "the row has no model"),
        (lambda row: json.dumps(row | {"date": "yesterday"}), 'date cannot be "yesterday"'),
        (lambda row: json.dumps(row | {"model": "base"}), "a second row of base"),
    ],
)
def test_a_malformed_row_is_one_line(root: Path, capsys: pytest.CaptureFixture[str], damage: Any, said: str) -> None:
    base, hf = contestants({"base": 190.0, "hf": 100.0})
    (root / "benchmarks" / "results" / "train_step_cpu.jsonl").write_text(f"{json.dumps(base)}\n{damage(hf)}\n")
    assert report.main(["--root", str(root), "--write"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: benchmarks/results/train_step_cpu.jsonl:2: ")
    assert said in message
    assert message.count("\n") == 1
    assert "by hand" in (root / "README.md").read_text()


@pytest.mark.parametrize("change", [{"tokens_per_s": 190.0}, {"tokens_per_s": None}, {"load": None}])
def test_what_no_table_can_be_made_of_is_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    put(root, [row | change for row in contestants(SPEEDS)])
    assert report.main(["--root", str(root), "--write"]) == 2
    assert capsys.readouterr().err.startswith("error: headline: a row lacks something")
    assert "by hand" in (root / "README.md").read_text()


@pytest.mark.parametrize("old", ["<!-- results:headline -->", "<!-- /results -->"])
def test_a_readme_without_its_markers(root: Path, capsys: pytest.CaptureFixture[str], old: str) -> None:
    put(root, contestants(SPEEDS))
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace(old, ""))
    assert report.main(["--root", str(root), "--write"]) == 2
    assert "README.md: no lines <!-- results:headline -->" in capsys.readouterr().err


def test_a_picture_of_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (
        ("speedrun", "no row of speedrun"),
        ("steps", "there are pictures of speedrun, not steps"),
    ):
        assert report.main(["--root", str(root), "--plot", name, "picture.png"]) == 2
        assert said in capsys.readouterr().err


def test_the_readmes_of_this_repository_say_what_its_rows_say() -> None:
    assert report.main(["--check"]) == 0
