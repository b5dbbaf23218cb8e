"""What a sweep's rows say of how the time grows: exponents, and the share that each of a few terms has in it.

The update's share is timed. What remains, forward and backward, is fitted: sum of cost x amount over TERMS, no cost
below zero. Other work in proportion to parameters (casts of weights, gradients of tables) falls to TERMS.

A row needs its axis, x, model, batch, seq, flops, parameters, amounts of TERMS, and the seconds of every round, of the
whole step and of its update. Intervals are 95%, from drawing the rounds again with replacement.

Shapes: n points of one model, over all axes, k terms, r resamples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TERMS = {
    "gemm": ("FLOP", "FLOPs of the linear layers and of the vocabulary projection"),
    "attention": ("FLOP", "FLOPs of q k^T and the weighted sum; bias, softmax and dropout grow alike"),
    "elementwise": ("element", "elements that LayerNorm, GELU and the logits write (norm, gelu, loss of classes.py)"),
    "overhead": ("block", "blocks; embedding and head counted as one: Python, dispatch, launches"),
}
RESAMPLES = 200
OPTIMIZER = "optimizer"  # the term that is timed, as classes.py calls it
LARGEST_CONDITION = 1e3  # of the terms' amounts, each scaled to the same size, before a fit can tell them apart

Floats = NDArray[np.float64]
Row = dict[str, Any]


def fits(rows: Sequence[Row]) -> list[Row]:
    """A row per axis and model that has at least two points, and a row of the terms' rates per model."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        terms = Terms(own)
        for axis in dict.fromkeys(row["axis"] for row in own):
            indices = sorted((i for i, row in enumerate(own) if row["axis"] == axis), key=lambda i: own[i]["x"])
            if len(indices) > 1:
                found.append({"kind": "fit", "axis": axis, "model": model, **axis_fit(terms, indices)})
        found.append({"kind": "rates", "model": model, "rates": terms.rates(), "misfit": terms.misfit()})
    return found


class Terms:
    """One model's points, and the costs of the terms over them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.amounts: Floats = np.array([[row["amounts"][term] for term in TERMS] for row in rows], float)  # (n, k)
        rounds = [np.array([row["round_seconds"], row["round_update_seconds"]]) for row in rows]
        self.timed = without_drift(rows, np.array([np.median(both, axis=1) for both in rounds]))  # (n, 2)
        self.samples = [without_drift(rows, sample) for sample in resampled(rows, rounds)]  # r of them
        scaled = self.amounts / self.seconds[:, None]
        scaled /= np.linalg.norm(scaled, axis=0)
        self.told_apart = len(rows) > len(TERMS) and bool(np.linalg.cond(scaled) < LARGEST_CONDITION)
        if self.told_apart:
            self.parts = self.split(self.timed)  # (n, 1 + k)
            self.part_samples = [self.split(sample) for sample in self.samples]

    @property
    def seconds(self) -> Floats:
        """(n,) of a step."""
        seconds: Floats = self.timed[:, 0]
        return seconds

    def split(self, timed: Floats) -> Floats:
        """(n, 1 + k) seconds of the update, and of each term as fitted."""
        return np.column_stack([timed[:, 1], self.amounts * nonnegative(self.amounts, timed)])

    def misfit(self) -> float | None:
        """Root mean square of the relative error."""
        if not self.told_apart:
            return None
        return round(float(np.sqrt(np.mean((self.parts.sum(axis=1) / self.seconds - 1) ** 2))), 4)

    def rates(self) -> dict[str, float | None] | None:
        """Units of each term's amount per second, parameters for the update; None for a term that takes no time."""
        if not self.told_apart:
            return None
        amounts = np.column_stack([[row["parameters"] for row in self.rows], self.amounts]).sum(axis=0)
        seconds = self.parts.sum(axis=0)
        return {
            term: float(f"{amount / taken:.4g}") if taken else None
            for term, amount, taken in zip((OPTIMIZER, *TERMS), amounts, seconds, strict=True)
        }

    def shares(self, index: int) -> dict[str, dict[str, float]]:
        """Of each term in a point's time, as update and fit add up to it."""
        shares, *samples = (parts[index] / parts[index].sum() for parts in (self.parts, *self.part_samples))
        drawn = np.array(samples).T
        return {
            term: interval(share, sample)
            for term, share, sample in zip((OPTIMIZER, *TERMS), shares, drawn, strict=True)
        }


