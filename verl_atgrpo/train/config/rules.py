"""What rules have in common: each yields the messages of what it refuses, and the first of all ends the command.

A message is one line: the key, its value, why it is refused and what to set instead.
"""

from __future__ import annotations

from collections.abc import Iterator

SECTION = "at_grpo"


class ConfigError(ValueError):
    """A configuration that cannot work. The message is one line with the key, the value and the remedy."""


def check(messages: Iterator[str], prefix: str = "") -> None:
    """Raises ConfigError with the first message, if there is one; what comes after it is not evaluated."""
    if (message := next(messages, None)) is not None:
        raise ConfigError(f"{prefix}{message}")
