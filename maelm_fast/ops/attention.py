"""attention(): packed sequences, original positions, an optional relative position bias."""

from __future__ import annotations

import functools

from torch import Tensor

from maelm_fast.batch import Layout
from maelm_fast.errors import UserError
from maelm_fast.ops import dispatch
from maelm_fast.ops.backends.grouped import Grouping, SpreadLine
from maelm_fast.ops.backends.grouped import attention as grouped_attention
from maelm_fast.ops.reference.attention import attention as reference_attention


class AttentionLayout:
    """Who attends to whom: sequence s of `queries` to sequence s of `keys`. Make one per batch and share it among
    layers: what backends work out from the layouts is kept on it."""

    def __init__(self, queries: Layout, keys: Layout | None = None) -> None:
        self.queries = queries
        self.keys = queries if keys is None else keys
        if len(self.queries.lengths) != len(self.keys.lengths):
            raise UserError(
                f"attention: {len(self.queries.lengths)} query sequences but {len(self.keys.lengths)} key sequences"
            )

    @functools.cached_property
    def grouping(self) -> Grouping:
        return Grouping(self.queries, self.keys)


class PositionBias:
    """A relative position bias: line (heads, 2P-1) holds, for each distance key - query from -(P-1) to P-1, what is
    added to the scaled logits. Make one per forward pass and share it among layers."""

    def __init__(self, line: Tensor) -> None:
        self.line = line
        self._spread: dict[int, list[Tensor]] = {}

    def spread(self, grouping: Grouping) -> list[Tensor]:
        """The bias written out for each group, (heads, G, Lq, Lk); kept, since all layers use the same."""
        if id(grouping) not in self._spread:
            self._spread[id(grouping)] = [
                SpreadLine.apply(self.line.float() if self.line.element_size() < 4 else self.line, group.distance)
                for group in grouping.groups
            ]
        return self._spread[id(grouping)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    bias: PositionBias | None = None,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
    backend: str | None = None,
) -> Tensor:
    """For every sequence: softmax(q k^T / sqrt(head_dim) + bias[key_position - query_position]) v.

    q: (Tq, heads, head_dim). k, v: (Tk, heads, head_dim), the dtype of q. bias.line: (heads, 2P-1), P above the largest
    position. dropout_p: dropout on the attention weights, its mask a function of seed (one int64) and place. A query
    without keys gives 0. Returns (Tq, heads, head_dim). Raises UserError when the named backend does not exist."""
    able = {"grouped": dispatch.always, "reference": dispatch.always}
    backend = dispatch.pick("attention", backend, q.device, able)
    if backend == "grouped":
        biases = bias.spread(layout.grouping) if bias is not None else None
        return grouped_attention(q, k, v, layout.grouping, biases, dropout_p, seed, place)
    line = bias.line if bias is not None else None
    return reference_attention(
        q, k, v, layout.queries, layout.keys, line, dropout_p=dropout_p, seed=seed, place=place
    )  # fmt: skip
