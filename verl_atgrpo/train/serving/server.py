"""The server side of group calls, and the name of the socket that receives weights."""

from __future__ import annotations

import asyncio
import hashlib
import os
import traceback
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import ray
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.play.user_code import cancel

Result: TypeAlias = TokenOutput | ray.exceptions.RayTaskError | None
"""A request's response, its error, or None after the timeout."""
TOGETHER = 0.05
"""Most seconds that a response waits for its siblings, to be returned together with them."""


ADAPTER = "adapter"
"""Key of a request's sampling parameters, and of an adapter's configuration in a weight sync: the number by which the
servers of a shared base know the adapter, from 1."""


def adapter_request(number: int) -> dict[str, Any]:
    """Returns the arguments of vLLM's LoRARequest for an adapter that the trainer has sent; the path is never read."""
    return {"lora_name": f"adapter_{number}", "lora_int_id": number, "lora_path": "sent by the trainer"}


class GroupResponses:
    """Adds `generate_group` to a server with verl's `generate`.

    An actor call costs caller and actor more CPU time than a short response costs the engine, and the requests of a
    decision are concurrent and have the same prompt.
    """

    generate: Any

    async def generate_group(
        self,
        prompt_ids: list[int],
        request_ids: Sequence[str],
        token_ids: Sequence[list[int]],
        sampling_params: Sequence[dict[str, Any]],
        timeout: float,
    ) -> AsyncIterator[list[tuple[int, Result]]]:
        """Runs requests with the same prompt concurrently; yields finished ones, with their indices, until all are.

        `token_ids` are, for each request, the tokens of its response from before it was interrupted. A request that
        fails or times out (seconds) does not affect the others. Requests are aborted after the timeout, or when the
        call is cancelled.
        """
        requests = zip(request_ids, token_ids, sampling_params, strict=True)
        numbers = {
            asyncio.ensure_future(
                self.generate(prompt_ids=prompt_ids + tokens, sampling_params=params, request_id=request_id)
            ): number
            for number, (request_id, tokens, params) in enumerate(requests)
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
                yield [(numbers[task], _result(task)) for task in done]
            if waiting:
                await cancel(waiting)  # each aborts its request in the engine
                yield [(numbers[task], None) for task in waiting]
        finally:
            await cancel(waiting)


def _result(task: asyncio.Future[TokenOutput]) -> Result:
    error = task.exception()
    if error is None:
        return task.result()
    # As Ray transfers the error of a call; it replaces a cause that cannot be pickled.
    return ray.exceptions.RayTaskError("generate", "".join(traceback.format_exception(error)), error)


_JOB = "VERL_RAY_JOB_ID"
"""Environment variable from which verl's vLLM worker takes a part of the socket's name."""


def job_name() -> str:
    """Returns Ray's job id with a hash of the cluster's address: unique also with several clusters on a machine."""
    context = ray.get_runtime_context()
    cluster = hashlib.sha256(context.gcs_address.encode()).hexdigest()[:8]
    return f"{context.get_job_id()}-{cluster}"


def name_receiver() -> None:
    """Names the weight socket of the engines that this server starts after this job."""
    os.environ[_JOB] = job_name()


def name_sender(adapter: Any, first_replica: int = 0) -> None:
    """Counts the replica of verl's rollout adapter from the policy's first; names its weight socket after this job.

    Raises RuntimeError if verl's form of the name has changed.
    """
    job_id, old = ray.get_runtime_context().get_job_id(), adapter.replica_rank
    adapter.replica_rank = old + first_replica
    names = f"-{job_id}-replica-{old}-", f"-{job_name()}-replica-{adapter.replica_rank}-"
    if (renamed := adapter.zmq_handle.replace(*names)) == adapter.zmq_handle:
        raise RuntimeError(
            f"verl's weight channel {adapter.zmq_handle!r} does not name job {job_id} and replica {old} any more"
        )
    adapter.zmq_handle = renamed
