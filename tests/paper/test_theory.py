"""The bounds of Appendix A on random stacks, the examples that break them as printed, and what a run's report holds."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from maelm_fast.cli.main import main
from maelm_fast.data.token_store import TokenStore
from maelm_fast.errors import UserError
from maelm_fast.paper.theory import (
    REPORT_FILE,
    Bound,
    attention_stack,
    attention_step,
    combine,
    composite_norm,
    head_weights,
    norm_1,
    norm_inf,
    residual,
    theory_report,
)
from maelm_fast.training.rundir import RunDir, load_run

SLACK = 1.0 + 1e-9  # rounding


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * scale


def random_input(n: int, m: int, d: int, scale: float, spread: float) -> tuple[Tensor, Tensor]:
    """Real rows, and [MASK] rows that are affine combinations of them; spread 0: convex ones."""
    real = random(n, d, scale=scale) + random(1, d, scale=3.0)
    weights = torch.softmax(random(m, n), dim=1) + random(m, n, scale=spread)
    weights = weights - (weights.sum(1, keepdim=True) - 1.0) / n
    return real, weights @ real


def test_norms_against_torch() -> None:
    matrix = random(7, 5)
    assert norm_1(matrix) == pytest.approx(float(torch.linalg.matrix_norm(matrix, 1)))
    assert norm_inf(matrix) == pytest.approx(float(torch.linalg.matrix_norm(matrix, torch.inf)))
    assert composite_norm(matrix) == pytest.approx(math.sqrt(norm_1(matrix) * norm_inf(matrix)))
    assert norm_inf(matrix[:0]) == 0.0


def test_no_shift_has_a_smaller_1_norm_than_the_median() -> None:
    hidden = random(20, 6)
    least = norm_1(residual(hidden))
    assert all(norm_1(hidden - hidden.median(0).values - random(1, 6, scale=s)) >= least for s in (1e-3, 0.1, 1.0))
    assert torch.linalg.matrix_rank(hidden - residual(hidden)) == 1


@pytest.mark.parametrize(("n", "d"), [(30, 8), (6, 20)])
def test_combinations_have_row_sum_one_and_find_what_is_there(n: int, d: int) -> None:
    real, mask = random_input(n, 4, d, 1.0, 0.3)
    weights, misfit = combine(real, mask)
    torch.testing.assert_close(weights.sum(1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(weights @ real, mask)
    assert misfit < 1e-9
    assert combine(random(6, 20), random(4, 20)).misfit > 0.1  # six rows span no twenty dimensions
    assert combine(real, mask[:0]).weights.shape == (0, n)


def check(step: Bound) -> None:
    """(10) as printed, (9) with its factor, and what follows of both for the composite norm."""
    assert step.misfit < 1e-3  # rounding, next to the residual of a collapsed layer
    assert step.norm_inf <= step.bound_10 * SLACK
    assert step.norm_1 <= step.gamma * step.bound_9 * SLACK
    assert step.residual <= step.corrected * SLACK


@pytest.mark.parametrize("masks", [0, 1, 7])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 10.0])
def test_one_layer_stays_below_the_bounds_without_any_condition(masks: int, scale: float) -> None:
    """Score ranges from far below to far above 1.2564, where the printed proof's exp(x) <= 1 + 2x ends."""
    spreads = []
    for trial in range(40):
        n, d = (3, 12, 40)[trial % 3], (1, 4, 16, 60)[trial % 4]
        real, mask = random_input(n, masks, d, scale, (0.0, 0.3)[trial % 2])
        if trial % 5 == 0:  # only a few rows differ
            real[2:] = real[1]
            mask = real[:1].expand(masks, d).clone()
        _, _, step = attention_step(real, mask, random(d, d, scale=(0.1, 1.0)[trial % 2]), random(d, d))
        check(step)
        spreads.append(step.spread)
    if scale == 0.1:
        assert min(spreads) < 1.2564 < max(spreads)


@pytest.mark.parametrize("masks", [0, 5])
def test_a_stack_stays_below_them_and_collapses(masks: int) -> None:
    d, size = 16, 16
    weights = [(random(d, size, scale=0.25) @ random(size, d, scale=0.25) / 4.0, random(d, d, scale=0.25))] * 8
    steps = attention_stack(*random_input(40, masks, d, 0.5, 0.0), weights)
    assert len(steps) >= 3
    for step in steps:
        check(step)
    falls = [math.log(a.residual / b.residual) for a, b in itertools.pairwise(steps)]
    assert falls[0] > 0
    assert falls[1] > 2 * falls[0]  # the cube of a small residual: each fall is thrice the one before


