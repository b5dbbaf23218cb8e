"""embed_packed(): the encoder's input, two table look-ups, LayerNorm and dropout in one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from maelm_fast.errors import UserError
from maelm_fast.ops import dispatch
from maelm_fast.ops.reference.dropout import check_dropout
from maelm_fast.ops.reference.embed_packed import embed_packed as reference_embed_packed
from maelm_fast.ops.registration import custom_op, describe


def embed_packed(
    ids: Tensor,
    positions: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    place: int = 0,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """F.dropout(F.layer_norm(token_table[ids] + position_table[positions], (d,), weight, bias, eps), dropout_p).

    ids, positions: (T,) int32 or int64, T may be 0; on a GPU it is the caller's duty that they lie within the tables.
    token_table: (V, d). position_table: (P, d). weight, bias: (d,). Statistics are fp32 (fp64 for fp64 tables). seed,
    place: what the dropout mask is a function of; seed is one int64 on the tables' device (reference/dropout.py).
    Returns (T, d) in `dtype`: if None, autocast's where autocast is on, else the token table's. In PyTorch's
    deterministic mode the tables' gradients are added in a fixed order; the norm's are always.

    Raises UserError for shapes that do not fit, a dropout without seed, or a named backend that cannot run."""
    d = token_table.shape[1:]
    if ids.dim() != 1 or positions.shape != ids.shape or len(d) != 1 or position_table.dim() != 2:
        raise UserError("embed_packed: ids and positions must be (T,), token_table (V, d), position_table (P, d)")
    if position_table.shape[1:] != d or weight.shape != d or bias.shape != d:
        widths = [t.shape[-1] for t in (token_table, position_table, weight, bias)]
        raise UserError(f"embed_packed: tables, weight and bias must have one width; they have {widths}")
    check_dropout(dropout_p, seed)
    device = ids.device.type
    if dtype is None:
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else token_table.dtype
    tensors = (token_table, position_table, weight, bias)
    able = {
        "triton": lambda: dispatch.triton_reasons(*tensors),
        "native": lambda: dispatch.native_reasons("embed_packed", *tensors),
        "reference": dispatch.always,
    }
    name = dispatch.pick("embed_packed", backend, ids.device, able)
    if name == "reference":
        return reference_embed_packed(
            ids,
            positions,
            token_table,
            position_table,
            weight,
            bias,
            eps=eps,
            dropout_p=dropout_p,
            seed=seed,
            place=place,
            dtype=dtype,
        )
    pair = torch.ops.maelm_fast
    run = pair.embed_packed_triton_fwd if name == "triton" else pair.embed_packed_native_fwd
    norm = torch.promote_types(weight.dtype, bias.dtype)  # the kernels take one dtype for both; they seldom differ
    out: Tensor = run(
        ids, positions, token_table, position_table, weight.to(norm), bias.to(norm), eps, dropout_p, seed, place, dtype
    )[0]
    return out


@custom_op("embed_packed_triton_fwd")
def _triton_fwd(
    ids: Tensor,
    positions: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, mean and rstd."""
    from maelm_fast.kernels.embed_packed import embed_packed_fwd

    return embed_packed_fwd(
        ids, positions, token_table, position_table, weight, bias, eps, dropout_p, seed, place, dtype
    )


@custom_op("embed_packed_triton_bwd")
def _triton_bwd(
    grad_out: Tensor,
    ids: Tensor,
    positions: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    place: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of token_table, position_table, weight and bias."""
    from maelm_fast.kernels.embed_packed import embed_packed_bwd

    saved = (ids, positions, token_table, position_table, weight, mean, rstd)
    return embed_packed_bwd(grad_out, *saved, dropout_p, seed, place, deterministic)


def _fake_fwd(ids: Tensor, positions: Tensor, token_table: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (token_table.new_empty(ids.shape[0], dtype=torch.float32) for _ in range(2))
    return token_table.new_empty((ids.shape[0], token_table.shape[1]), dtype=rest[-1]), mean, rstd


def _fake_bwd(
    grad_out: Tensor,
    ids: Tensor,
    positions: Tensor,
    token_table: Tensor,
    position_table: Tensor,
    weight: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (token_table, position_table, weight, weight))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ids, positions, token_table, position_table, weight, _, _, dropout_p, seed, place, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(ids, positions, token_table, position_table, weight, mean, rstd, seed)
    ctx.dropout = (dropout_p, place)


def _backward(name: str, ctx: Any, grad_out: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    *saved, seed = ctx.saved_tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    run = getattr(torch.ops.maelm_fast, name)
    dropout_p, place = ctx.dropout
    return None, None, *run(grad_out, *saved, dropout_p, seed, place, deterministic)


for _backend in ("triton", "native"):
    _bwd = f"embed_packed_{_backend}_bwd"
    describe(f"embed_packed_{_backend}_fwd", _fake_fwd, _setup_context, functools.partial(_backward, _bwd))
    describe(_bwd, _fake_bwd)
