"""attention(): packed sequences, original positions, an optional bias by distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maelm_fast.batch import Layout
from maelm_fast.errors import UserError
from maelm_fast.ops import dispatch
from maelm_fast.ops.attention_backends import flash, flex, native, torch_varlen, xformers
from maelm_fast.ops.attention_backends.grouped import Grouping, SpreadLine
from maelm_fast.ops.attention_backends.grouped import attention as grouped_attention
from maelm_fast.ops.reference.attention import attention as reference_attention
from maelm_fast.ops.reference.dropout import check_dropout
from maelm_fast.ops.registration import Direction, register


class AttentionLayout:
    """Who attends to whom: sequence s of `queries` to sequence s of `keys`. Positions ascend within a sequence. Make
    one per batch and share it among layers: what backends work out from the layouts is kept on it."""

    def __init__(self, queries: Layout, keys: Layout | None = None) -> None:
        self.queries = queries
        self.keys = queries if keys is None else keys
        self._kept: dict[str, Any] = {}
        if len(self.queries.lengths) != len(self.keys.lengths):
            raise UserError(
                f"attention: {len(self.queries.lengths)} query sequences but {len(self.keys.lengths)} key sequences"
            )

    @property
    def grouping(self) -> Grouping:
        return self._keep("grouping", lambda: Grouping(self.queries, self.keys))  # type: ignore[no-any-return]

    @property
    def block_mask(self) -> Any:
        return self._keep("block_mask", lambda: flex.block_mask(self.queries, self.keys))

    @property
    def block_diagonal(self) -> Any:
        return self._keep("block_diagonal", lambda: xformers.block_diagonal(self.queries, self.keys))

    def _keep(self, name: str, make: Callable[[], Any]) -> Any:
        """functools.cached_property takes a lock on Python 3.11, which torch.compile cannot trace."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]


class PositionBias:
    """A bias by distance. line: (heads, 2R+1), what is added to the scaled logits at each distance key - query from -R
    to R; beyond them, what stands at the nearer end. positions: one above the largest position; R+1 unless told. Make
    one per forward pass and share it among layers."""

    def __init__(self, line: Tensor, positions: int | None = None) -> None:
        self.line = line
        self.reach = line.shape[1] // 2
        self.positions = self.reach + 1 if positions is None else positions
        if line.dim() != 2 or line.shape[1] % 2 == 0 or self.reach >= self.positions:
            raise UserError(
                f"PositionBias: the line must be (heads, 2R+1) with R < {self.positions} positions; "
                f"it is {tuple(line.shape)}"
            )
        self._spread: dict[Grouping, list[Tensor]] = {}
        self._lookup: Tensor | None = None

    def spread(self, grouping: Grouping) -> list[Tensor]:
        """The bias written out for each group, (heads, G, Lq, Lk); kept, since all layers use the same."""
        if grouping not in self._spread:
            self._spread[grouping] = [
                SpreadLine.apply(self.line.float() if self.line.element_size() < 4 else self.line, group.distance)
                for group in grouping.groups
            ]
        return self._spread[grouping]

    def lookup(self) -> Tensor:
        """(heads, 3P) fp32 for the kernel: the bias times log2(e) of each distance from 1-P to P-1, then -inf, which an
        absent key is given by a position that is too large."""
        if self._lookup is None:
            distance = torch.arange(2 * self.positions - 1, device=self.line.device) - (self.positions - 1)
            line = self.line.detach().float()[:, distance.clamp(-self.reach, self.reach) + self.reach]
            line = line * 1.4426950408889634
            self._lookup = torch.nn.functional.pad(line, (0, self.positions + 1), value=float("-inf")).contiguous()
        return self._lookup


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    bias: PositionBias | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
    backend: str | None = None,
) -> Tensor:
    """For every sequence: F.dropout(softmax(q k^T * scale + bias[key_position - query_position]), dropout_p) v.

    q: (Tq, heads, head_dim). k, v: (Tk, heads, head_dim), the dtype of q. scale: 1 / sqrt(head_dim) unless told.
    dropout_p: dropout on the attention weights, its mask a function of seed (one int64 on the device) and place
    (reference/dropout.py). A query without keys gives 0. Returns (Tq, heads, head_dim). The gradients are the same in
    every run; flash, torch, xformers and flex promise that only under torch.use_deterministic_algorithms.

    Raises UserError for shapes that do not fit, a dropout without seed, or a named backend that cannot run."""
    _check(q, k, v, layout, bias)
    check_dropout(dropout_p, seed)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = (q, k, v, layout, bias)
    able: dict[str, dispatch.Reasons] = {
        "flash": lambda: flash.reasons(*call, dropout_p),
        "torch": lambda: torch_varlen.reasons(*call, dropout_p),
        "triton": lambda: _triton_reasons(q, k, v),
        "xformers": lambda: xformers.reasons(*call, dropout_p),
        "flex": lambda: flex.reasons(*call, dropout_p),
        "native": lambda: native.reasons(q, k, v),
        "grouped": dispatch.always,
        "reference": dispatch.always,
    }
    name = dispatch.pick("attention", backend, q.device, able)
    if name in _ADAPTERS:
        if q.shape[0] == 0 or k.shape[0] == 0:  # nothing to launch a kernel for
            return torch.zeros_like(q)
        return _ADAPTERS[name](*call, scale)
    if name == "triton":
        return _triton(q, k, v, layout, bias, scale, dropout_p, seed, place)
    if name == "native":
        return native.attention(q, k, v, layout, bias, scale, dropout_p, seed, place)
    if name == "grouped":
        biases = bias.spread(layout.grouping) if bias is not None else None
        return grouped_attention(q, k, v, layout.grouping, biases, scale, dropout_p, seed, place)
    line = bias.line if bias is not None else None
    return reference_attention(
        q, k, v, layout.queries, layout.keys, line, scale=scale, dropout_p=dropout_p, seed=seed, place=place
    )  # fmt: skip


