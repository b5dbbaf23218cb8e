"""One optimiser update, during which the host never waits for the device.

The gradient's norm, clipping and the decision to leave out an update whose gradient is not finite stay on the device:
they are arguments of fused AdamW, which divides the gradients by one number and looks at another before it writes. What
the host wants to know comes back as one row of numbers, read when the next update is already under way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maelm_fast.batch import PackedBatch
from maelm_fast.errors import UserError
from maelm_fast.masking import Masker
from maelm_fast.model.maelm import MaeLm
from maelm_fast.training.parallel import Forward, Processes, whole


class Numbers(NamedTuple):
    """What an update reports. loss: mean over the tokens it predicts, nats. norm: of the gradient before clipping."""

    loss: float
    correct: float
    norm: float
    skipped: float
    """1 if the gradient was not finite and nothing was changed, else 0."""
    original: float = 0
    visible: float = 0
    masked: float = 0
    """Tokens, as in TokenCounts."""
    flops: float = 0
    """Model FLOPs, if somebody wants to know."""
    stop: float = 0
    """How many processes have been asked to stop."""


class TrainStep:
    """Forward and backward of an update's micro-batches, then clipping and AdamW.

    optimizer: fused AdamW (training/optim.py) over the model's parameters. clip_norm: 0 is off. precision: "bf16" for
    autocast, "fp32". processes, forward: those that share the update, and what they made of the model."""

    def __init__(
        self,
        model: MaeLm,
        optimizer: torch.optim.AdamW,
        clip_norm: float,
        precision: str,
        processes: Processes | None = None,
        forward: Forward | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters = list(model.parameters())
        self.clip_norm, self.precision = clip_norm, precision
        self.processes = processes or Processes(self.parameters[0].device)
        self.forward = forward or model

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.parameters[0].device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def __call__(self, micro_batches: Sequence[PackedBatch], seeds: Tensor, lr: float) -> Tensor:
        """seeds: (micro-batches,) int64 on the device, dropout's. Returns the first four of Numbers, (4,) float64 on
        the device; with several processes, who all must call this with as many micro-batches, loss and correct are this
        one's share of the sum."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return self.compute(micro_batches, seeds)

    def compute(self, micro_batches: Sequence[PackedBatch], seeds: Tensor) -> Tensor:
        """The update at the learning rate that is set."""
        device, processes = seeds.device, self.processes
        predicted = processes.total(sum(self.model.predicted_tokens(batch.counts) for batch in micro_batches))
        mean = predicted / processes.world  # the gradients are averaged over the processes, not summed
        loss, correct = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        for i, (batch, seed) in enumerate(zip(micro_batches, seeds, strict=True), start=1):
            last = i == len(micro_batches)
            with processes.communicating(self.forward, last):
                with self.autocast():
                    batch_loss, batch_correct = self.forward(batch, dropout_seed=seed)
                if last:
                    processes.at("adding up gradients")
                (batch_loss / mean).backward()
            loss += batch_loss.detach()
            correct += batch_correct
        norm, skipped = apply_gradients(self.optimizer, self.parameters, self.clip_norm)
        return torch.stack([value.double() for value in (loss / predicted, correct, norm, skipped)])


