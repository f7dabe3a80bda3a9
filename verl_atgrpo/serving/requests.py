"""From a candidate to requests: paused during a weight sync, resumed after it, retried on another replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.environment import stable_hash
from verl_atgrpo.serving.client import DecisionClient, NoServer, TooLate
from verl_atgrpo.serving.health import last_line
from verl_atgrpo.team import EpisodeFailed

logger = logging.getLogger(__name__)


class Gate:
    """Holds requests back while the servers are given new weights."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.pauses = 0
        """How often requests were held: a request during which it grew was interrupted."""

    @property
    def paused(self) -> bool:
        """Whether requests are held."""
        return not self._open.is_set()

    def pause(self) -> None:
        """Lets no request pass from now on; holding twice is holding once."""
        self.pauses += not self.paused
        self._open.clear()

    def resume(self) -> None:
        """Lets requests pass again."""
        self._open.set()

    async def wait(self) -> None:
        """Returns when requests may pass."""
        await self._open.wait()


@dataclass
class Answer:
    """An answer that comes in parts."""

    prompt_ids: list[int]
    sampling_params: dict[str, Any]
    """With `max_tokens`; a `seed` is the first part's."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights of every part that has tokens."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the first server to look found in its prefix cache."""

    @property
    def room(self) -> int:
        """Tokens that the answer may still have."""
        return int(self.sampling_params["max_tokens"]) - len(self.token_ids)

    def next_request(self) -> tuple[list[int], list[int], dict[str, Any]]:
        """Returns prompt, answer so far and sampling parameters of the next part.

        Every part has a seed of its own: vLLM starts a generator for each request, and would answer on with the noise
        of the beginning. A part that ended before its first token was none, and is asked for as before.
        """
        params = {**self.sampling_params, "max_tokens": self.room}
        if self.versions and "seed" in params:
            params["seed"] = stable_hash(params["seed"], "part", len(self.versions)) & 0x7FFFFFFF
        return self.prompt_ids, list(self.token_ids), params

    def add(self, output: TokenOutput) -> None:
        """Appends what a server answered."""
        if output.token_ids:
            self.token_ids += output.token_ids
            self.log_probs += output.log_probs or ()
            self.versions.append(output.extra_fields.get("global_steps") or 0)
        if self.cached_tokens is None:
            self.cached_tokens = output.extra_fields.get("num_cached_tokens")

    def whole(self) -> TokenOutput:
        """Returns the answer as verl's clients return one."""
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
    """Gets whole answers from a client's servers, whatever happens to single requests."""

    client: DecisionClient
    gate: Gate
    timeout: float
    """Seconds that a server has for one request; those in which requests are held or wait for a place do not count."""
    retries: int
    """How often a candidate is tried again, each time at another server."""
    count: Callable[[str], None]
    """Is told of every request that is sent again: `requests_resumed`, `requests_retried`."""
    tokenizer: Any = None
    """What verl's trace decodes with."""

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Returns the answer to a prompt.

        A server that is about to get new weights ends its requests early. The answer then goes on from its tokens so
        far, never from scratch: long answers are the ones that are interrupted, so sampling them anew would prefer
        short ones.

        Raises EpisodeFailed: "timeout" or "engine", after the retries, or with no server left to try.
        """
        answer = Answer(prompt_ids, sampling_params)
        failure: EpisodeFailed | None = None
        avoid: frozenset[str] = frozenset()
        retried = 0
        while True:
            await self.gate.wait()
            try:
                async with self.client.serving(request_id, avoid) as (server_id, server):
                    if self.gate.paused:  # since this request waited for its place
                        continue
                    if retried < len(avoid):
                        retried = len(avoid)
                        self.count("requests_retried")
                    pauses = self.gate.pauses
                    output = await self.client.attempt(server, request_id, *answer.next_request(), self.timeout)
            except NoServer as error:
                raise failure or EpisodeFailed("engine", str(error)) from error
            except TooLate:
                if pauses != self.gate.pauses:
                    continue  # The server had it wait for new weights: it was sent just before the hold.
                failure = EpisodeFailed("timeout", f"no answer within {self.timeout} s")
            except ray.exceptions.RayError as error:
                failure = EpisodeFailed("engine", f"the server failed: {last_line(error)}")
                if not may_do_elsewhere(error):
                    raise failure from error
                if is_dead(error):
                    self.client.remove(server_id)
            else:
                answer.add(output)
                if output.stop_reason != "aborted" or not answer.room:
                    return answer.whole()
                if output.token_ids:
                    self.count("requests_resumed")
                if output.token_ids or pauses != self.gate.pauses:
                    continue
                # Nothing came, and nobody here has asked for an end: to ask again at once might go on for ever.
                failure = EpisodeFailed("engine", "the server aborted the request")
            avoid |= {server_id}
            if len(avoid) > self.retries:
                raise failure
            logger.warning("request %s failed at server %s: %s", request_id, server_id, failure)


def is_dead(error: ray.exceptions.RayError) -> bool:
    """Returns whether a server's process has ended, or the engine's behind it, which no request will change."""
    if isinstance(error, ray.exceptions.RayActorError):
        return not isinstance(error, ray.exceptions.ActorUnavailableError)
    # By its name, since vLLM need not be the engine.
    return any(kind.__name__ == "EngineDeadError" for kind in type(getattr(error, "cause", None)).__mro__)


def may_do_elsewhere(error: ray.exceptions.RayError) -> bool:
    """Returns whether the error is the server's; what a live engine raises it would raise anywhere."""
    return isinstance(error, ray.exceptions.RayActorError) or is_dead(error)


def engine_params(engine: str, mode: str) -> dict[str, Any]:
    """Returns further sampling parameters of every request.

    Args:
        engine: `rollout.name`; only vLLM's server takes parameters that verl has no key for.
        mode: `at_grpo.mode`.
    """
    if engine != "vllm":
        return {}
    # The text is decoded by the rollout worker, once and as a whole; vLLM need not do it token by token. Log-probs in
    # flat lists are a few objects for an answer, not three for every token.
    params: dict[str, Any] = {"detokenize": False, "flat_logprobs": True}
    if mode == "sync":
        from vllm.sampling_params import RequestOutputKind

        # verl's server waits for the end, and by default is handed the whole answer so far after every token. Where
        # requests are interrupted it needs that: it ends none whose first token it has not seen.
        params["output_kind"] = RequestOutputKind.FINAL_ONLY
    return params
