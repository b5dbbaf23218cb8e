"""What a contestant must pass before its training step is timed.

Ours: the loss and the gradient of every parameter, at the precision and the dropout that are timed, by the kernels that
are timed, may be little further from plain PyTorch's in float64 than plain PyTorch's are at that precision. All of them
drop the same, since dropout is a function of its seed.

A peer that computes what ours does must have our loss on our weights, in fp32 without dropout; where bf16 is timed,
our loss and the norm of our gradient in bf16 too. What is compiled must have the loss of what is not, on two of its
layers: a compiler meets nothing new in the others, and takes its time for each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants import ATTENTION, PEERS, Contestant, Settings, split
from benchmarks.measure import GATE, Failed, distance
from benchmarks.padded import PaddedMaeLm, padded_inputs
from benchmarks.peers import copy_weights, hugging_face_inputs, hugging_face_roberta
from benchmarks.rows import COMPILED
from maelm_fast import ops
from maelm_fast.config import BackendConfig
from maelm_fast.model.maelm import MaeLm

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}  # relative difference of two losses summed in different orders
NORM_TOLERANCE = 2e-2  # of two gradients' norms in bf16
SEQUENCES = {"cpu": 2, "cuda": 8}  # at most
COMPILED_LAYERS = 2
PLAIN = BackendConfig(
    embed_packed="reference",
    attention="reference",
    add_norm="reference",
    linear="reference",
    feed_forward="reference",
    scatter_to_decoder="reference",
    masked_cross_entropy="reference",
)


def gate(name: str, settings: Settings) -> dict[str, float]:
    """What was compared, by name; Failed if it does not agree."""
    kind, variant = split(name)
    small = replace(settings, batch=min(settings.batch, SEQUENCES[settings.device]))
    plain = replace(small, dropout=0.0, precision="fp32")
    if variant == COMPILED:
        return _compiled(name, kind, plain)
    if kind in ATTENTION:
        exact = {} if kind == "hf_flash" else _hugging_face(kind, plain)  # flash attention takes no fp32
        return exact | (_hugging_face(kind, replace(plain, precision="bf16")) if settings.precision == "bf16" else {})
    if kind == "padded":
        return _padded(plain)
    if kind in PEERS:  # there is nothing to compare it with
        return {}
    return kernels(kind, small)


def kernels(kind: str, settings: Settings) -> dict[str, float]:
    """The loss, and of all parameters the largest distance of the gradient from float64's, ours and plain PyTorch's."""
    exact_loss, exact = _gradients(kind, replace(settings, precision="fp32"), PLAIN, torch.float64)
    _, plain = _gradients(kind, settings, PLAIN)
    loss, ours = _gradients(kind, settings, BackendConfig())
    allowed = GATE[torch.bfloat16 if settings.precision == "bf16" else torch.float32]
    furthest = {"ours": 0.0, "pytorch": 0.0}
    for name, gradient in exact.items():
        apart = {"ours": distance(ours[name], gradient), "pytorch": distance(plain[name], gradient)}
        if not apart["ours"] <= allowed + 2 * apart["pytorch"]:  # NaN fails too
            raise Failed(
                f"gate: {kind}: the gradient of {name} is {apart['ours']:.2g} from that of float64, plain PyTorch's "
                f"{apart['pytorch']:.2g}"
            )
        furthest = {key: max(furthest[key], apart[key]) for key in furthest}
    _agree(f"{kind}, own kernels", loss, "plain PyTorch in float64", exact_loss, allowed)
    return {"loss": loss, **{f"gradients, {key}": float(f"{value:.2g}") for key, value in furthest.items()}}


def _gradients(
    kind: str, settings: Settings, backends: BackendConfig, dtype: torch.dtype | None = None
) -> tuple[float, dict[str, Tensor]]:
    one = Contestant(kind, settings)
    one.model.to(dtype)
    torch.manual_seed(1)  # dropout's seed is drawn from it
    with ops.backends(backends):
        loss = one.forward()
        loss.backward()
    return loss.item(), {name: p.grad for name, p in one.model.named_parameters() if p.grad is not None}


def _hugging_face(kind: str, settings: Settings) -> dict[str, float]:
    config = settings.model_config(kind)
    torch.manual_seed(0)
    ours, theirs = MaeLm(config), hugging_face_roberta(config, ATTENTION[kind])
    copy_weights(ours, theirs)
    batch = settings.packed(config.vocab_size, encoder_sees_mask=True)
    inputs = {name: x.to(settings.device) for name, x in hugging_face_inputs(batch.to("cpu")).items()}
    theirs, ours = theirs.to(settings.device), ours.to(settings.device)
    values = _losses(kind, settings, lambda: theirs(**inputs).loss, ours, batch)
    if settings.precision == "bf16":
        with torch.autocast(settings.device, torch.bfloat16):
            losses = theirs(**inputs).loss, ours(batch)[0] / batch.counts.masked
        norms = [_gradient_norm(loss, model) for loss, model in zip(losses, (theirs, ours), strict=True)]
        _agree(f"{kind}'s gradient norm in bf16", norms[0], "ours", norms[1], NORM_TOLERANCE)
        values = {f"{name}, bf16": value for name, value in values.items()} | {f"{kind}, gradient norm, bf16": norms[0]}
    return values


def _gradient_norm(loss: Tensor, model: nn.Module) -> float:
    loss.backward()  # RoBERTa's one token type, which every token has, is no parameter of ours
    found = [p.grad for name, p in model.named_parameters() if p.grad is not None and "token_type" not in name]
    return float(nn.utils.get_total_norm(found).item())


def _padded(settings: Settings) -> dict[str, float]:
    torch.manual_seed(0)
    ours = MaeLm(settings.model_config("padded"))
    theirs = PaddedMaeLm(ours)
    batch = settings.packed(ours.config.vocab_size, encoder_sees_mask=False)
    inputs = padded_inputs(batch.to("cpu")).to(settings.device)
    return _losses("padded", settings, lambda: theirs.to(settings.device)(inputs), ours, batch)


def _losses(kind: str, settings: Settings, theirs: Any, ours: MaeLm, batch: Any) -> dict[str, float]:
    autocast = torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bf16")
    with torch.no_grad(), autocast:
        values = {
            f"{kind}, our weights": theirs().item(),
            f"ours, as {kind}": ours.to(settings.device)(batch)[0].item() / batch.counts.masked,
        }
    (one, loss), (other, expected) = values.items()
    _agree(one, loss, other, expected, TOLERANCE[settings.precision])
    return values


def _compiled(name: str, kind: str, settings: Settings) -> dict[str, float]:
    layers = min(settings.model_config(kind).num_layers, COMPILED_LAYERS)
    settings = replace(settings, changes={**settings.changes, "num_layers": layers})
    if kind == "hf_flash":
        settings = replace(settings, precision="bf16")
    # What is compiled for a step knows of the backward pass.
    values = {each: Contestant(each, settings).forward().item() for each in (kind, name)}
    _agree(name, values[name], kind, values[kind], TOLERANCE[settings.precision])
    return values


def _agree(one: str, loss: float, other: str, expected: float, tolerance: float) -> None:
    if not abs(loss / expected - 1) <= tolerance:  # no number fails too
        raise Failed(f"gate: {one} and {other} disagree: {loss:.7g} and {expected:.7g}")
