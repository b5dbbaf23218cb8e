"""The sweep at a size that takes seconds; its fits on made-up rows whose exponents and shares are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import scaling, scaling_fits
from benchmarks.contestants import Contestant, Settings
from benchmarks.scaling import AXES, MODELS, SWEEPS, Point, Sweep
from benchmarks.scaling_fits import TERMS, fits
from maelm_fast import presets

pytest.importorskip("matplotlib")

TINY = {"max_positions": 64, "hidden_size": 64, "num_heads": 1, "ffn_size": 256, "num_layers": 2, "decoder_layers": 2,
        "vocab_size": 256}  # fmt: skip
TINY_SWEEP = Sweep(
    Point(2, 32, TINY),
    {"seq": (16, 32, 64), "seq_fixed_batch": (16, 32), "batch": (1, 2, 4), "width": (64, 128), "layers": (1, 2),
     "vocab": (128, 256)},
)  # fmt: skip
POINT_FIELDS = set(
    "axis x model changes batch seq tokens flops amounts parameters seconds update_seconds cpu_seconds peak_memory_mb "
    "round_seconds round_update_seconds precision dropout bias rounds date commit device threads load torch".split()
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("measures on the GPU")
    monkeypatch.setitem(SWEEPS, "cpu", TINY_SWEEP)
    monkeypatch.setattr(scaling, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(scaling_fits, "RESAMPLES", 20)
    monkeypatch.setattr(scaling, "alone_mb", lambda name, settings: 100.0 + settings.batch)  # tested on its own


def made_up(
    axis: str, x: float, seconds: float, counts: dict[str, float], update: float = 0.0, noise: Sequence[float] = (0.0,)
) -> dict[str, Any]:
    """A row of a step that took `seconds`, times 1 + noise in each round; its FLOPs are those of gemm."""
    amounts = {term: counts[term] for term in TERMS}
    return {
        "kind": "point", "axis": axis, "x": x, "model": "mae", "batch": 1, "seq": 1, "flops": counts["gemm"],
        "amounts": amounts, "parameters": counts["parameters"], "rounds": len(noise),
        "date": "2000-01-01", "device": "a machine",
        "round_seconds": [seconds * (1 + n) for n in noise], "round_update_seconds": [update * (1 + n) for n in noise],
    }  # fmt: skip


def counted(
    layers: float = 4, width: float = 256, tokens: float = 2048, seq: float = 512, vocab: float = 8192
) -> dict[str, float]:
    return {
        "gemm": tokens * (24 * layers * width**2 + 0.3 * width * vocab), "attention": 4 * tokens * seq * layers * width,
        "elementwise": tokens * (6 * layers * width + 0.15 * vocab), "overhead": layers + 1,
        "parameters": 12 * layers * width**2 + vocab * width,
    }  # fmt: skip


CHANGED: dict[str, list[tuple[float, dict[str, float]]]] = {
    "seq": [(128 * 2**i, {"seq": 128 * 2**i}) for i in range(5)],
    "batch": [(2**i, {"tokens": 512 * 2**i}) for i in range(5)],
    "width": [(128 * k, {"width": 128 * k}) for k in (1, 2, 4)],
    "layers": [(2**i, {"layers": 2**i}) for i in range(5)],
    "vocab": [(2048 * 4**i, {"vocab": 2048 * 4**i}) for i in range(3)],
}
COSTS = {"gemm": 1e-11, "attention": 5e-11, "elementwise": 1e-9, "overhead": 4e-3, "parameters": 8e-9}


def grid(costs: dict[str, float], drift: dict[str, float] | None = None, noise: float = 0.0) -> list[dict[str, Any]]:
    """Rows of steps that cost exactly that, but that the machine took `drift` times as long while an axis was timed."""
    draw = np.random.default_rng(0)
    rows = []
    for axis, points in CHANGED.items():
        slower = (drift or {}).get(axis, 1.0)
        for x, changed in points:
            parts = {name: slower * costs[name] * amount for name, amount in counted(**changed).items()}
            spread = noise * draw.standard_normal(9)
            rows.append(made_up(axis, x, sum(parts.values()), counted(**changed), parts["parameters"], spread))
    return rows


def test_a_known_exponent_is_found_within_its_interval() -> None:
    draw = np.random.default_rng(0)
    rows = [made_up("batch", x, 2 * x**0.7, counted(tokens=x), noise=0.03 * draw.standard_normal(9))
            for x in (1, 2, 4, 8, 16)]  # fmt: skip
    fit, rates = fits(rows)
    assert fit["exponent"]["low"] < 0.7 < fit["exponent"]["high"]
    assert 0.001 < fit["exponent"]["high"] - fit["exponent"]["low"] < 0.1
    assert fit["exponent"]["median"] == pytest.approx(0.7, abs=0.03)
    assert fit["flop_exponent"] == 1.0
    assert fit["x"] == [1, 2, 4, 8, 16]
    assert fit["shares"] is rates["rates"] is None  # one axis does not tell the terms apart
    assert "cannot tell the terms apart" in next(scaling_fits.fit_lines(rates))


def test_the_line_bends_where_something_does_not_grow() -> None:
    rows = [made_up("batch", x, 1 + 0.1 * x, counted(tokens=x)) for x in (1, 4, 16, 64)]
    local = fits(rows)[0]["local_exponents"]
    assert local["first"] == pytest.approx(np.log(1.4 / 1.1) / np.log(4), abs=1e-4)
    assert local["last"] == pytest.approx(np.log(7.4 / 2.6) / np.log(4), abs=1e-4)


@pytest.mark.parametrize("missing", [None, "elementwise", "overhead"])
def test_known_costs_and_shares_are_found_though_the_machine_changed_between_axes(missing: str | None) -> None:
    costs = COSTS | ({missing: 0.0} if missing else {})
    *found, rates = fits(grid(costs, drift={"width": 1.5, "batch": 0.8}))
    assert rates["misfit"] < 1e-6
    for name, cost in costs.items():
        rate = rates["rates"]["optimizer" if name == "parameters" else name]
        assert rate == (pytest.approx(1 / cost, rel=1e-3) if cost else None)
    assert [fit["axis"] for fit in found] == list(CHANGED)
    for fit in found:
        points = CHANGED[fit["axis"]]
        assert fit["terms_exponent"] == pytest.approx(fit["exponent"]["median"], abs=1e-3)
        for end, (_, changed) in (("first", points[0]), ("last", points[-1])):
            parts = {name: costs[name] * amount for name, amount in counted(**changed).items()}
            for term, share in fit["shares"][end].items():
                expected = parts["parameters" if term == "optimizer" else term] / sum(parts.values())
                assert share["median"] == pytest.approx(expected, abs=1e-3)


def test_noise_of_the_clock_widens_the_shares() -> None:
    fit = fits(grid(COSTS, noise=0.02))[0]
    parts = {name: COSTS[name] * amount for name, amount in counted(seq=2048).items()}
    share = fit["shares"]["last"]["attention"]
    assert 0.001 < share["high"] - share["low"] < 0.2
    assert share["median"] == pytest.approx(parts["attention"] / sum(parts.values()), abs=0.1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_middle_of_every_axis_is_the_base_point(device: str) -> None:
    sweep = SWEEPS[device]
    assert set(sweep.values) == set(AXES)
    for name in MODELS.values():
        base = sweep.base.settings(device, "fp32").model_config(name)
        for axis, xs in sweep.values.items():
            middle = sweep.point(axis, xs[len(xs) // 2])
            assert (middle.batch, middle.seq) == (sweep.base.batch, sweep.base.seq)
            assert middle.settings(device, "fp32").model_config(name) == base
            assert list(xs) == sorted(set(xs))
            for x in xs:
                point = sweep.point(axis, x)
                config = point.settings(device, "fp32").model_config(name)
                assert config.head_dim == 64
                assert config.ffn_size == 4 * config.hidden_size
                if axis == "seq":
                    assert point.batch * point.seq == sweep.base.batch * sweep.base.seq


def test_attention_flops_are_what_the_products_leave() -> None:
    base = presets.get("base").model
    visible, original, masked = [85, 17], [100, 20], [15, 3]
    d, last = base.hidden_size, 4 * base.hidden_size * (15 * 100 + 3 * 20)
    encoder = base.num_layers * 4 * d * (85**2 + 17**2)
    decoder = (base.decoder_layers - 1) * 4 * d * (100**2 + 20**2) + last
    assert scaling.attention_flops(base, visible, original, masked) == 3 * (encoder + decoder)
    roberta = presets.get("roberta_base").model
    full = (roberta.num_layers - 1) * 4 * d * (100**2 + 20**2) + last
    assert scaling.attention_flops(roberta, original, original, masked) == 3 * full


@pytest.mark.parametrize("name", MODELS.values())
def test_amounts(name: str) -> None:
    contestant = Contestant(name, Settings(batch=2, seq=20, changes=TINY))
    amounts = scaling.amounts(contestant)
    assert list(amounts) == list(TERMS)
    assert amounts["gemm"] + amounts["attention"] == contestant.flops
    rows = {"base": 2 * 2 * 17 + 2 * 20 + 2 * 3, "roberta_base": 2 * 20 + 2 * 3}[name]  # 3 of 20 are masked
    assert amounts["elementwise"] == rows * (2 * 64 + 256) + 2 * 3 * 256
    assert amounts["overhead"] == {"base": 5, "roberta_base": 3}[name]


def test_memory_alone_grows_with_the_model() -> None:
    small, large = (
        scaling.alone_mb("roberta_base", Settings(batch=1, seq=32, changes={**TINY, "vocab_size": vocab}))
        for vocab in (256, 32768)
    )
    four_tables = 4 * 4 * 64 * 32768 / 2**20  # weights, gradients, two moments
    assert four_tables < large - small < 2 * four_tables


@pytest.mark.usefixtures("tiny")
def test_rows_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "results" / "scaling.jsonl", tmp_path / "scaling.png"
    assert scaling.main(["--rounds", "2", "--out", str(out), "--plot", str(picture)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    points = [row for row in rows if row["kind"] == "point"]
    assert [(row["axis"], row["x"], row["model"]) for row in points] == [
        (axis, x, model) for axis, xs in TINY_SWEEP.values.items() for x in xs for model in MODELS
    ]
    for row in points:
        assert set(row) >= POINT_FIELDS
        assert 0 < row["seconds"]["q1"] <= row["seconds"]["median"] <= row["seconds"]["q3"]
        assert 0 < row["update_seconds"]["median"] < row["seconds"]["median"]
        assert row["tokens"] == row["batch"] * row["seq"]
        assert row["peak_memory_mb"] == 100 + row["batch"]
        assert len(row["round_seconds"]) == row["rounds"] == 2
    found = [row for row in rows if row["kind"] == "fit"]
    assert [(row["axis"], row["model"]) for row in found] == [(axis, model) for model in MODELS for axis in AXES]
    assert all(row["exponent"]["low"] <= row["exponent"]["high"] and row["flop_exponent"] >= 0 for row in found)
    for row in found:
        for end in row["shares"].values():
            assert sum(share["median"] for share in end.values()) == pytest.approx(1, abs=1e-3)
    assert [row["model"] for row in rows if row["kind"] == "rates"] == list(MODELS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    measured = capsys.readouterr().out

    monkeypatch.setattr(scaling, "measured", None)
    again = tmp_path / "again.svg"
    assert scaling.main(["--from", str(out), "--axes", "batch,vocab", "--models", "roberta", "--plot", str(again)]) == 0
    drawn = again.read_text()
    assert "<svg" in drawn
    assert "MAE-LM" not in drawn
    printed = capsys.readouterr().out
    assert "batch, roberta" in printed
    assert "seq, " not in printed
    assert scaling.main(["--from", str(out)]) == 0
    assert measured.endswith(capsys.readouterr().out)  # the same fits from the rows alone


@pytest.mark.usefixtures("tiny")
def test_from_takes_the_last_run_of_each_axis(tmp_path: Path) -> None:
    out = tmp_path / "scaling.jsonl"
    old = grid(COSTS)
    new = [row | {"date": "2000-01-02"} for row in old if row["axis"] == "batch"]
    elsewhere = [row | {"date": "2000-01-03", "device": "another machine"} for row in new]
    out.write_text("".join(json.dumps(row) + "\n" for row in [*elsewhere, *old, {"kind": "fit"}, *new]))
    rows = scaling.read(out, None, list(MODELS))
    assert len(rows) == len(old)
    assert {row["date"] for row in rows if row["axis"] == "batch"} == {"2000-01-02"}
    assert {row["date"] for row in rows if row["axis"] == "seq"} == {"2000-01-01"}


@pytest.mark.usefixtures("tiny")
def test_a_point_that_runs_out_of_memory_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(name: str, settings: Settings) -> float:
        if settings.batch == 4 and name == "base":
            raise BrokenProcessPool
        if settings.batch == 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
        return 1.0

    monkeypatch.setattr(scaling, "alone_mb", alone)
    assert scaling.main(["--axes", "batch", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "skipped: mae at batch 4, seq 32, max_positions 64" in printed
    assert "skipped: roberta at batch 4, seq 32" in printed
    assert printed.count("out of memory") == 2
    assert "batch, mae: time grows as" in printed


@pytest.mark.usefixtures("tiny")
def test_another_error_is_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(name: str, settings: Settings) -> float:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(scaling, "alone_mb", alone)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        scaling.main(["--axes", "batch"])


@pytest.mark.usefixtures("tiny")
def test_a_step_that_takes_too_long_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "TOO_LONG", 0.0)
    assert scaling.main(["--axes", "batch", "--quick"]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("skipped: mae at batch ") == 3
    assert printed.err == "error: every point was skipped; nothing was measured\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--axes", "seq,depth"], "unknown axis 'depth'; there are: seq, "),
        (["--models", "bert"], "unknown model 'bert'; there are: mae, roberta"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--plot", "picture.txt"], "cannot draw a picture of kind '.txt'"),
        (["--from", "missing.jsonl"], "cannot read missing.jsonl: No such file"),
        (["--from", "other.jsonl"], "other.jsonl does not hold rows of benchmarks.scaling"),
        (["--from", "batch.jsonl", "--axes", "seq"], "batch.jsonl has no points of seq"),
        (["--from", "batch.jsonl", "--quick"], "--from measures nothing"),
    ],
)
def test_bad_input_gets_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scaling, "measured", None)
    Path("other.jsonl").write_text('{"op": "attention"}\n')
    Path("batch.jsonl").write_text(json.dumps(made_up("batch", 1, 1.0, counted())) + "\n")
    assert scaling.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out
