"""Hours and dollars of the paper's runs on many GPUs: a projection, never a measurement.

    python -m benchmarks.cluster

A GPU's rate is that of benchmarks/projection.py, a range itself, with the paper's dropout and relative bias. To it
comes what DDP sends: every update, all gradients in fp32, around a ring of N processes, 2 (N - 1) / N times their bytes
through the slowest link. The optimistic end hides it behind the last micro-batch's backward pass, the pessimistic one
not at all. Left out: evaluation, saving, waiting for the slowest process, failures.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from benchmarks.cost import dollars, dollars_an_hour, most_kilowatt_hours
from benchmarks.projection import CARDS, SINGLE, parameters, projected
from benchmarks.tables import span
from maelm_fast import presets
from maelm_fast.reporting import table

MODELS, GPUS = ("base", "base++", "large++"), (8, 64)
SPEEDRUN = ("base", "base_cross", "roberta_base")
NODE = 8  # GPUs that NVLink connects
MICRO_BATCH = 64  # sequences at most
BILLIONS, HOURS = 5, 1.5  # tokens, and hours of one H200, that the speedrun on a GPU is planned with
BACKWARD = 2 / 3  # of a micro-batch's time
SHARE = 0.7  # of a link's data sheet: an assumption
NVLINK = {"a100": 300e9, "h200": 450e9}  # bytes a second and direction of a GPU in a node
NETWORK = {"a100": 25e9, "h200": 50e9}  # and between nodes: 200 and 400 Gb/s for each GPU


@dataclass(frozen=True)
class Update:
    """Seconds of one update; a range is (least, most). hidden: what of `sending` the optimistic end does not count."""

    compute: tuple[float, float]
    sending: float
    hidden: float

    @property
    def taken(self) -> tuple[float, float]:
        return self.compute[0] + self.sending - self.hidden, self.compute[1] + self.sending


def update(model: str, card: str, gpus: int, sequences: int) -> Update:
    """One of `sequences` sequences of 512 on all GPUs together."""
    here = sequences // gpus
    micro = min(here, MICRO_BATCH)
    slow, fast = projected(model, CARDS[card], micro)["tokens_per_s"]
    link = SHARE * (NVLINK if gpus <= NODE else NETWORK)[card]
    sending = 2 * (gpus - 1) / gpus * SINGLE * parameters(presets.get(model).model) / link
    return Update((here * 512 / fast, here * 512 / slow), sending, min(sending, BACKWARD * micro * 512 / fast))


def training(model: str, card: str, gpus: int) -> list[str]:
    """One of the paper's runs, whole."""
    optim, name = presets.get(model).optim, CARDS[card].name
    hours = [seconds * optim.max_steps / 3600 for seconds in update(model, card, gpus, optim.batch_size).taken]
    together = [h * gpus for h in hours]
    price = [h * dollars_an_hour(name) for h in together]
    return [model, name, str(gpus), span(hours, ".3g"), span(together, ",.0f"), span(price, ",.0f")]


def weak_scaling(card: str, gpus: int) -> list[str]:
    """`base`, with 256 sequences an update on each GPU."""
    alone, whole = (update("base", card, n, 256 * n) for n in (1, gpus))
    shares = sorted(a / b for a, b in zip(alone.taken, whole.taken, strict=True))
    return [CARDS[card].name, str(gpus), f"{1000 * whole.sending:.0f}", span(shares, ".1%")]


def rates_alone(model: str, card: str) -> list[float]:
    """Tokens/s of one GPU, most and least."""
    return [MICRO_BATCH * 512 / seconds for seconds in update(model, card, 1, MICRO_BATCH).taken]


def speedrun(model: str, card: str) -> list[str]:
    """What the tokens of the speedrun's first target take on one GPU, and how many there are in the second's hours."""
    rates, name = rates_alone(model, card), CARDS[card].name
    price = [BILLIONS * (dollars(name, rate) or 0.0) for rate in rates]
    minutes = [BILLIONS * 1e9 / rate / 60 for rate in rates]
    billions = sorted(HOURS * 3600 * rate / 1e9 for rate in rates)
    return [model, name, span(minutes, ".0f"), span(price, ".2f"), span(billions, ".2f")]


def tokens(model: str, card: str) -> list[str]:
    """What 1B tokens cost on one GPU."""
    rates, name = rates_alone(model, card), CARDS[card].name
    price = [dollars(name, rate) or 0.0 for rate in rates]
    return [model, name, span(price, ".2f"), span([most_kilowatt_hours(name, rate) for rate in rates], ".1f")]


def report() -> str:
    runs = itertools.product(MODELS, CARDS, GPUS)
    whole = table(("model", "GPU", "GPUs", "hours", "GPU-hours", "dollars"), [training(*run) for run in runs])
    more = [weak_scaling(*run) for run in itertools.product(CARDS, (8, 16, 64, 256))]
    weak = table(("GPU", "GPUs", "ms to send the gradients", "of N times one GPU's rate"), more)
    prices = [tokens(*run) for run in itertools.product(MODELS, CARDS)]
    each = table(("model", "GPU", "dollars per 1B tokens", "kWh per 1B tokens, at most"), prices)
    runs_alone = [speedrun(model, "h200") for model in SPEEDRUN]
    header = ("model", "GPU", f"minutes of {BILLIONS}B tokens", "dollars", f"billion tokens in {HOURS} hours")
    return "\n".join([*whole, *weak, *each, *table(header, runs_alone)]).rstrip()


if __name__ == "__main__":
    print(report())
