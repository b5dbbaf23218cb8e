"""The paper's theory (Lemma 2.1, Theorem 2.2, Appendix A) held against numbers: random stacks and trained weights.

The residual of H is R = H - 1 h^T. The paper takes h = argmin ||H - 1 x^T|| and names no norm; here h is the columns'
median, which minimises the 1-norm exactly (argmin of the infinity-norm or of their geometric mean has no closed form).
What is proven holds for any h, and the residual after a layer is that to the h' of the proof, so that the minimum is
no larger. Norms are induced: ||M||_1 the largest column sum of absolute values, ||M||_inf the largest row sum,
||M||_{1,inf} = sqrt(||M||_1 ||M||_inf).

One head, no MLP, no skip connection: H' = softmax(H W_QK H^T) H W_VO on n real rows and m [MASK] rows H_M = U H_R with
U 1 = 1. With u = ||U||_inf (and u (1 + u) read as 1 where m = 0, which is Dong et al. 2021) the paper's bounds are

    (9)   ||R'||_1   <= 4 ||W_QK||_1 ||W_VO||_1   u (1 + u) ||R||_1^2 ||R||_inf
    (10)  ||R'||_inf <= 4 ||W_QK||_1 ||W_VO||_inf u (1 + u) ||R||_1 ||R||_inf^2

What is true of them:
- (10) holds as printed, without any condition. The printed proof needs two repairs: exp(x) <= 1 + 2x ends at
  x = 1.2564, beyond which ||R'||_inf <= 2 u ||R||_inf ||W_VO||_inf is the smaller anyway; and an elementwise bound on
  the attention matrix P is no bound on P R W, whose factors have signs: |P - 1 r^T| has to be bounded.
- (9) is false as printed. Its "Hoelder" step takes ||D 1||_inf where the 1-norm of an outer product has ||D 1||_1, up
  to n times as much. A family with n = 256 tokens in 257 dimensions breaks it, and one with n = 10^6 breaks the
  composite bound too (tests/paper/test_theory.py).
- (9) holds with a factor min(n, d/4), without any condition, and the composite bound with its root. n: by the proof
  as repaired. d/4: row i of R' is the integral over t in [0, 1] of a_i^T Cov_p(X, X W_VO), where a = R W_QK,
  X = [R; U R] and p = softmax of the scores with their i-dependent part times t; entries of the covariance are at
  most the product of the largest |X| and |X W_VO| of their columns, each at most u times that of R.
- U belongs to a layer: no weight bounds it in the next. Through layers the bound with masks is no recursion unless U
  stays bounded, and rows of H_M cannot be rescaled to U 1 = 1, as the paper says, without another H. Where H_R has
  fewer rows than d + 1 such a U need not exist: `misfit` says how far H_M is from it.
- It says something only once 4 epsilon ||R||_{1,inf}^2 < 1; trained weights are far from that.

Shapes: n real and m [MASK] rows, d dimensions; float64 throughout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from maelm_fast.analysis.effective_rank import TAU, run_batches, saw_mask
from maelm_fast.analysis.inputs import from_encoder, gram_matrices
from maelm_fast.batch import PackedBatch
from maelm_fast.config import require
from maelm_fast.data.files import writing
from maelm_fast.data.token_store import TokenStore
from maelm_fast.model.block import Attention
from maelm_fast.model.maelm import MaeLm
from maelm_fast.reporting import figure_of, layer_axis, legend_below, look, save
from maelm_fast.training.files import write_json
from maelm_fast.training.gram import GramMatrix, rank_at
from maelm_fast.training.live import evaluating
from maelm_fast.training.rundir import LoadedRun

REPORT_FILE = "theory.json"
RESIDUAL_SEQUENCES = 16  # whose residuals a report's are the median of
_EPS = torch.finfo(torch.float64).eps
ROUNDING = 1e-9  # a residual this small beside H is mostly rounding: what the next layer makes of it says nothing


def norm_1(matrix: Tensor) -> float:
    return float(matrix.abs().sum(0).max()) if matrix.numel() else 0.0


def norm_inf(matrix: Tensor) -> float:
    return float(matrix.abs().sum(1).max()) if matrix.numel() else 0.0


def composite_norm(matrix: Tensor) -> float:
    return math.sqrt(norm_1(matrix) * norm_inf(matrix))


def residual(hidden: Tensor) -> Tensor:
    """H - 1 h^T, (n, d), h the columns' median."""
    return hidden - hidden.median(dim=0).values


