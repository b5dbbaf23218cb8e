"""Pieces of Markdown that reports are made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

NONE = "-"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table and an empty line."""
    body = [list(header), ["---"] * len(header), *map(list, rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body] + [""]


def over_seeds(values: Sequence[float], digits: int) -> str:
    """ "2.50" of one value, "2.50 [2.40, 2.70]" of several, a dash of none."""
    if not values:
        return NONE
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"


def over_draws(values: Sequence[float], digits: int) -> str:
    """ "2.5" of one value, "2.5 (0.7)" of several, mean and standard deviation, a dash of none."""
    if not values:
        return NONE
    mean = f"{statistics.mean(values):,.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({statistics.pstdev(values):,.{digits}f})"
