"""One exception for everything a user can mend; the command line turns it into one line and exit code 2."""


class UserError(Exception):
    """Bad input. The message is a single line that says what is wrong and how to mend it."""
