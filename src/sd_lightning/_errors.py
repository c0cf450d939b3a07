"""The one exception type for mistakes made by the user."""

from __future__ import annotations


class UsageError(ValueError):
    """An invalid input from the user, with a message that says what is wrong and how to fix it.

    The command line prints the message as one ``error: …`` line, exits with code 2 and shows no stack trace. Bugs of
    the library are never raised as this type.

    The message is one line and names the component that raises, what was given, what is expected, and the remedy. Line
    breaks in messages quoted from other libraries become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


def check_at_least(who: str, least: int, **values: float) -> None:
    """Raise a :class:`UsageError` for the first of some settings that is below ``least``."""
    for name, value in values.items():
        if value < least:
            raise UsageError(f"{who} got {name}={value}; expected at least {least}, e.g. {name}={least}")
