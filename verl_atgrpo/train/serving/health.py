"""Detects dead workers and servers, so that a run ends with the policy's name instead of waiting forever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

logger = logging.getLogger(__name__)

T = TypeVar("T")

PING_TIMEOUT = 30.0
"""Seconds; a server that takes longer is busy, not dead."""


class RolloutFailed(RuntimeError):
    """A rollout worker died or raised."""


class PolicyFailed(RuntimeError):
    """A policy's worker or server died or raised; the message names the policy and what it was doing."""


def last_line(error: BaseException) -> str:
    """Returns the error's type and its last line: Ray's message starts with the remote traceback.

    Of a process that Ray killed for memory it is the line with the machine's use, before figures and advice.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    killed = [line for line in lines if "low on memory" in line]
    return f"{type(error).__name__}: {(killed or lines or [''])[-1]}"


def is_dead(error: ray.exceptions.RayError) -> bool:
    """Returns whether an error of a call says that the process of a server or its engine is dead."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return False
    # An actor that Ray kills for memory has an error of its own, which is no RayActorError.
    if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
        return True
    # By name: vLLM need not be the engine, nor installed.
    return any(kind.__name__ == "EngineDeadError" for kind in type(getattr(error, "cause", None)).__mro__)


@contextmanager
def naming(policy: str, doing: str) -> Iterator[None]:
    """Raises PolicyFailed, with the policy's name and what it was doing, for any error of Ray's."""
    try:
        yield
    except ray.exceptions.RayError as error:
        raise PolicyFailed(f"policy {policy!r}: {doing} failed: {last_line(error)}") from error


def dead_replicas(policy: str, replicas: Mapping[int, Sequence[Any]]) -> dict[int, str]:
    """Checks the health of every replica; returns the number of every dead one with the reason.

    A replica that does not answer in time is busy: it is logged, and not dead. `replicas` is number -> actor handles
    of verl's vLLM servers, one per node: the first one forwards calls to the engine, a separate process that may die
    alone; the others have no engine to check.
    """
    checks = {
        replica: [first.collective_rpc.remote("check_health"), *(each.__ray_ready__.remote() for each in others)]
        for replica, (first, *others) in replicas.items()
    }
    deadline = time.monotonic() + PING_TIMEOUT
    dead: dict[int, str] = {}
    for replica, pending in checks.items():
        try:
            for check in pending:
                ray.get(check, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            silent = f"policy {policy!r}: server {replica} has not answered its health check for {PING_TIMEOUT} s"
            logger.warning("%s; it is loading weights, or hangs", silent)
        except ray.exceptions.RayError as error:
            dead[replica] = last_line(error)
    return dead


def watched(action: Callable[[], T], check: Callable[[], None], every: float) -> T:
    """Returns the result of `action`, calling `check` every `every` seconds meanwhile; raises the error of either.

    For actions that would wait forever if the other side dies. After an error of `check` the action's thread keeps
    running: the error ends the run, and the process with it.
    """
    executor = ThreadPoolExecutor(max_workers=1)
    doing = executor.submit(action)
    executor.shutdown(wait=False)
    while wait([doing], timeout=every).not_done:
        check()
    return doing.result()
