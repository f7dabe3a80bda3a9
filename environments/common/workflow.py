"""Pieces that workflows of different kinds have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar, get_args

Result = TypeVar("Result")

Style = Literal["full", "compact"]
"""How prompts are put: `full` ones explain the task, `compact` ones are for tiny models trained on them."""
STYLES: tuple[str, ...] = get_args(Style)


def once(run: Callable[[str], Coroutine[Any, Any, Result]]) -> Callable[[str], asyncio.Task[Result]]:
    """Returns `run` so that equal texts run once: what is scored is then also what comes of it later."""
    runs: dict[str, asyncio.Task[Result]] = {}

    def started(text: str) -> asyncio.Task[Result]:
        if text not in runs:
            runs[text] = asyncio.create_task(run(text))
        return runs[text]

    return started
