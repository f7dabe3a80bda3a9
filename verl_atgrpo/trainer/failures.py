"""A worker or server that dies ends the run with its policy's name, and never with a silent wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import ray

logger = logging.getLogger(__name__)

_PING_TIMEOUT = 30.0
"""Seconds; a server that is merely busy answers later and is not dead."""


class PolicyFailed(RuntimeError):
    """A policy's worker or server died or raised; the message names the policy and what it was doing."""


@contextmanager
def naming(policy: str, doing: str) -> Iterator[None]:
    """Turns an error of a remote process into one that names the policy.

    Raises PolicyFailed for any error that Ray reports.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        raise PolicyFailed(f"policy {policy!r}: {doing} failed: {_last_line(error)}") from error


def _last_line(error: ray.exceptions.RayError) -> str:
    """The error itself; Ray's text begins with the remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def check_servers(policy: str, servers: Sequence[Any]) -> None:
    """Asks every server for a sign of life.

    Args:
        policy: the policy's name.
        servers: actor handles of verl's vLLM servers, which forward calls to their engine's workers: the engine is
            a process of its own and may die alone.

    Raises PolicyFailed if one is dead. One that does not answer in time is busy, and only reported.
    """
    for server in servers:
        sign = server.collective_rpc.remote("check_health")
        try:
            with naming(policy, "a server"):
                ray.get(sign, timeout=_PING_TIMEOUT)
        except PolicyFailed as failure:
            if not isinstance(failure.__cause__, ray.exceptions.GetTimeoutError):
                raise
            logger.warning("policy %r: a server gave no sign of life for %s s", policy, _PING_TIMEOUT)


def watched(action: Callable[[], None], check: Callable[[], None], every: float) -> None:
    """Runs `action`, calling `check` every so many seconds while it lasts; raises the error of either.

    For actions that wait for ever when the other side dies. After an error of `check` the action's thread is
    left behind: the error ends the process, and Ray whatever is still waiting in it.
    """
    executor = ThreadPoolExecutor(max_workers=1)
    try:
        doing = executor.submit(action)
        while wait([doing], timeout=every).not_done:
            check()
        doing.result()
    finally:
        executor.shutdown(wait=False)
