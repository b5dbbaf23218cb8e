"""Plain reference of packed attention: one sequence at a time, the scores written out."""

from __future__ import annotations

import torch
from torch import Tensor

from maelm_fast.batch import Layout
from maelm_fast.ops.reference.dropout import dropout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Layout,
    keys: Layout,
    line: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim) + line[head, key_position - query_position + P - 1]) v, sequence by sequence.

    q: (Tq, heads, head_dim). k, v: (Tk, heads, head_dim). line: (heads, 2P-1) or None. A query without keys gives 0.
    Computed in fp32 (fp64 for fp64 input). Returns (Tq, heads, head_dim) in q's dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    outputs = []
    q_rows, k_rows = q.split(queries.lengths), k.split(keys.lengths)
    q_places, k_places = queries.positions.split(queries.lengths), keys.positions.split(keys.lengths)
    for s, (q_s, k_s, v_s) in enumerate(zip(q_rows, k_rows, v.split(keys.lengths), strict=True)):
        if k_s.shape[0] == 0:
            outputs.append(torch.zeros_like(q_s))
            continue
        scores = torch.einsum("qhd,khd->hqk", q_s.to(wide), k_s.to(wide)) * q.shape[-1] ** -0.5
        if line is not None:
            distance = k_places[s][None, :].long() - q_places[s][:, None].long()
            scores = scores + line.to(wide)[:, distance + line.shape[1] // 2]
        weights = dropout(scores.softmax(dim=-1), dropout_p, seed, place, part=s)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v_s.to(wide)).to(q.dtype))
    return torch.cat(outputs) if outputs else torch.zeros_like(q)
