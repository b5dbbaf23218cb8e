"""`maelm-fast COMMAND ...`: finds the command, runs it, and turns UserError into one line and exit code 2.

A command is a module of this package with `main(argv) -> int`, imported only when asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys

from maelm_fast import __version__
from maelm_fast.cli.common import Main, run_command
from maelm_fast.errors import UserError
from maelm_fast.stop import Stopped

COMMANDS = {
    "data": "prepare text for pretraining, or show a prepared store",
    "pretrain": "pretrain an encoder, or resume a run",
    "finetune": "fine-tune an encoder on GLUE, SQuAD 2.0 or a task of your own, over seeds",
    "checkpoint": "list, verify, consolidate or prune a run's checkpoints",
    "export": "write a run's encoder for Hugging Face Transformers",
    "fill": "fill <mask> in a text",
    "plot": "plot loss and accuracy of runs",
    "rank": "effective rank of representations, layer by layer: of runs and of Hugging Face encoders",
    "presets": "list the presets, or show one in full",
    "paper": "the paper's figures and tables, its sweeps, prompting and theory",
    "demo": "all of it on text found on this machine, in a few minutes",
    "doctor": "what is installed and what can run here",
}
MOVED = {"reproduce": "paper EXPERIMENT", **{name: f"paper {name}" for name in ("sweep", "prompt", "theory")}}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[Stderr()])
    logging.getLogger("maelm_fast").setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else it reports each of ten tries without a network
    if argv and argv[0] == "--version":
        print(f"maelm-fast {__version__}")
        return 0
    try:
        if argv and argv[0] in MOVED:
            raise UserError(f"'maelm-fast {argv[0]}' is now 'maelm-fast {MOVED[argv[0]]}'")
        return run_command("maelm-fast", COMMANDS, _find, argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt) as stop:  # the first has said so, and saved
        return 128 + (stop.received if isinstance(stop, Stopped) else signal.SIGINT)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0


def _find(name: str) -> Main:
    main: Main = importlib.import_module(f"maelm_fast.cli.{name}").main
    return main


class Stderr(logging.Handler):
    """Writes to what sys.stderr is now: while a progress line is shown, rich puts there what prints above the line."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