def test_what_is_collapsed_ends_the_stack() -> None:
    real = torch.ones(5, 3, dtype=torch.float64)
    assert attention_stack(real, real[:0], [(random(3, 3), random(3, 3))]) == []


def test_the_residual_of_the_proof_is_the_softmax_of_the_network() -> None:
    """attention_step computes what torch's attention computes."""
    real, mask = random_input(9, 3, 5, 1.0, 0.2)
    q, k, vo = random(5, 4), random(5, 4), random(5, 5)
    after, after_mask, _ = attention_step(real, mask, q @ k.T / 2.0, vo)
    hidden = torch.cat([real, mask])
    expected = torch.nn.functional.scaled_dot_product_attention(hidden @ q, hidden @ k, hidden @ vo)
    torch.testing.assert_close(torch.cat([after, after_mask]), expected)


# A family that breaks (9) as printed. Token 0 has b in dimension 0; token j >= 1 has b in dimension j, its own. All lie
# around h, which is large in dimension 0, so that without their own part all scores favour token 0 by log(share * n).
# The first half of the others adds `boost` to the score of itself, and so takes weight from token 0; the rest does not.
# W_VO keeps dimension 0 only. A [MASK] row equals a real one, so that u = 1.


def family(n: int, boost: float, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = torch.eye(n, dtype=torch.float64)
    w_qk = torch.zeros(n, n, dtype=torch.float64)
    half = torch.arange(1, 1 + (n - 1) // 2)
    w_qk[0, 0] = boost
    w_qk[half, half] = boost
    rows[:, 0] += math.log(share * n) / boost
    w_vo = torch.zeros(n, n, dtype=torch.float64)
    w_vo[0, 0] = 1.0
    return rows, rows[-1:], w_qk, w_vo


def least_norms(n: int, boost: float, share: float) -> tuple[float, float]:
    """(||R'||_1, ||R'||_inf) of the family, each to its own best h', from the three values that column 0 of H' takes.
    The [MASK] row is one more of the last kind among the keys."""
    first, shared = math.exp(boost), share * n
    values = [
        shared * first / (shared * first + n),  # token 0 itself: its score is raised too
        shared / (shared + first + n - 1),  # the first half
        shared / (shared + n),
    ]
    counts = [1, (n - 1) // 2, n - 1 - (n - 1) // 2]
    one = min(sum(count * abs(v - h) for v, count in zip(values, counts, strict=True)) for h in values)
    return one, (max(values) - min(values)) / 2


def printed_bounds(boost: float) -> tuple[float, float]:
    """Right-hand sides of (9) and (10): ||W_QK||_1 = boost, all other norms 1, u (1 + u) = 2."""
    return 8.0 * boost, 8.0 * boost


def test_equation_9_as_printed_is_false() -> None:
    n, boost, share = 256, 9.0, 3.0
    real, mask, w_qk, w_vo = family(n, boost, share)
    after, _, step = attention_step(real, mask, w_qk, w_vo)
    assert step.u == pytest.approx(1.0)
    assert (step.bound_9, step.bound_10) == pytest.approx(printed_bounds(boost))
    least = norm_1(residual(after))  # the median: no h' makes it smaller
    assert least > 1.1 * step.bound_9
    assert step.norm_inf <= step.bound_10
    assert step.norm_1 <= step.gamma * step.bound_9
    one, infinity = least_norms(n, boost, share)
    column = after[:, 0]
    assert least == pytest.approx(one)
    assert infinity == pytest.approx(float(column.max() - column.min()) / 2)


def test_the_composite_bound_as_printed_is_false_too() -> None:
    """By the values of H' that the test above holds against the dense computation, for a million tokens."""
    n, boost, share = 10**6, 18.0, 3.0
    one, infinity = least_norms(n, boost, share)
    printed = math.sqrt(math.prod(printed_bounds(boost)))
    assert math.sqrt(one * infinity) > 1.5 * printed
    assert math.sqrt(one * infinity) < math.sqrt(n / 4) * printed


def test_head_weights_are_those_of_the_head(make_run: Callable[..., RunDir]) -> None:
    model = load_run(make_run().path).model
    attention = model.encoder.blocks[1].attention
    x = torch.randn(5, 16)
    w_qk, w_vo = head_weights(model, 1)[1]
    with torch.no_grad():
        q, k, v = torch.nn.functional.linear(x, attention.qkv.weight).view(5, 3, 2, 8).unbind(1)
        scores = q[:, 1] @ k[:, 1].T / 8**0.5
        out = torch.nn.functional.linear(torch.cat([torch.zeros(5, 8), v[:, 1]], dim=1), attention.out.weight)
    torch.testing.assert_close((x.double() @ w_qk @ x.double().T).float(), scores)
    torch.testing.assert_close((x.double() @ w_vo).float(), out)


@pytest.mark.parametrize("preset", ["tiny", "roberta_tiny"])
def test_the_report_of_a_run(make_run: Callable[..., RunDir], store: Path, preset: str) -> None:
    run = load_run(make_run(preset=preset).path)
    report = theory_report(run, TokenStore(store, "validation"), samples=24)
    assert len(report.layers) == 3
    assert report.real_tokens + report.mask_tokens == 24 * 32
    first = report.layers[0]
    assert first.numerical_rank_mask <= 16  # one [MASK] embedding and positions
    for layer in report.layers:
        assert 0.0 < layer.outside_real <= 1.0 - report.tau + 1e-9
        assert 0.0 < layer.outside_mask < 1.0
        assert len(layer.angles) == min(layer.rank_real, layer.rank_mask)
        assert all(0.0 <= angle <= 90.0 for angle in layer.angles)
        assert layer.residual_real > 0.0
    assert 1 <= len(report.attention) <= 2
    for bound in report.attention:
        assert bound.residual <= bound.corrected
        assert (bound.u == 1.0) == (preset == "tiny")
    assert (report.assumption_misfit is None) == (preset == "tiny")


def test_an_encoder_that_read_some_mask_has_a_mask_part_too(make_run: Callable[..., RunDir], store: Path) -> None:
    """Fig. 4's models between MAE-LM and MLM."""
    run = load_run(make_run().path)
    object.__setattr__(run.config.masking, "shown", 0.25)
    report = theory_report(run, TokenStore(store, "validation"), samples=24)
    assert report.encoder_sees_mask
    assert report.assumption_misfit is not None
    assert all(bound.u > 1.0 for bound in report.attention)


def test_energy_outside_is_that_of_the_rows(make_run: Callable[..., RunDir], store: Path) -> None:
    """[MASK] rows made orthogonal to all else in the embedding: all of their energy is outside."""
    run = load_run(make_run(preset="roberta_tiny").path)
    encoder = run.model.encoder
    with torch.no_grad():
        encoder.position_table.zero_()
        encoder.token_table[:, 12:] = 0.0
        encoder.token_table[:, :12] -= encoder.token_table[:, :12].mean(1, keepdim=True)
        encoder.token_table[run.model.mask_id] = 0.0
        encoder.token_table[run.model.mask_id, 14:] = torch.tensor([1.0, -1.0])
    layer = theory_report(run, TokenStore(store, "validation"), samples=24).layers[0]
    assert layer.outside_mask == pytest.approx(1.0)
    assert layer.angles == pytest.approx([90.0], abs=1e-3)
    assert (layer.rank_mask, layer.numerical_rank_mask) == (1, 1)


def test_the_command(make_run: Callable[..., RunDir], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = make_run(preset="roberta_tiny")
    assert main(["paper", "theory", str(run.path), "--samples", "8", "--head", "1"]) == 0
    data = json.loads((run.report / REPORT_FILE).read_text())
    assert (data["head"], data["samples"], len(data["layers"])) == (1, 8, 3)
    assert (run.report / "theory.png").read_bytes().startswith(b"\x89PNG")
    assert "bound that holds" in capsys.readouterr().out
    for arguments, message in (
        (["--head", "2"], "head must lie in [0, 2)"),
        (["--tau", "0"], "tau must lie"),
        (["--data", str(tmp_path / "none")], "name one with --data STORE"),
    ):
        assert main(["paper", "theory", str(run.path), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_texts_without_mask_are_refused(make_run: Callable[..., RunDir], store: Path) -> None:
    run = load_run(make_run(max_positions=32).path)
    object.__setattr__(run.config.masking, "rate", 1e-9)
    with pytest.raises(UserError, match=r"no \[MASK\] in these sequences"):
        theory_report(run, TokenStore(store, "validation"), samples=4)
