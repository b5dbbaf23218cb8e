"""Where a step's time goes: every profiled operator and kernel put into one of CLASSES.

On a CPU the time of an operator is its own, without what it calls; on a GPU that of the kernels it launched. An
operator's class is its kernel's, else its own, else that of the nearest operator around it that has one; an operator of
the backward pass that has none takes that of the operator whose gradient it computes. Whatever happens within attention
is attention, products and copies included, and the same holds for the optimizer.

Python's own time is nowhere among these, nor is a GPU's idle time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from maelm_fast import ops

CLASSES = {
    "gemm": "matrix products of the linear layers and of the vocabulary projection, forward and backward",
    "attention": "scores, softmax and weighted sum, with bias and dropout",
    "norm": "embedding, LayerNorm with residual and dropout, scatter to the decoder",
    "gelu": "GELU and the feed-forward's first bias, where no product does them",
    "loss": "softmax and cross-entropy, without the projection",
    "optimizer": "gradient norm, clipping, AdamW",
    "dropout": "dropout where it is a kernel of its own; ours is a part of norm and attention",
    "other": "everything else: copies, casts, additions, zeroing",
}

# In this order, the first that is found in a name. Kernels of a product with attention in their names are attention's.
PATTERNS = {
    "optimizer": r"optimizer\.|adam|_foreach_|multi_tensor_apply|vector_norm|clip_grad",
    "loss": r"cross_?entropy|log_?softmax|nll_?loss|loss_rows",
    "attention": r"attention|attn|sdpa|flash_(fwd|bwd)|fmha|softmax|bmm|keep_weights|spread_?line",
    "gemm": r"(add|::|_)mm(_|\b)|addmm|\bmmbackward|(::|_)linear|linearbackward|feed_forward_native"
    r"|gem[mv]|cutlass|nvjet|xmma|cublas",
    "norm": r"layer_?norm|add_?norm|embed|scatter_to_decoder|_run_pieces|_joined_runs",
    "gelu": r"gelu|feed_forward",
    "dropout": r"dropout|bernoulli",  # what is fused with a norm is the norm's
}
_CLASSES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in PATTERNS.items()}
_FUSED = re.compile(
    r"(triton_(poi|red|per|for)|cpp)_fused_"
)  # torch.compile's loops, named after what is fused in them
_FORWARD = "GeneratedBackwardFor_"  # torch.library's name for the call that makes a backward node
_SCOPES = ("attention", "optimizer")
_ANNOTATION = re.compile(r"ProfilerStep|Torch-Compiled Region|## Call")


def class_of(name: str) -> str | None:
    """Of an operator's or a kernel's name; None if it says nothing."""
    if _ANNOTATION.search(name):
        return None
    for kind, pattern in _CLASSES.items():
        if pattern.search(name) and not (kind == "gemm" and _FUSED.match(name)):
            return kind
    return None


def event_class(chain: Iterable[str]) -> str:
    """Of the names of a kernel, the operator that launched it, the operators around that, from the inside out. What is
    not a product itself, a bias's gradient or a cast, is "other" also within a linear layer."""
    names = list(chain)
    kinds = [kind for kind in map(class_of, names) if kind is not None]
    kind = next((scope for scope in _SCOPES if scope in kinds), kinds[0] if kinds else "other")
    own = [name.removeprefix(_FORWARD) for name in names[:2]]
    if kind == "gemm" and not any(class_of(name) == "gemm" and "ackward" not in name for name in own):
        return "other"
    return kind


def chain(event: Any, forward: dict[int, Any]) -> Iterator[str]:
    """Names of an event and of those around it; behind them those of the event whose gradient it computes. forward: by
    sequence number."""
    origin = None
    while event is not None:
        yield event.name
        if event.name.startswith("autograd::engine::evaluate_function"):
            origin = forward.get(event.sequence_nr)
        event = event.cpu_parent
    if origin is not None:
        yield from chain(origin, {})


def times(events: Iterable[Any], device: str) -> Iterator[tuple[str, str, float]]:
    """Name, class and microseconds of whatever took time on the device."""
    events = list(events)
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    forward: dict[int, Any] = {}
    for event in on_host:  # the innermost operator of the forward pass with that number comes last
        if event.sequence_nr >= 0 and "evaluate_function" not in event.name and not _is_backward(event):
            forward[event.sequence_nr] = event
    if device == "cpu":
        for event in on_host:
            yield event.name, event_class(chain(event, forward)), event.self_cpu_time_total
        return
    launched: dict[str, float] = defaultdict(float)
    for event in on_host:
        for kernel in event.kernels:
            launched[kernel.name] += kernel.duration
            yield kernel.name, event_class((kernel.name, *chain(event, forward))), kernel.duration
    seen: dict[str, float] = defaultdict(float)  # some kernels were launched by no operator
    for event in events:
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            seen[event.name] += event.self_device_time_total
    for name, duration in seen.items():
        if duration > launched[name]:
            yield name, event_class((name,)), duration - launched[name]


def _is_backward(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("autograd::engine::evaluate_function"):
            return True
        event = event.cpu_parent
    return False


def shares(
    step: Callable[[], Any], device: str, steps: int, compiled: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """Each class's share of the device's time over some steps, which sum to 1; and of "other" the share of each name.
    compiled: the model is torch.compile's, and would be compiled again if a name were added to it."""
    attention = ops.attention
    if not compiled:  # its gathers and copies have no telling names
        attention = record_function("attention")(attention)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with (
        patch.object(ops, "attention", attention),
        profile(activities=activities) as profiler,
    ):
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    by_class: dict[str, float] = defaultdict(float)
    rest: dict[str, float] = defaultdict(float)
    for name, kind, duration in times(profiler.events(), device):
        by_class[kind] += duration
        if kind == "other":
            rest[name] += duration
    total = sum(by_class.values())
    if not total:
        raise RuntimeError("the profiler saw nothing run on the device")
    return (
        {kind: by_class[kind] / total for kind in CLASSES},
        {name: rest[name] / total for name in sorted(rest, key=lambda name: -rest[name])},
    )
