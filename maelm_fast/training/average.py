"""An average of a run's weights, which is what the run evaluates and saves.

The optimiser's state `other` of a parameter is whichever the model does not hold: the average while it trains, and the
weights that train while it is evaluated or saved. So a checkpoint's model is the average, to all that read it, and its
optimiser's state has what a resume needs besides, whole or in the parts of FSDP2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from maelm_fast.training.parallel import part_of


class Average:
    """decay: of the average, an exponential one; 0: there is none, and nothing here does anything."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.parameters = list(model.parameters()) if decay else []
        self.state, self.decay = optimizer.state, decay

    @torch.no_grad()
    def add(self, updates: int) -> None:
        """Takes in the weights. updates: how many are done; while they are few, the average is over the last third of
        them or so, and not over what the run began with. The host waits for nothing."""
        if self.parameters:
            for parameter in self.parameters:
                if "other" not in self.state[parameter]:
                    self.state[parameter]["other"] = parameter.detach().clone()
            others = [part_of(self.state[p]["other"]) for p in self.parameters]
            share = 1 - min(self.decay, updates / (updates + 3))
            torch._foreach_lerp_(others, [part_of(p.detach()) for p in self.parameters], share)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """In here the model's weights are the average."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """In place, since a CUDA graph may have been recorded with these tensors. Before the first update, nothing."""
        for parameter in self.parameters:
            if (other := self.state[parameter].get("other")) is not None:
                _exchange(part_of(parameter.detach()), part_of(other))


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
