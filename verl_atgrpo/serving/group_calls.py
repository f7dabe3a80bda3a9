"""All requests of a decision in one call of the server's actor: the client's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.serving.group_answers import Answer

_RETURN = 30.0
"""Seconds beyond the requests' time after which a call is given up; a server that lives has ended it before."""


class TooLate(Exception):
    """A server has not answered in time; another one may."""


class Request(NamedTuple):
    """What a candidate asks for beside the prompt."""

    request_id: str
    token_ids: list[int]
    """Its answer so far."""
    sampling_params: dict[str, Any]


@dataclass
class _Call:
    """Requests that are sent together."""

    sending: asyncio.Task[None] = field(init=False)
    requests: list[Request] = field(default_factory=list)
    answers: list[asyncio.Future[TokenOutput]] = field(default_factory=list)
    callers: int = 0
    """Those who still wait for an answer."""


class GroupCalls:
    """Sends requests of a decision that are made in the same round of the event loop as one call."""

    def __init__(self) -> None:
        self._collecting: dict[Hashable, _Call] = {}

    async def ask(
        self, server: ray.actor.ActorHandle, decision: str, prompt_ids: list[int], request: Request, timeout: float
    ) -> TokenOutput:
        """Returns the answer to a request.

        A caller that is cancelled leaves its siblings their call: its request ends in the server with theirs, or at
        once if nobody waits any more.

        Raises TooLate if the answer did not come within `timeout` seconds, and what Ray raises for a server that
        failed.
        """
        key = server, decision, tuple(prompt_ids), timeout
        call = self._collecting.get(key)
        if call is None:
            call = self._collecting[key] = _Call()
            # Runs when all that is ready has run, and before a caller that is cancelled meanwhile.
            call.sending = asyncio.ensure_future(self._send(key, call))
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        call.requests.append(request)
        call.answers.append(answer)
        call.callers += 1
        try:
            return await answer
        finally:
            call.callers -= 1
            if not call.callers:
                call.sending.cancel()

    async def _send(self, key: tuple[ray.actor.ActorHandle, str, tuple[int, ...], float], call: _Call) -> None:
        """Sends what has been collected and hands out the answers as they come."""
        del self._collecting[key]
        server, _, prompt_ids, timeout = key
        stream = server.generate_group.options(num_returns="streaming").remote(
            prompt_ids=list(prompt_ids),
            request_ids=[request.request_id for request in call.requests],
            token_ids=[request.token_ids for request in call.requests],
            sampling_params=[request.sampling_params for request in call.requests],
            timeout=timeout,
        )
        receiving = asyncio.ensure_future(_receive(stream, call.answers))
        failure: Exception = TooLate()
        try:
            # Not wait_for, which before Python 3.12 forgets a cancellation that meets the answer.
            await asyncio.wait((receiving,), timeout=timeout + _RETURN)
            if receiving.done():
                receiving.result()
        except ray.exceptions.RayError as error:
            failure = error
        finally:
            if not receiving.done():
                receiving.cancel()
                # Ends the call in the server's actor, upon which vLLM ends the requests. verl's own `abort_request`
                # looks for the id that was sent, but vLLM files a request under that id with a random ending.
                ray.cancel(stream)
            for answer in call.answers:
                if not answer.done():
                    answer.set_exception(failure)


async def _receive(
    stream: AsyncIterable[Awaitable[list[tuple[int, Answer]]]], answers: Sequence[asyncio.Future[TokenOutput]]
) -> None:
    """Returns when every request has got its answer, or the reason why there is none."""
    left = len(answers)
    async for batch in stream:
        for number, answer in await batch:
            left -= 1
            if answers[number].done():  # whoever asked for it has gone
                continue
            if answer is None:
                answers[number].set_exception(TooLate())
            elif isinstance(answer, ray.exceptions.RayTaskError):
                answers[number].set_exception(answer.as_instanceof_cause())  # as Ray raises it
            else:
                answers[number].set_result(answer)
        if not left:
            return
