"""AdamW and its schedule, as the paper's Table 3 and the released code have them."""

from __future__ import annotations

import torch
from torch import nn

from maelm_fast.config import OptimConfig


def learning_rate(config: OptimConfig, update: int) -> float:
    """lr of an update, counting from 0: linear from 0 to the peak over warmup_steps, then linear to 0 at max_steps.

    Update 0 therefore has lr 0 and the last update peak / (max_steps - warmup_steps), as in the released code."""
    if update < config.warmup_steps:
        return config.lr * update / config.warmup_steps
    return config.lr * (config.max_steps - update) / (config.max_steps - config.warmup_steps)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over all parameters; its lr is set before every update."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim >= 2 and not name.endswith("relative_bias.weight")
        (decayed if matrix or config.decay == "all" else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
