"""Plain reference of packed attention: one sequence at a time, the scores written out."""

from __future__ import annotations

import torch
from torch import Tensor

from maelm_fast.batch import Layout
from maelm_fast.ops.reference.dropout import keep_weights


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Layout,
    keys: Layout,
    line: Tensor | None = None,
    *,
    scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
) -> Tensor:
    """softmax(q k^T * scale + line[head, clamp(key_position - query_position, -R, R) + R]) v, sequence by sequence.

    q: (Tq, heads, head_dim). k, v: (Tk, heads, head_dim). line: (heads, 2R+1) or None. A query without keys,
    or whose keys all have a bias of -inf, gives 0.
    Computed in fp32 (fp64 for fp64 input). Returns (Tq, heads, head_dim) in q's dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    outputs = []
    start = 0
    q_rows, k_rows = q.split(queries.lengths), k.split(keys.lengths)
    q_places, k_places = queries.positions.split(queries.lengths), keys.positions.split(keys.lengths)
    for s, (q_s, k_s, v_s) in enumerate(zip(q_rows, k_rows, v.split(keys.lengths), strict=True)):
        if k_s.shape[0] == 0 or q_s.shape[0] == 0:
            outputs.append(torch.zeros_like(q_s))
            start += q_s.shape[0]
            continue
        scores = torch.einsum("qhd,khd->hqk", q_s.to(wide), k_s.to(wide)) * scale
        if line is not None:
            distance = k_places[s][None, :].long() - q_places[s][:, None].long()
            reach = line.shape[1] // 2
            bias = line.to(wide)[:, distance.clamp(-reach, reach) + reach]
            alone = bias.isneginf().all(-1, keepdim=True)
            scores = (scores + bias).masked_fill(alone, 0.0)
        weights = scores.softmax(dim=-1)
        if line is not None:
            weights = weights.masked_fill(alone, 0.0)
        if dropout_p > 0.0 and seed is not None:
            rows = torch.arange(q_s.shape[0], device=q.device) + start
            keep = keep_weights(rows, q.shape[1], k_s.shape[0], dropout_p, seed, place, wide)
            weights = weights * keep * (1.0 / (1.0 - dropout_p))
        start += q_s.shape[0]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v_s.to(wide)).to(q.dtype))
    return torch.cat(outputs) if outputs else torch.zeros_like(q)
