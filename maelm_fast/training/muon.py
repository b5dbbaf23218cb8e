"""Muon for the hidden matrices and AdamW for all else, as one optimiser that never makes the host wait.

torch.optim.Muon takes its learning rate as a number of the host's, matrices one by one, and knows no gradient that is
not finite. Here matrices of one shape are one batch of products, and what fused AdamW is told by tensors on the device
(to divide the gradients, to leave the update out) holds for both kinds of groups. A CUDA graph can record it. Under
FSDP2 every process gathers the matrices and computes their whole updates, of which it keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maelm_fast.training.parallel import gathered, part_like, part_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration's quintic: as steep at 0 as it can be (K. Jordan's Muon)
ITERATIONS = 5
RMS = 0.2  # of an update, over its learning rate: about AdamW's (arXiv 2502.16982)


class Muon(torch.optim.AdamW):
    """Groups with `parts` are updated by Muon, with Nesterov's momentum and decoupled weight decay; others by AdamW.

    groups: those of Muon hold matrices of one shape, (parts * r, c), each of which is `parts` matrices (r, c) one below
    the other, orthogonalised one by one; their learning rate is lr * lr_ratio, and `momentum` that of the gradients'
    average. products: the dtype in which that is done. adamw: the arguments of AdamW; its lr and weight_decay are of
    Muon's groups too unless they have their own.
    State of a matrix: "momentum", like it."""

    grad_scale: Tensor | None = None
    """0-d on the device, as for a fused optimiser: gradients are divided by it."""
    found_inf: Tensor | None = None
    """0-d on the device: 1 if neither weights nor state shall change, else 0."""

    def __init__(self, groups: list[dict[str, Any]], products: torch.dtype, **adamw: Any) -> None:
        super().__init__(groups, fused=True, **adamw)
        self.products = products

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all groups, of the parameters that have a gradient. closure: as every optimiser's, called
        before it; what it returns is returned (Lightning's computes the gradients)."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        groups = self.param_groups
        self.param_groups = [group for group in groups if "parts" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "parts" in group:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        matrices = [p for p in group["params"] if p.grad is not None]
        if not matrices:
            return
        momenta = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in matrices]
        here, momenta = ([part_of(tensor) for tensor in tensors] for tensors in (matrices, momenta))
        gradients = [part_of(p.grad) for p in matrices]
        lr, momentum = group["lr"] * group["lr_ratio"], group["momentum"]
        if self.grad_scale is not None:
            gradients = [gradient / self.grad_scale for gradient in gradients]
        if self.found_inf is not None:
            skip = self.found_inf > 0
            gradients = [torch.where(skip, old, new) for old, new in zip(momenta, gradients, strict=True)]
            lr = torch.where(skip, 0.0, lr)
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)  # of a momentum with itself it is the same, to the bit
        directions = torch._foreach_lerp(gradients, momenta, momentum)
        whole = torch.stack([gathered(part, p) for part, p in zip(directions, matrices, strict=True)])
        number, rows, columns = whole.shape
        rows //= group["parts"]
        updates = orthogonal(whole.view(-1, rows, columns).to(self.products)).to(whole.dtype)
        updates = updates.view(number, -1, columns) * (lr * RMS * max(rows, columns) ** 0.5)
        torch._foreach_mul_(here, 1 - lr * group["weight_decay"])
        mine = [part_of(part_like(update, p)) for update, p in zip(updates, matrices, strict=True)]
        torch._foreach_sub_(here, mine)


def orthogonal(matrices: Tensor) -> Tensor:
    """(n, r, c): each matrix with its singular values made about 1 by a Newton-Schulz iteration, between 0.7 and 1.2
    where they were not below a thousandth of its norm. 0 stays 0."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
