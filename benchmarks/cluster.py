"""Hours and dollars of the paper's runs on many GPUs: a projection, never a measurement.

    python -m benchmarks.cluster

A GPU's rate is that of benchmarks/projection.py, a range itself, with the paper's dropout and relative bias. To it
comes what DDP sends: every update, all gradients in fp32, around a ring of N processes, 2 (N - 1) / N times their bytes
through the slowest link. The optimistic end hides it behind the last micro-batch's backward pass, the pessimistic one
not at all. Left out: evaluation, saving, waiting for the slowest process, failures.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.cost import DOLLARS_PER_HOUR, dollars, most_kilowatt_hours
from benchmarks.projection import CARDS, projected
from benchmarks.tables import span
from maelm_fast import presets
from maelm_fast.model.maelm import MaeLm
from maelm_fast.reporting import table

MODELS, GPUS = ("base", "base++", "large++"), (8, 64)
NODE = 8  # GPUs that NVLink connects
MICRO_BATCH = 64  # sequences at most
BACKWARD = 2 / 3  # of a micro-batch's time


@dataclass(frozen=True)
class Links:
    """Bytes a second and direction of a GPU, in a node and between nodes: data sheets times `share`, an assumption."""

    nvlink: float
    network: float
    share: float = 0.7


LINKS = {"a100": Links(300e9, 25e9), "h200": Links(450e9, 50e9)}  # 200 and 400 Gb/s of network for each GPU


@dataclass(frozen=True)
class Update:
    """Seconds of one update; a range is (least, most)."""

    compute: tuple[float, float]
    sending: float
    hidden: float
    """What of `sending` the optimistic end does not count."""

    @property
    def taken(self) -> tuple[float, float]:
        return self.compute[0] + self.sending - self.hidden, self.compute[1] + self.sending


def update(model: str, card: str, gpus: int, sequences: int) -> Update:
    """One of `sequences` sequences of 512 on all GPUs together."""
    here = sequences // gpus
    micro = min(here, MICRO_BATCH)
    options = argparse.Namespace(batch=micro, seq=512, rate=0.15, dropout=0.1, bias=True)
    slow, fast = projected(model, options, CARDS[card])["tokens_per_s"]
    compute = here * 512 / fast, here * 512 / slow
    links = LINKS[card]
    link = (links.nvlink if gpus <= NODE else links.network) * links.share
    sending = 2 * (gpus - 1) / gpus * 4 * parameters(model) / link
    return Update(compute, sending, min(sending, BACKWARD * micro * 512 / fast))


@cache
def parameters(model: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in MaeLm(presets.get(model).model).parameters())


def training() -> list[list[str]]:
    """The paper's runs, whole."""
    rows = []
    for model in MODELS:
        optim = presets.get(model).optim
        for card in LINKS:
            for gpus in GPUS:
                taken = update(model, card, gpus, optim.batch_size).taken
                hours = [seconds * optim.max_steps / 3600 for seconds in taken]
                price = next(price for gpu, price in DOLLARS_PER_HOUR.items() if CARDS[card].name.startswith(gpu))
                rows.append(
                    [
                        model,
                        CARDS[card].name,
                        str(gpus),
                        span(hours, ".3g"),
                        span([h * gpus for h in hours], ",.0f"),
                        span([h * gpus * price for h in hours], ",.0f"),
                    ]
                )
    return rows


def weak_scaling() -> list[list[str]]:
    """`base`, with 256 sequences an update on each GPU."""
    rows = []
    for card in LINKS:
        alone = update("base", card, 1, 256).taken
        for gpus in (8, 16, 64, 256):
            whole = update("base", card, gpus, 256 * gpus)
            shares = sorted(a / b for a, b in zip(alone, whole.taken, strict=True))
            rows.append([CARDS[card].name, str(gpus), f"{1000 * whole.sending:.0f}", span(shares, ".1%")])
    return rows


def tokens() -> list[list[str]]:
    """What 1B tokens cost on one GPU."""
    rows = []
    for model, card in itertools.product(MODELS, LINKS):
        name = CARDS[card].name
        rates = [MICRO_BATCH * 512 / seconds for seconds in update(model, card, 1, MICRO_BATCH).taken]
        price = [cost for rate in rates if (cost := dollars(name, rate)) is not None]
        power = [most_kilowatt_hours(name, rate) for rate in rates]
        rows.append([model, name, span(price, ".2f"), span(power, ".1f")])
    return rows


def report() -> str:
    whole = table(("model", "GPU", "GPUs", "hours", "GPU-hours", "dollars"), training())
    weak = table(("GPU", "GPUs", "ms to send the gradients", "of N times one GPU's rate"), weak_scaling())
    each = table(("model", "GPU", "dollars per 1B tokens", "kWh per 1B tokens, at most"), tokens())
    return "\n".join([*whole, *weak, *each]).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.splitlines()[0]).parse_args(
        arguments
    )
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
