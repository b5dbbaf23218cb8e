"""One exception for everything a user can mend; the command line turns it into one line and exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Collection


class UserError(Exception):
    """Bad input. The message is a single line that says what is wrong and how to mend it."""


def unknown(kind: str, name: str, known: Collection[str]) -> UserError:
    """ "unknown preset 'tinny', did you mean 'tiny'? there are: ..."; the guess is left out where nothing is near."""
    return UserError(f"unknown {kind} '{name}'{did_you_mean(name, known) or ';'} there are: {', '.join(known)}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """ ", did you mean 'tiny'?", or nothing."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f", did you mean '{near[0]}'?" if near else ""