class Combination(NamedTuple):
    """H_M as combinations of the rows of H_R. weights: U (m, n), U 1 = 1. misfit: of U H_R, relative to how far the
    [MASK] rows lie from the mean real row; 0 where the theorem's assumption holds."""

    weights: Tensor
    misfit: float


def combine(real: Tensor, mask: Tensor) -> Combination:
    """The nearest affine combinations of the real rows, of least Frobenius norm."""
    n, mean = real.shape[0], real.mean(0)
    # singular values that are rounding of H, not of its residual, are zero
    inverse = torch.linalg.pinv(real - mean, atol=max(real.shape) * _EPS * float(torch.linalg.norm(real)), rtol=0.0)
    inverse = inverse - inverse.mean(1, keepdim=True)  # nothing but rounding: U 1 = 1
    weights = (mask - mean) @ inverse + 1.0 / n
    missing = torch.linalg.norm(weights @ real - mask) / torch.linalg.norm(mask - mean).clamp_min(1e-300)
    return Combination(weights, float(missing))


class Bound(NamedTuple):
    """One attention layer: ||R'||_{1,inf} and what it is bounded by, and norms of R' to the proof's h'. spread: the
    range of a row of scores' i-dependent part, which the printed proof needs to stay below 1.2564."""

    residual: float
    """To the median or to the proof's h', whichever is smaller."""
    printed: float
    """4 epsilon ||R||_{1,inf}^3."""
    corrected: float
    u: float
    misfit: float
    spread: float
    norm_1: float
    norm_inf: float
    bound_9: float
    bound_10: float
    gamma: float
    """min(n, d/4): what (9) has to be multiplied by."""


def attention_step(real: Tensor, mask: Tensor, w_qk: Tensor, w_vo: Tensor) -> tuple[Tensor, Tensor, Bound]:
    """(real rows after the layer, [MASK] rows, the bounds). real: (n, d), mask: (m, d), w_qk: (d, d) with the 1/sqrt in
    it, w_vo: (d, d)."""
    n, d = real.shape
    hidden = torch.cat([real, mask])
    r = residual(real)
    h = real[0] - r[0]
    weights, misfit = combine(real, mask)
    u = norm_inf(weights) if len(mask) else 1.0
    factor = u * (1.0 + u) if len(mask) else 1.0
    keys = torch.cat([r, weights @ r])
    dependent = r @ w_qk @ keys.T
    shared = torch.softmax(h @ w_qk @ keys.T, dim=0)
    average = shared[:n] + shared[n:] @ weights
    out = torch.softmax(hidden @ w_qk @ hidden.T, dim=1) @ hidden @ w_vo
    after = out[:n] - (average @ r + h) @ w_vo
    scale = 4.0 * norm_1(w_qk) * factor * norm_1(r) * norm_inf(r)
    bound_9, bound_10 = scale * norm_1(w_vo) * norm_1(r), scale * norm_inf(w_vo) * norm_inf(r)
    gamma, printed = min(n, d / 4), math.sqrt(bound_9 * bound_10)
    bound = Bound(
        residual=min(composite_norm(after), composite_norm(residual(out[:n]))),
        printed=printed,
        corrected=math.sqrt(gamma) * printed,
        u=u,
        misfit=misfit,
        spread=float((dependent.max(1).values - dependent.min(1).values).max()),
        norm_1=norm_1(after),
        norm_inf=norm_inf(after),
        bound_9=bound_9,
        bound_10=bound_10,
        gamma=gamma,
    )
    return out[:n], out[n:], bound


def attention_stack(real: Tensor, mask: Tensor, weights: Iterable[tuple[Tensor, Tensor]]) -> list[Bound]:
    """Layer after layer, until the residual is rounding."""
    bounds: list[Bound] = []
    for w_qk, w_vo in weights:
        if composite_norm(residual(real)) < ROUNDING * composite_norm(real):
            break
        real, mask, bound = attention_step(real, mask, w_qk, w_vo)
        bounds.append(bound)
    return bounds


