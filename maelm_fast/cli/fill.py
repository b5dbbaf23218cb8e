"""maelm-fast fill: what a pretrained model puts in the place of every <mask>."""

from __future__ import annotations

from maelm_fast.analysis.fill import best_text, fill
from maelm_fast.cli.common import OneLineParser
from maelm_fast.training.rundir import load_run


def main(argv: list[str]) -> int:
    parser = OneLineParser(prog="maelm-fast fill", description="Fill every <mask> in a text.")
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("texts", metavar="TEXT", nargs="+", help='for example "the cat <mask> on the mat"')
    parser.add_argument("--top", type=int, default=5, help="candidates shown for each <mask> (default: 5)")
    parser.add_argument("--step", type=int, help="checkpoint to read (default: the newest)")
    options = parser.parse_args(argv)

    run = load_run(options.run, options.step)
    for text, masks in zip(options.texts, fill(run, options.texts, options.top), strict=True):
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
