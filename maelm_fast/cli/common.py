"""What the commands share: an argument parser whose errors are one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from maelm_fast.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see '{self.prog} --help')")
