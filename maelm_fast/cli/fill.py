"""maelm-fast fill: what a pretrained model puts in the place of every <mask>."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from maelm_fast.cli.common import option, parse

EXAMPLES = """
    maelm-fast fill runs/base "the cat <mask> on the mat"
    maelm-fast fill runs/base "the [MASK] of the file" --top 10
    maelm-fast fill runs/base --step 20000 "a list <mask> strings" "without warranty of any <mask>"
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fill every <mask> in a text with what a run's model finds likeliest."""

    run: Path = option(positional=True, metavar="RUN")
    """Run directory."""
    texts: tuple[str, ...] = option(positional=True, literal=True, metavar="TEXT")
    """With <mask>, or [MASK], where a token is to be found."""
    top: int = 5
    """Candidates shown for each <mask>."""
    step: int | None = None
    """Checkpoint to read (default: the newest)."""


def main(argv: list[str]) -> int:
    options: Options = parse("fill", argv, Options, examples=EXAMPLES)
    from maelm_fast.analysis.fill import best_text, fill
    from maelm_fast.training.rundir import load_run

    run, texts = load_run(options.run, options.step), list(options.texts)
    for text, masks in zip(texts, fill(run, texts, options.top), strict=True):
        print(text)
        for number, candidates in enumerate(masks, 1):
            for place, candidate in enumerate(candidates):
                head = f"mask {number}" if place == 0 else ""
                print(f"  {head:<9}{candidate.probability:7.2%}  {_quoted(candidate.token)}")
        print(f"  best     {best_text(run, text, masks)}")
    return 0


def _quoted(token: str) -> str:
    """Quoted, so that a leading space (the token starts a word) can be seen; control characters are escaped."""
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token) + '"'
