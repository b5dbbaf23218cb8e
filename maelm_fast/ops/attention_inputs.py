"""What attention takes beside q, k and v: who attends to whom, and a bias by distance. Neither knows the backends: each
of those works out a structure of its own, once, and has it kept here for the other layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maelm_fast.batch import Layout
from maelm_fast.errors import UserError


class _Keeper:
    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """make(), or what it returned to an earlier call with this key. The key is the backend's own: a name, or an
        object that only it has. (functools.cached_property takes a lock on Python 3.11, which torch.compile cannot
        trace.)"""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


class AttentionLayout(_Keeper):
    """Who attends to whom: sequence s of `queries` to sequence s of `keys`. Positions ascend within a sequence. Make
    one per batch and share it among layers: what backends work out from the layouts is kept on it."""

    def __init__(self, queries: Layout, keys: Layout | None = None) -> None:
        super().__init__()
        self.queries = queries
        self.keys = queries if keys is None else keys
        if len(self.queries.lengths) != len(self.keys.lengths):
            raise UserError(
                f"attention: {len(self.queries.lengths)} query sequences but {len(self.keys.lengths)} key sequences"
            )


class PositionBias(_Keeper):
    """A bias by distance. line: (heads, 2R+1), what is added to the scaled logits at each distance key - query from -R
    to R; beyond them, what stands at the nearer end. -inf excludes a pair. positions: one above the largest position;
    R+1 unless told. Make one per forward pass and share it among layers.

    bounded: both ends of the line are -inf in every head, so that kernels may leave out what lies beyond them; within()
    makes such a bias."""

    def __init__(self, line: Tensor, positions: int | None = None) -> None:
        super().__init__()
        self.line = line
        self.bounded = False
        self.reach = line.shape[1] // 2
        self.positions = self.reach + 1 if positions is None else positions
        if line.dim() != 2 or line.shape[1] % 2 == 0 or self.reach >= self.positions:
            raise UserError(
                f"PositionBias: the line must be (heads, 2R+1) with R < {self.positions} positions; "
                f"it is {tuple(line.shape)}"
            )

    def within(self, before: int | None, after: int | None) -> PositionBias:
        """This bias, and -inf for keys that lie more than `before` positions before a query or more than `after` behind
        it; None is no limit. Differentiable in the line. Attention in a sliding window that reaches w to either side:
        PositionBias(torch.zeros(heads, 1)).within(w, w)."""
        limits = [limit for limit in (before, after) if limit is not None]
        if any(limit < 0 for limit in limits):
            raise UserError(f"PositionBias: a window must reach 0 or more positions, not {min(limits)}")
        bounded = len(limits) == 2
        reach = max([limit + 1 for limit in limits] + ([] if bounded else [self.reach]))
        distance = torch.arange(-reach, reach + 1, device=self.line.device)
        outside = torch.zeros_like(distance, dtype=torch.bool)
        if before is not None:
            outside |= distance < -before
        if after is not None:
            outside |= distance > after
        line = self.line[:, distance.clamp(-self.reach, self.reach) + self.reach]
        window = PositionBias(line.masked_fill(outside, float("-inf")), max(self.positions, reach + 1))
        window.bounded = bounded
        return window


@dataclass(frozen=True)
class Call:
    """One call of attention(), as its backends get it: checked, every default filled in. Shapes are attention()'s."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: AttentionLayout
    bias: PositionBias | None
    scale: float
    dropout_p: float
    seed: Tensor | None
    place: int

    @property
    def is_empty(self) -> bool:
        """No queries or no keys: the result is 0, and there is nothing to launch a kernel for."""
        return self.q.shape[0] == 0 or self.k.shape[0] == 0
