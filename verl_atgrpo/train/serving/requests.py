"""A candidate's requests: paused during a weight sync, resumed after it, retried on another replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.types import EpisodeFailed
from verl_atgrpo.train.serving.client import DecisionClient, NoServer, TooLate
from verl_atgrpo.train.serving.health import is_dead, last_line

logger = logging.getLogger(__name__)


class Gate(asyncio.Event):
    """Set when requests may be sent, cleared during a weight sync."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = 0
        """Number of pauses: a request during which it increases was interrupted."""
        self.set()

    def pause(self) -> None:
        """Pauses requests; has no effect if they are paused already."""
        self.pauses += self.is_set()
        self.clear()

    resume = asyncio.Event.set


@dataclass
class Response:
    """A response that may consist of several parts, one per request."""

    prompt_ids: list[int]
    sampling_params: dict[str, Any]
    """With `max_tokens`; `seed`, if there is one, is the first part's."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights for every part with tokens."""
    cached_tokens: int | None = None
    """Prompt tokens that the first server found in its prefix cache."""

    @property
    def room(self) -> int:
        """Number of tokens that may still be generated."""
        return int(self.sampling_params["max_tokens"]) - len(self.token_ids)

    def next_request(self) -> tuple[list[int], list[int], dict[str, Any]]:
        """Returns prompt, response so far and sampling parameters of the next part.

        Every part has a seed of its own: vLLM seeds a generator per request, so with the same seed a part would
        repeat the random numbers of the first. A part without tokens does not count.
        """
        params = {**self.sampling_params, "max_tokens": self.room}
        if self.versions and "seed" in params:
            params["seed"] = stable_hash(params["seed"], "part", len(self.versions)) & 0x7FFFFFFF
        return self.prompt_ids, list(self.token_ids), params

    def add(self, output: TokenOutput) -> None:
        """Appends a server's output."""
        if output.token_ids:
            self.token_ids += output.token_ids
            self.log_probs += output.log_probs or ()
            self.versions.append(output.extra_fields.get("global_steps") or 0)
        if self.cached_tokens is None:
            self.cached_tokens = output.extra_fields.get("num_cached_tokens")

    def whole(self) -> TokenOutput:
        """Returns the response in the form of verl's clients."""
        return TokenOutput(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            stop_reason="completed",
            extra_fields={
                "min_global_steps": min(self.versions, default=0),
                "max_global_steps": max(self.versions, default=0),
                "num_cached_tokens": self.cached_tokens,
                "resumed": max(0, len(self.versions) - 1),
            },
        )


@dataclass
class PatientClient:
    """Returns complete responses: resumes interrupted requests and retries failed ones."""

    client: DecisionClient
    gate: Gate
    timeout: float
    """Seconds per request; the time in which it is paused or waits for a slot does not count."""
    retries: int
    """How often a candidate is retried, each time on another server."""
    count: Callable[[str], None]
    """Is called with `requests_resumed` or `requests_retried` for every request that is sent again."""
    tokenizer: Any = None
    """Used by verl's trace."""

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Returns the response to a prompt.

        A weight sync aborts requests. The response then continues from its tokens so far, never from scratch: long
        responses are the ones that are interrupted, so sampling them again would favour short ones.

        Raises EpisodeFailed "timeout" or "engine" after the retries, or if no server is left.
        """
        response = Response(prompt_ids, sampling_params)
        failure: EpisodeFailed | None = None
        avoid: frozenset[str] = frozenset()
        retried = 0
        while True:
            await self.gate.wait()
            try:
                async with self.client.serving(request_id, avoid) as (server_id, server):
                    if not self.gate.is_set():  # paused while this request waited for its slot
                        continue
                    if retried < len(avoid):
                        retried = len(avoid)
                        self.count("requests_retried")
                    pauses = self.gate.pauses
                    output = await self.client.attempt(server, request_id, *response.next_request(), self.timeout)
            except NoServer as error:
                raise failure or EpisodeFailed("engine", str(error)) from error
            except TooLate:
                if pauses != self.gate.pauses:
                    continue  # Sent just before the pause, it waited in the server for the weight sync.
                failure = EpisodeFailed("timeout", f"no answer within {self.timeout} s")
            except ray.exceptions.RayError as error:
                failure = EpisodeFailed("engine", f"the server failed: {last_line(error)}")
                # An error of a live engine would occur on any other.
                if not (isinstance(error, ray.exceptions.ActorUnavailableError) or is_dead(error)):
                    raise failure from error
                if is_dead(error):
                    self.client.remove(server_id)
            else:
                if output.stop_reason == "error":  # vLLM's, with tokens that it may not stand for
                    failure = EpisodeFailed("engine", "the server ended the request with an error")
                else:
                    response.add(output)
                    if output.stop_reason != "aborted" or not response.room:
                        return response.whole()
                    if output.token_ids:
                        self.count("requests_resumed")
                    if output.token_ids or pauses != self.gate.pauses:
                        continue
                    # Aborted without a token or a weight sync: sending it again could go on forever.
                    failure = EpisodeFailed("engine", "the server aborted the request")
            avoid |= {server_id}
            if len(avoid) > self.retries:
                raise failure
            logger.warning("request %s failed at server %s: %s", request_id, server_id, failure)


def engine_params(mode: str) -> dict[str, Any]:
    """Returns additional sampling parameters of vLLM for every request, in a mode of `at_grpo.mode`."""
    # The rollout worker decodes a whole response at once, so vLLM need not detokenize. Flat log-probs are a few
    # objects per response instead of three per token.
    params: dict[str, Any] = {"detokenize": False, "flat_logprobs": True}
    if mode == "sync":
        from vllm.sampling_params import RequestOutputKind

        # By default vLLM passes verl's server the whole response after every token. Only modes with interrupted
        # requests need that: verl does not abort a request before its first token.
        params["output_kind"] = RequestOutputKind.FINAL_ONLY
    return params
