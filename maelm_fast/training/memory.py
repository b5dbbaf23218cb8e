"""The micro-batch that fits a GPU, and whether GELU's output fits beside it, by an estimate of what a step needs of its
memory.

Counted is what the path of our kernels keeps from the forward pass for the backward pass, and the most that the
backward pass of one block needs beside it; tests/training/test_memory.py holds both to what PyTorch's allocator gives
out. Without our attention, in fp32 for one, more is kept, and nothing is estimated.
"""

from __future__ import annotations

from functools import partial

import torch

from maelm_fast.config import MaskingConfig, ModelConfig, RunConfig
from maelm_fast.ops import dispatch
from maelm_fast.ops.masked_cross_entropy import LOGITS_BYTES

SHARE = 0.8
"""Of the free memory (ours): fragments, workspaces of libraries and what processes send each other have the rest."""
ENOUGH_TOKENS = 256 * 512
"""In a micro-batch (ours): what larger ones would still save is the fixed work of each, which is then small."""
NARROW, WIDE = 2, 4  # bytes of an activation in bf16 autocast; of a parameter, a gradient, a row's statistic


def estimated(config: RunConfig, parameters: int, length: int, keep_gelu: bool = False) -> tuple[int, int]:
    """Bytes of a step: what it needs whatever its micro-batches are, and for each full sequence of these.

    parameters: how many the model has. length: tokens of a full sequence. keep_gelu: as model/block.py's."""
    model = config.model
    table = model.table_size * model.hidden_size
    # parameter, gradient, AdamW's two averages, the weights', the cast to bf16; the table's gradients to be added up
    fixed = (
        parameters * ((4 + bool(config.optim.average)) * WIDE + NARROW) + 3 * table * WIDE + 2 * LOGITS_BYTES["cuda"]
    )
    rates = {config.masking.rate, config.masking.final.rate}
    masked = (round(rate * length) for rate in rates)
    return fixed, max(sequence_bytes(model, config.masking, length, count, keep_gelu) for count in masked)


def sequence_bytes(
    model: ModelConfig, masking: MaskingConfig, original: int, masked: int, keep_gelu: bool = False
) -> int:
    """Of one sequence of so many tokens."""
    block_bytes = partial(_block_bytes, 1 + keep_gelu)
    d, w, decoder = model.hidden_size, model.decoder_config.hidden_size, model.decoder
    removed = masked * (1.0 - masking.shown) if decoder != "none" and masking.policy == "mask" else 0.0
    visible = original - int(removed)
    kept = visible * d * NARROW + (model.num_layers - 1) * block_bytes(model, visible, visible)
    kept += block_bytes(model, masked if decoder == "none" else visible, visible)
    predicted, crosses = masked, decoder in ("self_cross", "causal_cross")
    if decoder != "none":
        own, slots, memory = model.decoder_config, original, original
        if decoder == "cross":
            slots, memory = masked, visible
        if decoder == "causal_cross":
            predicted = original
        kept += (slots + (visible if w != d else 0)) * w * NARROW
        for last in [False] * (model.decoder_layers - 1) + [True]:
            queries = predicted if last else slots
            kept += block_bytes(own, queries, memory)
            if crosses:
                kept += (4 * queries + 2 * visible) * w * NARROW
    kept += predicted * w * (3 * NARROW + 2 * WIDE)  # the head, and the gradient that its loss has made
    longest = max(visible, original if decoder not in ("none", "cross") else 0)
    made = 1 if keep_gelu else 2  # GELU's gradient, and its output if that is made again; and gradients of rows
    return kept + longest * (made * model.ffn_size + 4 * d) * NARROW


def _block_bytes(wide: int, model: ModelConfig, queries: int, keys: int) -> int:
    """What a block keeps: q, k, v, the attention's result, both products' results, both norms'; before the GELU, and if
    `wide` is 2 also after it. Where some rows are queries, also these rows."""
    rows = (6 * queries + 2 * keys + (queries if queries < keys else 0)) * model.hidden_size
    return (rows + wide * queries * model.ffn_size) * NARROW + queries * (model.num_heads + 4) * WIDE


def fitting(config: RunConfig, parameters: int, length: int, free: int) -> int:
    """The largest micro_batch_size whose estimate is at most SHARE of the free bytes, 1 if none is; made smaller as far
    as an update's micro-batches then are equally large and no more.

    length: tokens of a full sequence."""
    fixed, each = estimated(config, parameters, length)
    batch = config.optim.batch_size
    most = max(1, min(int(SHARE * free - fixed) // each, ENOUGH_TOKENS // length, batch))
    return -(-batch // -(-batch // most))


def keeps_gelu(config: RunConfig, parameters: int, length: int, free: int) -> bool:
    """Whether GELU's output is kept for the backward pass: where micro-batches of the configuration's size, with it,
    need at most SHARE of the free bytes (ours). That it saves time is a projection; results are the same either way.

    length: tokens of a full sequence."""
    fixed, each = estimated(config, parameters, length, keep_gelu=True)
    return fixed + config.runtime.sequences_at_once * each <= SHARE * free


def can_estimate(config: RunConfig, device: torch.device, precision: str) -> bool:
    """Whether a step goes the way that is counted."""
    ours = dispatch.triton_installed() and not {"reference", "grouped"} & {*vars(config.runtime.backend).values()}
    heads = max(config.model.head_dim, config.model.decoder_config.head_dim)
    return device.type == "cuda" and precision == "bf16" and ours and heads <= 128