_ADAPTERS: dict[str, Callable[..., Tensor]] = {
    "flash": flash.attention, "torch": torch_varlen.attention, "xformers": xformers.attention, "flex": flex.attention,
}  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, bias: PositionBias | None) -> None:
    fits = q.dim() == 3 and k.shape == v.shape and k.shape[1:] == q.shape[1:]
    if not fits or q.shape[0] != layout.queries.num_tokens or k.shape[0] != layout.keys.num_tokens:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise UserError(
            f"attention: q must be ({layout.queries.num_tokens}, heads, head_dim), k and v "
            f"({layout.keys.num_tokens}, heads, head_dim); they are {shapes}"
        )
    if bias is not None and bias.line.shape[0] != q.shape[1]:
        raise UserError(f"attention: the bias has {bias.line.shape[0]} heads, q has {q.shape[1]}")


def _triton_reasons(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    reasons = dispatch.triton_reasons(q, k, v)
    if q.device.type == "cuda" and q.dtype == torch.float32:
        reasons.append("dtype float32 (it takes bf16 and fp16)")
    if not q.dtype == k.dtype == v.dtype:
        reasons.append("q, k and v differ in dtype")
    if q.shape[-1] > 128:
        reasons.append(f"head_dim {q.shape[-1]} (at most 128)")
    return reasons


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    bias: PositionBias | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
) -> Tensor:
    tiles = _tiles(layout.queries.lengths, layout.keys.lengths, q.shape[-1], q.device)
    line = lookup = None
    if bias is not None and bias.reach > 0:  # one bias for every distance changes nothing
        line, lookup = bias.line, bias.lookup()
    out: Tensor = torch.ops.maelm_fast.attention_triton_fwd(
        q, k, v, line, lookup, layout.queries.cu_seqlens, layout.keys.cu_seqlens, layout.queries.positions,
        layout.keys.positions, *tiles, scale, dropout_p, seed, place,
    )[0]  # fmt: skip
    return out


def _tiles(
    queries: tuple[int, ...], keys: tuple[int, ...], head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The query tiles of the forward kernel and of dq, the key tiles of dkv."""
    from maelm_fast.kernels.attention import tile_list, tiles_for

    sizes = tiles_for(device, head_dim)
    tiles = (
        tile_list(queries, keys, sizes.fwd.own, device),
        tile_list(queries, keys, sizes.dq.own, device),
        tile_list(keys, queries, sizes.dkv.own, device),
    )
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.update(tiles)
    return tiles


_captured: set[Tensor] = set()
"""Tiles that a CUDA graph reads at every replay: tile_list may drop its own."""


# as in ops/registration.py: the lengths are constants of a traced graph, and so is what follows from them
_tiles._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _packed(*tensors: Tensor) -> Any:
    from maelm_fast.kernels.attention import Packed

    return Packed(*tensors)


def _reach(line: Tensor | None) -> int:
    return line.shape[1] // 2 if line is not None else 0


def _triton_fwd(
    q: Tensor, k: Tensor, v: Tensor, line: Tensor | None, lookup: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    from maelm_fast.kernels.attention import attention_fwd

    return attention_fwd(q, k, v, lookup, _reach(line), _packed(*rest[:7]), *rest[7:])


def _triton_bwd(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    line: Tensor | None, lookup: Tensor | None, line_gradient: bool, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from maelm_fast.kernels.attention import attention_bwd

    packed, arguments = _packed(*rest[:7]), rest[7:]
    grad_q, grad_k, grad_v, grad_line = attention_bwd(
        grad_out, grad_lse, q, k, v, out, lse, lookup, _reach(line), line_gradient, packed, *arguments
    )
    return grad_q, grad_k, grad_v, q.new_empty(0) if grad_line is None or line is None else grad_line.to(line.dtype)


def _fake_fwd(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_bwd(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    line: Tensor | None, lookup: Tensor | None, line_gradient: bool, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad_line = line.new_empty(line.shape) if line is not None and line_gradient else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_line


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, dropout_p, seed, place = inputs
    ctx.save_for_backward(*tensors, *output, seed)
    ctx.numbers = (scale, dropout_p, place)
    ctx.set_materialize_grads(False)


def _differentiate(backward: Any, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, line, lookup, *packed, out, lse, seed = ctx.saved_tensors
    scale, dropout_p, place = ctx.numbers
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = line is not None and ctx.needs_input_grad[3]
    grad_q, grad_k, grad_v, grad_line = backward(
        grad_out, grad_lse, q, k, v, out, lse, line, lookup, wanted, *packed, scale, dropout_p, seed, place
    )
    return grad_q, grad_k, grad_v, grad_line if wanted else None, *(None,) * 12


_LAYOUT = (
    "Tensor? line, Tensor? lookup, {}Tensor q_starts, Tensor k_starts, Tensor q_positions, Tensor k_positions,"
    " Tensor fwd_tiles, Tensor dq_tiles, Tensor dkv_tiles, float scale, float dropout_p, Tensor? seed, int place)"
)
register(
    "attention",
    Direction(
        f"(Tensor q, Tensor k, Tensor v, {_LAYOUT.format('')} -> (Tensor out, Tensor lse)", _triton_fwd, _fake_fwd
    ),
    Direction(
        "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{_LAYOUT.format('bool line_gradient, ')}"
        " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_line)",
        _triton_bwd,
        _fake_bwd,
    ),
    _setup_context,
    _differentiate,
    native=False,  # ops/attention_backends/native.py: no tiles, no lookup
)
