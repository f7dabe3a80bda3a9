"""What workflows of different kinds share: prompts and their style, programs that run once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from verl_atgrpo import Message

Result = TypeVar("Result")

Style = Literal["full", "compact"]
"""Style of prompts: `full` ones explain the task, `compact` ones are for tiny models trained on them."""


def chat(question: str, system: str | None = None) -> list[Message]:
    """Returns the prompt with this question, after the system message if there is one."""
    before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": question}]


def once(run: Callable[[str], Coroutine[Any, Any, Result]]) -> Callable[[str], asyncio.Task[Result]]:
    """Returns `run` cached by its argument: the program that was scored is not run again when it is committed.

    What failed is run again: in evaluation scores make no decisions, and `run` may.
    """
    runs: dict[str, asyncio.Task[Result]] = {}

    def started(text: str) -> asyncio.Task[Result]:
        before = runs.get(text)
        if before is None or (before.done() and (before.cancelled() or before.exception() is not None)):
            runs[text] = asyncio.create_task(run(text))
        return runs[text]

    return started
