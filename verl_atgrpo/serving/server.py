"""A server's side of a decision: its requests in one call, and the name of the socket that weights come through."""

from __future__ import annotations

import asyncio
import hashlib
import os
import traceback
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, TypeAlias

import ray
from verl.workers.rollout.replica import TokenOutput

Answer: TypeAlias = TokenOutput | ray.exceptions.RayTaskError | None
"""What a request gets: its answer, why there is none, or None after its time."""
TOGETHER = 0.05
"""Seconds that an answer waits for its siblings' at most, to be handed over with them."""


class GroupAnswers:
    """Adds `generate_group` to a server with verl's `generate`.

    A call of an actor costs its caller and the actor more than a short answer costs the engine, and the requests of a
    decision come at once, with the same prompt.
    """

    generate: Any

    async def generate_group(
        self,
        prompt_ids: list[int],
        request_ids: Sequence[str],
        token_ids: Sequence[list[int]],
        sampling_params: Sequence[dict[str, Any]],
        timeout: float,
    ) -> AsyncIterator[list[tuple[int, Answer]]]:
        """Answers requests side by side; yields those that are there, with their numbers, until all are.

        What fails or is late leaves the others alone. A request that is late ends here, and all that are left do if
        the call is cancelled.

        Args:
            prompt_ids: the prompt of all requests.
            request_ids: an id for each.
            token_ids: for each, the tokens of its answer that came before it was interrupted.
            sampling_params: for each.
            timeout: seconds for every request.
        """
        numbers = {
            asyncio.ensure_future(
                self.generate(prompt_ids=prompt_ids + tokens, sampling_params=params, request_id=request_id)
            ): number
            for number, (request_id, tokens, params) in enumerate(
                zip(request_ids, token_ids, sampling_params, strict=True)
            )
        }
        loop = asyncio.get_running_loop()
        deadline, waiting = loop.time() + timeout, set(numbers)
        try:
            while waiting:
                left = max(0.0, deadline - loop.time())
                done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if waiting:
                    more, waiting = await asyncio.wait(waiting, timeout=TOGETHER)
                    done |= more
                yield [(numbers[task], _answer(task)) for task in done]
            if waiting:
                await _end(waiting)
                yield [(numbers[task], None) for task in waiting]
        finally:
            await _end(waiting)


async def _end(tasks: Iterable[asyncio.Future[TokenOutput]]) -> None:
    """Ends requests: the engine is told by the task that waits for it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _answer(task: asyncio.Future[TokenOutput]) -> Answer:
    error = task.exception()
    if error is None:
        return task.result()
    # As Ray hands on what a call raises; it replaces a cause that cannot be sent.
    return ray.exceptions.RayTaskError("generate", "".join(traceback.format_exception(error)), error)


_JOB = "VERL_RAY_JOB_ID"
"""The variable from which verl's vLLM worker takes its part of the name."""


def job_name() -> str:
    """Returns Ray's number of this job, and eight digits of a hash of its cluster's address."""
    context = ray.get_runtime_context()
    cluster = hashlib.sha256(context.gcs_address.encode()).hexdigest()[:8]
    return f"{context.get_job_id()}-{cluster}"


def name_receiver() -> None:
    """Has the engines that this server starts listen to this job's workers."""
    os.environ[_JOB] = job_name()


def name_sender(adapter: Any) -> None:
    """Has verl's rollout adapter send to this job's servers.

    Raises RuntimeError if verl names its channel in another way than this package knows.
    """
    job_id = ray.get_runtime_context().get_job_id()
    renamed = adapter.zmq_handle.replace(f"-{job_id}-replica-", f"-{job_name()}-replica-")
    if renamed == adapter.zmq_handle:
        raise RuntimeError(f"verl's weight channel {adapter.zmq_handle!r} does not name the job {job_id} any more")
    adapter.zmq_handle = renamed
