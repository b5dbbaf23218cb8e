"""The tracks of the speedrun: data, a model's size, a target, and the recipes that compete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from maelm_fast import presets
from maelm_fast.config import RunConfig
from maelm_fast.paper import scales


class Entry(NamedTuple):
    about: str
    config: RunConfig


@dataclass(frozen=True)
class Track:
    about: str
    target: float
    """Nats."""
    seq_len: int
    vocab_size: int
    entries: dict[str, Entry]


def _tracks() -> dict[str, Track]:
    falling, muon = {"rate": 0.4, "rate_end": 0.15}, {"name": "muon", "muon_lr": 2e-3}
    tiny = presets.get("tiny")

    def fast(preset: str, updates: int) -> RunConfig:
        return presets.change(presets.get(preset), optim={"max_steps": updates, "warmup_steps": updates // 10})

    cpu = scales.get("cpu").settings["base"].config
    cpu_fast = presets.as_fast(presets.change(cpu, optim={"max_steps": 4_000, "warmup_steps": 400}), 6e-3, 5e-3)
    return {
        "tiny": Track(
            "the embedded corpus, 3 layers of 128, updates of 32 x 64 tokens",
            target=3.80,
            seq_len=64,
            vocab_size=1024,
            entries={
                "paper": Entry("AdamW, 15% masked: tiny", tiny),
                "masks": Entry("AdamW, 40% to 15% masked", presets.change(tiny, masking=falling)),
                "muon": Entry("Muon, 15% masked", presets.change(tiny, optim=muon)),
                "both": Entry("Muon, 40% to 15% masked", presets.change(tiny, masking=falling, optim=muon)),
                "fast": Entry("Muon, 50% to 15% masked, higher rates, average: tiny_fast", fast("tiny_fast", 1_600)),
                "mlm_paper": Entry("AdamW, 15% masked: roberta_tiny", presets.get("roberta_tiny")),
                "mlm_fast": Entry(
                    "Muon, 50% to 15% masked, higher rates, average: roberta_tiny_fast",
                    fast("roberta_tiny_fast", 1_600),
                ),
            },
        ),
        "cpu": Track(
            "Wikipedia and novels, 4 layers of 128, updates of 64 x 128 tokens",
            target=3.20,
            seq_len=128,
            vocab_size=4096,
            entries={
                "paper": Entry("AdamW, 15% masked", cpu),
                "fast": Entry("Muon, 40% to 15% masked", cpu_fast),
                "mlm_paper": Entry("AdamW, 15% masked", presets.as_roberta(cpu)),
                "mlm_fast": Entry("Muon, 40% to 15% masked", presets.as_roberta(cpu_fast)),
            },
        ),
    }


TRACKS = _tracks()
