"""What Ray reports of processes that failed, in one line."""

from __future__ import annotations


class RolloutFailed(RuntimeError):
    """A rollout worker died or raised."""


def last_line(error: BaseException) -> str:
    """Returns the error itself; Ray's text begins with the remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
