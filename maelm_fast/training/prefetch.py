"""Updates on the device before they are needed.

An update's tensors are one pinned row, sent in one copy on a stream of its own while the update before it is computed;
masks that are drawn on the device are drawn there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from maelm_fast.batch import PackedBatch
from maelm_fast.data.update import Update

Mask = Callable[[Update], list[PackedBatch]]


def on_device(updates: Iterable[Update], mask: Mask, device: torch.device) -> Iterator[list[PackedBatch]]:
    """The micro-batches of each update, on `device`. mask: an update's micro-batches, whose masks it draws if they are
    not drawn yet.

    The caller asks for the next update when it has queued the work of the one before, and that is when it is sent."""
    if device.type != "cuda":
        for update in updates:
            yield mask(update)
        return
    sending, computing = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    for update in updates:
        with torch.cuda.stream(sending):
            batches = mask(update.to(device))
        computing.wait_stream(sending)
        for batch in batches:
            for tensor in batch.tensors:
                tensor.record_stream(computing)  # its memory is the sending stream's to give away
        yield batches
