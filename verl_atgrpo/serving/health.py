"""A worker or server that dies ends the run with its policy's name, and never with a silent wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import ray


class RolloutFailed(RuntimeError):
    """A rollout worker died or raised."""


def last_line(error: BaseException) -> str:
    """Returns the error itself; Ray's text begins with the remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


logger = logging.getLogger(__name__)

T = TypeVar("T")

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
        raise PolicyFailed(f"policy {policy!r}: {doing} failed: {last_line(error)}") from error


def why_dead(policy: str, replicas: Mapping[int, Sequence[Any]]) -> dict[int, str]:
    """Asks every replica for a sign of life.

    Args:
        policy: the policy's name.
        replicas: number of a replica -> actor handles of verl's vLLM servers, one a node. The first forwards calls to
            the engine: a process of its own, which may die alone. The others have no engine to ask.

    Returns the number of every dead replica with what it died of. One that does not answer in time is busy, and only
    reported.
    """
    signs = {
        replica: [
            servers[0].collective_rpc.remote("check_health"),
            *(each.__ray_ready__.remote() for each in servers[1:]),
        ]
        for replica, servers in replicas.items()
    }
    deadline = time.monotonic() + _PING_TIMEOUT
    dead: dict[int, str] = {}
    for replica, asked in signs.items():
        try:
            for sign in asked:
                ray.get(sign, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            logger.warning(
                "policy %r: server %d gave no sign of life for %s s; it takes weights, or hangs",
                policy,
                replica,
                _PING_TIMEOUT,
            )
        except ray.exceptions.RayError as error:
            dead[replica] = last_line(error)
    return dead


def watched(action: Callable[[], T], check: Callable[[], None], every: float) -> T:
    """Returns what `action` does, calling `check` every so many seconds while it lasts; raises the error of either.

    For actions that wait for ever when the other side dies. After an error of `check` the action's thread is
    left behind: the error ends the process, and Ray whatever is still waiting in it.
    """
    executor = ThreadPoolExecutor(max_workers=1)
    try:
        doing = executor.submit(action)
        while wait([doing], timeout=every).not_done:
            check()
        return doing.result()
    finally:
        executor.shutdown(wait=False)