def head_weights(model: MaeLm, head: int) -> list[tuple[Tensor, Tensor]]:
    """(W_QK, W_VO) of one head in every layer, float64 on the CPU, without biases and relative bias."""
    d, size = model.config.hidden_size, model.config.head_dim
    here = slice(head * size, (head + 1) * size)
    weights = []
    for block in model.encoder.blocks:
        attention: Attention = block.attention  # type: ignore[assignment]
        q, k, v = attention.qkv.weight.detach().double().cpu().view(3, d, d)[:, here]
        out = attention.out.weight.detach().double().cpu()[:, here]
        weights.append((q.T @ k / math.sqrt(size), v.T @ out.T))
    return weights


@dataclass(frozen=True)
class Layer:
    """What the theorem speaks of, in one layer of the whole network (0: the embedding output)."""

    residual_real: float
    """||R||_{1,inf} / ||H||_{1,inf} of a sequence's real rows, the median over sequences."""
    residual_mask: float
    rank_real: int
    """tau-effective, over all tokens."""
    rank_mask: int
    numerical_rank_mask: int
    outside_mask: float
    """Share of the [MASK] rows' energy outside the span of the real rows' leading rank_real directions."""
    outside_real: float
    """The same of the real rows themselves: at most 1 - tau."""
    angles: list[float]
    """Principal angles in degrees, ascending, between those directions and the leading rank_mask ones of [MASK]."""


