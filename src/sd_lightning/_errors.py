"""The one exception type for mistakes made by the user."""

from __future__ import annotations


class UsageError(ValueError):
    """Something the user gave cannot work; the message says what, and how to put it right.

    The command line prints the message as one ``error: …`` line with exit code 2 and no
    stack trace. Programming errors of the library are never raised as this type.

    The message is one line and names who complains, what was given, what is expected, and
    the remedy. Line breaks in it are joined, so that quoted foreign messages stay one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))