def resampled(rows: Sequence[Row], rounds: Sequence[Floats]) -> Iterator[Floats]:
    """(n, 2) medians of every point over rounds drawn with replacement, the same ones for the points of an axis, which
    were timed together."""
    draw = np.random.default_rng(0)
    counts = {row["axis"]: len(row["round_seconds"]) for row in rows}
    for _ in range(RESAMPLES):
        drawn = {axis: draw.integers(0, count, count) for axis, count in counts.items()}
        yield np.array([np.median(both[:, drawn[row["axis"]]], axis=1) for row, both in zip(rows, rounds, strict=True)])


def without_drift(rows: Sequence[Row], timed: Floats) -> Floats:
    """timed: (n, 2). Axes are timed one after another, and share a point: each axis's seconds are scaled so that the
    base point, the one that occurs most often, takes as long in it as in the median axis."""
    points = [(row["batch"], row["seq"], *row["amounts"].values()) for row in rows]
    base = max(points, key=points.count)
    of_base = {row["axis"]: s for row, point, (s, _) in zip(rows, points, timed, strict=True) if point == base}
    middle = float(np.median(list(of_base.values())))
    scales = np.array([middle / of_base.get(row["axis"], middle) for row in rows])
    scaled: Floats = timed * scales[:, None]
    return scaled


def nonnegative(amounts: Floats, timed: Floats) -> Floats:
    """(k,) costs, none below zero, for the least error relative to the step: the best of all subsets of terms, the
    others zero."""
    seconds, update = timed.T
    relative = amounts / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    columns, target = relative / scale, (seconds - update) / seconds
    least, best = math.inf, np.zeros(amounts.shape[1])
    for chosen in itertools.product((False, True), repeat=amounts.shape[1]):
        costs = np.zeros(amounts.shape[1])
        costs[list(chosen)] = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
        error = float(np.linalg.norm(columns @ costs - target))
        if error < least - 1e-9 and (costs >= 0).all():  # no more terms than it takes
            least, best = error, costs
    unscaled: Floats = best / scale
    return unscaled


def axis_fit(terms: Terms, indices: list[int]) -> Row:
    """The exponents of the points at `indices`, in the order of x, and what the terms say of the first and the last."""
    rows = [terms.rows[i] for i in indices]
    x, flops = np.array([row["x"] for row in rows]), np.array([row["flops"] for row in rows])
    seconds = terms.seconds[indices]
    ends = {"first": indices[0], "last": indices[-1]}
    return {
        "x": x.tolist(),
        "exponent": interval(slope(x, seconds), [slope(x, sample[indices, 0]) for sample in terms.samples]),
        "local_exponents": {"first": slope(x[:2], seconds[:2]), "last": slope(x[-2:], seconds[-2:])},
        "flop_exponent": slope(x, flops),
        "terms_exponent": slope(x, terms.parts[indices].sum(axis=1)) if terms.told_apart else None,
        "shares": {end: terms.shares(i) for end, i in ends.items()} if terms.told_apart else None,
    }


def slope(x: Floats, y: Floats) -> float:
    """Of the least-squares line through the logarithms."""
    return round(float(np.polyfit(np.log(x), np.log(y), 1)[0]), 4)


def interval(value: float, samples: Floats | list[float]) -> dict[str, float]:
    """With the 95% interval of its resamples."""
    low, high = np.percentile(samples, (2.5, 97.5))
    return {"median": round(float(value), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def fit_lines(row: Row) -> Iterator[str]:
    if row["kind"] == "rates":
        if row["rates"] is None:
            yield f"{row['model']}: these axes cannot tell the terms apart; measure more of them for shares"
            return
        unit = {OPTIMIZER: "parameter", **{term: name for term, (name, _) in TERMS.items()}}
        rates = (
            f"{term} none" if rate is None else f"{term} {rate:.3g} {unit[term]}/s"
            for term, rate in row["rates"].items()
        )
        yield f"{row['model']}: {', '.join(rates)}; relative error {row['misfit']:.1%}"
        return
    exponent, local = row["exponent"], row["local_exponents"]
    terms = "" if row["terms_exponent"] is None else f", the terms as {row['terms_exponent']:.2f}"
    yield (
        f"{row['axis']}, {row['model']}: time grows as x^{exponent['median']:.2f} [{exponent['low']:.2f}, "
        f"{exponent['high']:.2f}] ({local['first']:.2f} at first, {local['last']:.2f} at last), FLOPs as "
        f"{row['flop_exponent']:.2f}{terms}"
    )
    for end, x in (("first", row["x"][0]), ("last", row["x"][-1])):
        if row["shares"] is not None:
            parts = ", ".join(
                f"{term} {share['median']:.0%} [{share['low']:.0%}, {share['high']:.0%}]"
                for term, share in row["shares"][end].items()
            )
            yield f"  at {x}: {parts}"