def apply_gradients(
    optimizer: torch.optim.AdamW, parameters: Sequence[Tensor], clip_norm: float
) -> tuple[Tensor, Tensor]:
    """torch.nn.utils.clip_grad_norm_ (unless clip_norm is 0), optimizer.step() if that norm is finite, and zero_grad().

    optimizer: fused, over `parameters`. Returns the norm before clipping and 1.0 if the step was left out, else 0.0;
    both 0-d fp32 on the device, and the same on every process that shares the gradients."""
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    skipped = norm.isfinite().logical_not().float()
    fused: Any = optimizer  # the names by which a gradient scaler hands these to a fused optimiser
    fused.grad_scale = (norm / (clip_norm or math.inf)).clamp(min=1.0)
    fused.found_inf = skipped
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, skipped


Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class GraphedStep:
    """TrainStep as one CUDA graph, launched at once instead of kernel by kernel: for when the host is what limits. The
    sequences of every update must have the lengths of the recorded one's.

    record: a function to its replay; a CUDA graph's unless told."""

    eager_updates = 3
    """The first updates compile the kernels and make the optimiser's state, which recording cannot."""

    def __init__(self, step: TrainStep, record: Record | None = None) -> None:
        device = step.parameters[0].device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.step, self.record = step, record or partial(_cuda_graph, self._side)
        self._done = 0
        self._replay: Callable[[], Tensor] | None = None
        for group in step.optimizer.param_groups:
            group["lr"] = torch.zeros((), device=device)
            group["capturable"] = device.type == "cuda"

    def __call__(self, micro_batches: Sequence[PackedBatch], seeds: Tensor, lr: float) -> Tensor:
        """As TrainStep. The row returned is overwritten by the next call. Raises UserError for other lengths."""
        for group in self.step.optimizer.param_groups:
            group["lr"].fill_(lr)
        self._done += 1
        if self._done <= self.eager_updates:
            return _on(self._side, lambda: self.step.compute(micro_batches, seeds))
        if self._replay is None:
            self._inputs = [batch.map(Tensor.clone) for batch in micro_batches], seeds.clone()
            self._replay = self.record(lambda: self.step.compute(*self._inputs))
        else:
            self._copy(micro_batches, seeds)
        return self._replay()

    def _copy(self, micro_batches: Sequence[PackedBatch], seeds: Tensor) -> None:
        batches, held = self._inputs
        if [batch.lengths for batch in batches] != [batch.lengths for batch in micro_batches]:
            raise UserError(
                "runtime.cuda_graph: an update's sequences differ in length from those of the one that was recorded; "
                "set runtime.cuda_graph=false"
            )
        sources = [tensor for batch in micro_batches for tensor in batch.tensors]
        torch._foreach_copy_([*(tensor for batch in batches for tensor in batch.tensors), held], [*sources, seeds])


def check_recordable(device: torch.device, masker: Masker, sample_lengths: Iterable[int], world: int = 1) -> None:
    """Raises UserError if there is no GPU, if there are several processes (ours: what DDP and FSDP2 do around a step is
    not recorded) or if updates can differ in shape, so that no graph can be replayed."""
    if world > 1:
        need = "a run of one process"
    elif device.type != "cuda":
        need = "a GPU"
    elif len(set(sample_lengths)) > 1:
        need = "samples of one length: prepare the data with --mode full"
    elif masker.masking.count != "fixed" or not masker.masking.special_tokens:
        need = "a fixed number of masked tokens: set masking.count=fixed and masking.special_tokens=true"
    elif masker.removes_by_policy:
        need = "masking.policy=mask: with bert the encoder gets a varying number of tokens"
    else:
        return
    raise UserError(f"runtime.cuda_graph needs {need}; or set runtime.cuda_graph=false")


def _on(side: torch.cuda.Stream | None, function: Callable[[], Tensor]) -> Tensor:
    """What is to be recorded must have run on another than the default stream before (PyTorch's notes on graphs): on
    the one that records it, whose memory the recording then takes."""
    if side is None:
        return function()
    main = torch.cuda.current_stream(side.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = function()
    main.wait_stream(side)
    result.record_stream(main)
    return result


def _cuda_graph(stream: torch.cuda.Stream | None, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    graph = torch.cuda.CUDAGraph()
    # thread_local: the loader's thread may pin memory meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = function()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class Readback:
    """Numbers of updates on their way to the host: those of an update are waited for when the next one is queued, so
    that the device has work meanwhile."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, Tensor, torch.cuda.Event | None]] = deque()

    def put(self, key: Any, numbers: Tensor) -> None:
        """numbers: what TrainStep returned. key: handed back with them."""
        event = None
        if numbers.is_cuda:
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((key, numbers, event))

    def take(self, everything: bool) -> Iterator[tuple[Any, Numbers]]:
        """(key, numbers) of finished updates in their order; of the last one only on a CPU or if `everything`."""
        while self._waiting and (everything or len(self._waiting) > 1 or self._waiting[0][2] is None):
            key, numbers, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield key, Numbers(*numbers.tolist())
