"""Keys that are gone, each with what to do instead."""

from __future__ import annotations

GONE = {
    "at_grpo.poll_interval": "the trainer polls for finished episodes every .05 seconds; remove it",
    "at_grpo.softmax_temperature": "it went with selection: softmax; use selection: greedy, first or random",
}


def refusal(key: str) -> str | None:
    """Returns what a job that sets this key is told, in one line; None unless the key is gone."""
    return f"{key} is gone: {GONE[key]}" if key in GONE else None
