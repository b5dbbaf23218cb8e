"""Singular values of a matrix that is never held: H^T H, summed in float64 as H's rows come by.

The squared singular values of H are the eigenvalues of its Gram matrix H^T H, and its right singular vectors are the
eigenvectors; one pass over millions of rows gives every share of energy and every subspace.

Shapes: T rows (tokens), d dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maelm_fast.config import require


class GramMatrix:
    """H^T H in float64, rows of H added a batch at a time."""

    def __init__(self, dimensions: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self.matrix = torch.zeros(dimensions, dimensions, dtype=torch.float64, device=device)

    def add(self, hidden: Tensor) -> None:
        """hidden: (T, d)."""
        wide = hidden.to(torch.float64)
        self.matrix.addmm_(wide.T, wide)
        self.tokens += hidden.shape[0]

    def squared_singular_values(self) -> Tensor:
        """(d,) float64 on the CPU, descending. Those within rounding error of zero, negative ones too, are zero."""
        return _cleaned(torch.linalg.eigvalsh(self.matrix.cpu()).flip(0))

    def principal_directions(self) -> tuple[Tensor, Tensor]:
        """(squared singular values (d,), right singular vectors (d, d) in columns), both descending, on the CPU."""
        values, vectors = torch.linalg.eigh(self.matrix.cpu())
        return _cleaned(values.flip(0)), vectors.flip(1)


def rank_at(squared: Tensor, tau: float) -> int:
    """The smallest k such that the k largest of the squared singular values, (d,) descending, hold a share tau.

    tau lies in (0, 1]; 1 gives the numerical rank. A share that misses tau by rounding alone counts as reaching it. A
    matrix of zeros has rank 0."""
    require(0.0 < tau <= 1.0, f"tau must lie above 0 and at most at 1, not {tau}")
    held = squared.to(torch.float64).cumsum(0)
    if held[-1] <= 0:
        return 0
    return int((held < held[-1] * (tau - _rounding(len(held)))).sum()) + 1


def _cleaned(descending: Tensor) -> Tensor:
    return torch.where(descending > descending[0] * _rounding(len(descending)), descending, 0.0)


def _rounding(dimensions: int) -> float:
    return dimensions * torch.finfo(torch.float64).eps
