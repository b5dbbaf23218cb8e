"""What the commands share: error messages of one line, from argparse and from jsonargparse."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

from maelm_fast.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see '{self.prog} --help')")


def one_line(message: str, parser: argparse.ArgumentParser) -> str:
    """jsonargparse's message on one line, without class names, and with the nearest option for an unknown one."""
    text = " ".join(message.split())
    text = re.sub(r"<class '([^']+)'>", r"\1", text).replace("typing.", "")
    unknown = re.search(r"unrecognized arguments: --([\w.-]+)", text) or re.search(
        r"[Kk]ey '([\w.]+)' is not expected", text
    )
    name = unknown[1] if unknown else None
    if group := re.search(r"Group '(\w+)' does not accept option '(\w+)'", text):
        name = f"{group[1]}.{group[2]}"
    if name:
        options = [o.lstrip("-") for action in parser._actions for o in action.option_strings if o.startswith("--")]
        near = difflib.get_close_matches(name.replace("-", "_"), options, n=1, cutoff=0.6)
        text = f"unknown option '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")
    return text if "--help" in text else f"{text} (see '{parser.prog} --help')"
