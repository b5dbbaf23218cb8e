"""`maelm-fast COMMAND ...`: finds the command, runs it, and turns UserError into one line and exit code 2.

A command is a module of this package with `main(argv) -> int`, imported only when asked for.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys

from maelm_fast import __version__
from maelm_fast.errors import UserError
from maelm_fast.stop import Stopped

COMMANDS = {
    "data": "prepare text for pretraining, or show a prepared store",
    "pretrain": "pretrain an encoder, or go on with a run",
    "finetune": "fine-tune an encoder on GLUE, SQuAD 2.0 or a task of your own, over seeds",
    "presets": "list the presets, or show one in full",
    "plot": "plot loss and accuracy of runs",
    "rank": "effective rank of representations, layer by layer: of runs and of Hugging Face encoders",
    "theory": "a run against the paper's theorem: residuals and bounds, [MASK]'s own subspace",
    "fill": "fill <mask> in a text",
    "sweep": "fine-tune a grid of hyperparameters with several seeds, and report each task's best cell",
    "prompt": "zero-shot and few-shot results through templates and label words",
    "export": "write a run's encoder for Hugging Face Transformers",
    "reproduce": "a figure or table of the paper: planned, run, reported",
    "demo": "all of it on text found on this machine, in a few minutes",
    "doctor": "what is installed and what can run here",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("maelm_fast").setLevel(logging.INFO)
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] == "--version":
        print(f"maelm-fast {__version__}")
        return 0
    try:
        if argv[0] not in COMMANDS:
            raise UserError(f"unknown command '{argv[0]}'; there are: {', '.join(COMMANDS)}")
        command = importlib.import_module(f"maelm_fast.cli.{argv[0]}")
        return int(command.main(argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt) as stop:  # the first has said so, and saved
        return 128 + (stop.received if isinstance(stop, Stopped) else signal.SIGINT)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0


def _usage() -> str:
    lines = [f"  {name:10}{text}" for name, text in COMMANDS.items()]
    return "usage: maelm-fast COMMAND ...\n\n" + "\n".join(lines) + "\n\n'maelm-fast COMMAND --help' says more."


if __name__ == "__main__":
    sys.exit(main())
