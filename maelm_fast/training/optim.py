"""AdamW and its schedule, as the paper's Table 3 and the released code have them; or Muon and AdamW (muon.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from maelm_fast.config import OptimConfig
from maelm_fast.training.muon import Muon


def learning_rate(config: OptimConfig, update: int) -> float:
    """lr of an update, counting from 0: linear from 0 to the peak over warmup_steps, then linear to lr_end of it at
    max_steps, at once or, in a trapezoid, over the last cooldown_steps.

    Update 0 therefore has lr 0 and, where lr_end is 0, the last update peak / (max_steps - warmup_steps), as in the
    released code."""
    if update < config.warmup_steps:
        return config.lr * update / config.warmup_steps
    if config.cooldown_steps is not None:
        lr = config.lr * min((config.max_steps - update) / config.cooldown_steps, 1.0)
    else:
        lr = config.lr * (config.max_steps - update) / (config.max_steps - config.warmup_steps)
    return lr + config.lr_end * (config.lr - lr)


LOOKED_UP = ("_table", "relative_bias.weight")
"""How the names of the matrices end whose rows are looked up, and which Muon leaves to AdamW."""


def build_optimizer(model: nn.Module, config: OptimConfig, precision: str = "fp32") -> torch.optim.AdamW:
    """Fused AdamW over all parameters, or over all but the hidden matrices, which are Muon's; its lr is set before
    every update. precision: of Muon's products, "bf16" or "fp32"."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    hidden: dict[tuple[torch.Size, int], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim >= 2 and not name.endswith("relative_bias.weight")
        if config.name == "muon" and parameter.ndim == 2 and not name.endswith(LOOKED_UP):
            hidden.setdefault((parameter.shape, 3 if name.endswith("qkv.weight") else 1), []).append(parameter)
        else:
            (decayed if matrix or config.decay == "all" else plain).append(parameter)
    adamw = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups: list[dict[str, Any]] = [group for group in adamw if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    ratio = (config.muon_lr or config.lr) / config.lr
    muon = [
        {
            "params": matrices,
            "parts": parts,
            "lr_ratio": ratio,
            "momentum": config.muon_momentum,
            "weight_decay": config.weight_decay,
        }
        for (_, parts), matrices in hidden.items()
    ]
    products = torch.bfloat16 if precision == "bf16" else torch.float32
    return Muon([*groups, *muon], products, lr=config.lr, betas=config.betas, eps=config.eps)


def describe(optimizer: torch.optim.AdamW) -> str:
    """Which parameters are Muon's, in a line."""
    muon = [p for group in optimizer.param_groups if "parts" in group for p in group["params"]]
    others = [p for group in optimizer.param_groups if "parts" not in group for p in group["params"]]
    counts = [f"{len(params)} tensors of {sum(p.numel() for p in params):,}" for params in (muon, others)]
    return f"optimiser: Muon for the blocks' and the head's matrices, {counts[0]}; AdamW for all else, {counts[1]}"
