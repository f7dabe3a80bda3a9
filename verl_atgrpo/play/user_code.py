"""How code of an environment is called: what may come out of it, and many calls at once."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from verl_atgrpo.play.types import EnvironmentConfigError

T = TypeVar("T")
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
_HERE = str(Path(__file__).parent)


class Ended(RuntimeError):
    """User's code raised what would end the process or the task that runs it, such as `SystemExit`."""


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Lets nothing but exceptions out of user's code: asyncio's loop, and with it a worker, ends at a `SystemExit`.

    Raises Ended, which says `what` code it was, for a `SystemExit` (of argparse, say), a `KeyboardInterrupt` outside
    the main thread, a `CancelledError` though nobody cancels the running task, and further kinds that are no
    `Exception`.
    """
    task = _running()
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if _is_for_us(error, task):
            raise
        raise Ended(f"{what} raised {type(error).__name__}: {error}") from error


def _running() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


def _is_for_us(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Returns whether user's code only passes an error on, as somebody cancels or closes its task, or interrupts."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if isinstance(error, asyncio.CancelledError):  # Python 3.10 cannot tell
        return task is not None and (sys.version_info < (3, 11) or task.cancelling() > 0)
    # A coroutine is closed by others than its own task.
    return isinstance(error, GeneratorExit) and _running() is not task


@contextmanager
def asking(name: object, doing: str) -> Iterator[None]:
    """Raises what an environment's code raises at a check as an EnvironmentConfigError of one line.

    It has the environment's name as in a recipe, what was asked of it, such as "task('train', 0)", and the place.
    """
    try:
        with contained(doing):
            yield
    except EnvironmentConfigError:
        raise
    except Exception as error:
        raised = error.__cause__ if isinstance(error, Ended) and error.__cause__ is not None else error
        frames = traceback.extract_tb(raised.__traceback__)
        # Not where a library that it calls raises, if that can be told.
        own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<", _HERE))]
        at = (own or frames)[-1]
        raise EnvironmentConfigError(
            f"at_grpo.environment.name={name!r}: {doing} raised {type(raised).__name__}: {str(raised)[:300]} "
            f"({at.filename}:{at.lineno})"
        ) from error


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Like asyncio.gather, but the first error cancels the other awaitables and waits for them.

    Otherwise a failed episode would continue to use the engine.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel(tasks)
        raise


async def cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancels tasks, and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
