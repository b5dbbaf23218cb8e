"""What the commands share: error messages of one line, from argparse and from jsonargparse."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
from typing import NoReturn

from maelm_fast.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see '{self.prog} --help')")


def user_error(error: Exception, argv: list[str], parser: argparse.ArgumentParser) -> UserError:
    """jsonargparse's error on one line, without class names and with the nearest option for an unknown one. If it is
    about something that is not on the command line, the files of --config stand before it: jsonargparse names none."""
    text = " ".join(str(error).split())
    text = re.sub(r"<class '([^']+)'>", r"\1", text).replace("typing.", "")
    in_file = re.search("Problems parsing config|Unexpected config", text) is not None
    if found := _UNKNOWN.search(text):
        name = ".".join(part for part in found.groups() if part)
        options = [o.lstrip("-") for action in parser._actions for o in action.option_strings if o.startswith("--")]
        near = difflib.get_close_matches(name.replace("-", "_"), options, n=1, cutoff=0.6)
        text = f"unknown option '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")
    elif found := re.search(r'Parser key "([\w.]+)"', text):
        name = found[1]
    if found:
        given = {word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
        in_file = f"__{name}".replace("-", "_") not in given
    if in_file and (files := _config_files(argv)):
        text = f"{', '.join(files)}: {text}"
    return UserError(text if "--help" in text else f"{text} (see '{parser.prog} --help')")


_UNKNOWN = re.compile(
    r"unrecognized arguments: --([\w.-]+)|(?:[Kk]ey|Option) '([\w.]+)' is not (?:expected|accepted)|"
    r"Group '(\w+)' does not accept option '(\w+)'"
)


def _config_files(argv: list[str]) -> list[str]:
    named = [value for option, value in itertools.pairwise(argv) if option == "--config"]
    return named + [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
