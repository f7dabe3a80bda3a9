"""What workflows of different kinds share: prompts and their style, programs that run once, single-agent forms."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from verl_atgrpo import Environment, Message

Result = TypeVar("Result")
Form = TypeVar("Form", bound=type[Environment])

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


def fixed_options(**fixed: object) -> Callable[[Form], Form]:
    """Returns a class decorator that removes options from the constructor and passes these values for them.

    A single agent takes its team's options except those of agents that it has not; `make` refuses these by name.
    """

    def decorate(cls: Form) -> Form:
        init: Callable[..., None] = cls.__init__
        signature = inspect.signature(init)
        kept = [option for name, option in signature.parameters.items() if name not in fixed]
        signature = signature.replace(parameters=kept)

        def __init__(*args: object, **options: object) -> None:
            init(**signature.bind(*args, **options).arguments, **fixed)

        __init__.__qualname__ = f"{cls.__qualname__}.__init__"
        __init__.__signature__ = signature  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[method-assign]
        return cls

    return decorate