@dataclass(frozen=True)
class TheoryReport:
    """One checkpoint. layers: the trained network. attention: the stack of one head's trained weights alone, on the
    embeddings of a sequence. Its [MASK] rows are first moved into the real rows' affine hull, where the theorem assumes
    them; `assumption_misfit` is how far, relative to their distance from the mean real row. A MAE-LM has none."""

    name: str
    step: int
    encoder_sees_mask: bool
    hidden_size: int
    tau: float
    samples: int
    head: int
    real_tokens: int
    mask_tokens: int
    input_residual: float
    """||R||_{1,inf} of the stack's input."""
    assumption_misfit: float | None
    layers: list[Layer]
    attention: list[Bound]

    def write(self, path: Path) -> None:
        data = {**dataclasses.asdict(self), "attention": [bound._asdict() for bound in self.attention]}
        with writing(path, "choose another --out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, data)


def theory_report(
    run: LoadedRun, store: TokenStore, tau: float = TAU, samples: int | None = None, head: int = 0
) -> TheoryReport:
    """Raises UserError as effective_rank.run_batches, and if the model has no such head."""
    model, config, sees_mask = run.model, run.config.model, saw_mask(run)
    require(0 <= head < config.num_heads, f"head must lie in [0, {config.num_heads}), not {head}")
    batches = list(run_batches(run, store, samples, None))
    device = model.encoder.token_table.device
    with evaluating(model):
        grams = gram_matrices(
            from_encoder(model.encoder), batches, model.mask_id, ("real_positions", "mask_positions"), device
        )
        require(
            grams["mask_positions"][0].tokens > 0,
            "no [MASK] in these sequences: the run's masking policy shows none, or they are too few",
        )
        sequences = _sequence_states(model, batches)
    layers = [
        _layer(real, mask, [(states[i][~is_mask], states[i][is_mask]) for states, is_mask in sequences], tau)
        for i, (real, mask) in enumerate(zip(grams["real_positions"], grams["mask_positions"], strict=True))
    ]
    states, is_mask = max(sequences, key=lambda sequence: int(sequence[1].sum()))
    real, mask = states[0][~is_mask], states[0][is_mask] if sees_mask else states[0][:0]
    weights, misfit = combine(real, mask)
    return TheoryReport(
        name=run.record.preset,
        step=run.step,
        encoder_sees_mask=sees_mask,
        hidden_size=config.hidden_size,
        tau=tau,
        samples=sum(len(batch.visible.lengths) for batch in batches),
        head=head,
        real_tokens=grams["real_positions"][0].tokens,
        mask_tokens=grams["mask_positions"][0].tokens,
        input_residual=composite_norm(residual(real)),
        assumption_misfit=misfit if sees_mask else None,
        layers=layers,
        attention=attention_stack(real, weights @ real, head_weights(model, head)),
    )


@torch.no_grad()
def _sequence_states(model: MaeLm, batches: list[PackedBatch]) -> list[tuple[list[Tensor], Tensor]]:
    """For the first sequences, every layer's states (float64, on the CPU) and where the [MASK] rows are."""
    found: list[tuple[list[Tensor], Tensor]] = []
    for batch in batches:
        here = batch.to(model.encoder.token_table.device)
        layers: list[Tensor] = []
        model.encoder(here.ids, here.visible, layers=layers)
        parts = zip(*(layer.double().cpu().split(batch.visible.lengths) for layer in layers), strict=True)
        for states, ids in zip(parts, batch.ids.cpu().split(batch.visible.lengths), strict=True):
            found.append((list(states), ids == model.mask_id))
            if len(found) == RESIDUAL_SEQUENCES:
                return found
    return found


def _layer(real: GramMatrix, mask: GramMatrix, rows: list[tuple[Tensor, Tensor]], tau: float) -> Layer:
    real_values, real_directions = real.principal_directions()
    mask_values, mask_directions = mask.principal_directions()
    rank_real, rank_mask = rank_at(real_values, tau), rank_at(mask_values, tau)
    span = real_directions[:, :rank_real]
    cosines = torch.linalg.svdvals(span.T @ mask_directions[:, :rank_mask]).clamp(max=1.0)
    return Layer(
        residual_real=_median_residual([part for part, _ in rows]),
        residual_mask=_median_residual([part for _, part in rows if len(part) > 1]),
        rank_real=rank_real,
        rank_mask=rank_mask,
        numerical_rank_mask=rank_at(mask_values, 1.0),
        outside_mask=_outside(mask, span),
        outside_real=_outside(real, span),
        angles=torch.rad2deg(torch.arccos(cosines)).tolist(),
    )


def _median_residual(parts: list[Tensor]) -> float:
    require(bool(parts), "no sequence with two [MASK] positions: take longer sequences")
    return median(composite_norm(residual(part)) / composite_norm(part) for part in parts)


def _outside(gram: GramMatrix, span: Tensor) -> float:
    """1 - ||H V||_F^2 / ||H||_F^2 for orthonormal columns V."""
    matrix = gram.matrix.cpu()
    return float(1.0 - torch.trace(span.T @ matrix @ span) / torch.trace(matrix))


def plot_theory(report: TheoryReport, out: Path) -> None:
    """Writes `out` in the format of its ending."""
    figure = figure_of(16.0, 5.0)
    from matplotlib.ticker import PercentFormatter

    bounds, ranks, energy = figure.subplots(1, 3)
    residuals = [report.input_residual, *(step.residual for step in report.attention)]
    printed, corrected = ([getattr(step, name) for step in report.attention] for name in ("printed", "corrected"))
    layers = {name: [getattr(layer, name) for layer in report.layers] for name in vars(report.layers[0])}
    curves = [
        (bounds, 0, 0, residuals, "residual of real rows", "-"),
        (bounds, 1, 1, printed, "bound as printed, from the layer before", "--"),
        (bounds, 2, 1, corrected, "bound that holds, from the layer before", "--"),
        (ranks, 0, 0, layers["rank_real"], "real rows", "-"),
        (ranks, 1, 0, layers["rank_mask"], "[MASK] rows", "-"),
        (energy, 0, 0, layers["outside_real"], "real rows", "-"),
        (energy, 1, 0, layers["outside_mask"], "[MASK] rows", "-"),
    ]
    for axis, i, first, values, label, dash in curves:
        places = range(first, first + len(values))
        axis.plot(places, values, **look(i), linestyle=dash, linewidth=1.8, markersize=5.5, label=label)
    bounds.set_yscale("log")
    energy.yaxis.set_major_formatter(PercentFormatter(1.0))
    titles = {
        bounds: (f"Attention alone, head {report.head} of every layer", r"$\|R\|_{1,\infty}$"),
        ranks: ("The trained network: rank", f"{report.tau:g}-effective rank of {report.hidden_size} dimensions"),
        energy: ("Energy outside the real rows' leading directions", "share of squared norm"),
    }
    for axis, (title, label) in titles.items():
        axis.set_title(title, size=11)
        if axis is not bounds:
            axis.set_ylim(bottom=0)
        layer_axis(axis, label)
        legend_below(axis)
    seen = "" if report.encoder_sees_mask else " ([MASK] never seen in pretraining)"
    figure.suptitle(f"{report.name}, step {report.step:,}{seen}", size=12)
    save(figure, out)
