"""What the result files say: the newest rows of every setting, beside the goals set for them.

    python -m benchmarks.report                                # tables
    python -m benchmarks.report --write                        # the tables in the READMEs
    python -m benchmarks.report --check                        # exit code 1 if --write would change them
    python -m benchmarks.report --plot speedrun docs/speedrun.png

In the READMEs only what stands between the lines
`<!-- results:NAME -->` and `<!-- /results -->` is replaced, and left alone as long as there is no row for it: every
number that is written there comes from a row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import report_ops
from benchmarks.program import Parser, start
from benchmarks.report_plot import PLOTS, plot
from benchmarks.report_step import NO_GPU, case_tables, headline_tables
from benchmarks.rows import Results, read
from benchmarks.tables import Table
from maelm_fast.config import require
from maelm_fast.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
REGIONS = {
    "README.md": ("headline",),
    "benchmarks/README.md": (
        *("train_step", "pretraining", "patch", "finetune"),
        *("ops", "attention", "loader", "projection", "speedrun"),
    ),
    "kernels/README.md": ("executed",),
}


def tables(results: Results, region: str) -> list[Table]:
    """What belongs into a region; none if there is no row for it."""
    try:
        if region == "headline":
            return list(headline_tables(results.cases))
        if region == "train_step":
            return [table for case in results.cases for table in case_tables(case)]
        return list(report_ops.tables(region, results.rows.get(region, [])))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{region}: a row lacks something, or has it in another form: {error!r}") from error


def region_text(results: Results, region: str) -> str | None:
    """Markdown, None if there is no row for it."""
    blocks = [table.markdown() for table in tables(results, region)]
    if blocks and region in ("headline", "train_step") and not any(case.on_gpu for case in results.cases):
        blocks.append(f"<sub>{NO_GPU}</sub>")
    return "\n\n".join(blocks) or None


def rewritten(text: str, name: str, regions: Iterable[str], results: Results) -> str:
    """The file called `name`, with its regions made new."""
    for region in regions:
        opening, closing = f"<!-- results:{region} -->\n", "<!-- /results -->"
        before, found, rest = text.partition(opening)
        old, closed, after = rest.partition(closing)
        if not (found and closed) or "<!-- results:" in old:
            raise UserError(f"{name}: no lines {opening.strip()} and {closing} with the table between them")
        new = region_text(results, region)
        if new is not None:
            text = f"{before}{opening}\n{new}\n\n{closing}{after}"
    return text


def stale_readmes(root: Path, results: Results) -> dict[str, str]:
    """By name, what each README should be that is something else."""
    found = {}
    for name, regions in REGIONS.items():
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name}: cannot be read: {error}") from None
        new = rewritten(text, name, regions, results)
        if new != text:
            found[name] = new
    return found


def report(options: argparse.Namespace) -> int:
    results = read(options.root)
    if options.plot:
        name, out = options.plot
        require(name in PLOTS, f"--plot: there are pictures of {', '.join(PLOTS)}, not {name}")
        plot(results, name, Path(out))
    elif options.check:
        if stale := stale_readmes(options.root, results):
            print(f"{' and '.join(stale)}: not the tables of the rows; run python -m benchmarks.report --write")
            return 1
    elif options.write:
        for name, text in stale_readmes(options.root, results).items():
            (options.root / name).write_text(text, encoding="utf-8")
            print(f"{name}: written")
    else:
        regions = [region for name in REGIONS if name != "README.md" for region in REGIONS[name]]
        blocks = [table.text() for region in regions for table in tables(results, region)]
        blocks += [] if any(case.on_gpu for case in results.cases) else [NO_GPU]
        print("\n\n".join(blocks))
    print("\n".join(results.unused), end="\n" if results.unused else "", file=sys.stderr)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("report", __doc__, out=False)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="make the READMEs' tables new")
    action.add_argument("--check", action="store_true", help="exit code 1 if --write would change a README")
    action.add_argument("--plot", nargs=2, metavar=("NAME", "FILE"), help=f"picture to draw: {', '.join(PLOTS)}")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository; default: this one")
    return start(parser, report, arguments)


if __name__ == "__main__":
    sys.exit(main())
