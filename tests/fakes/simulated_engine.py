"""An inference engine without a model, an event loop in virtual time, and rollouts with different schedules.

Each replica has a number of slots. A request waits for a free slot in order of arrival, and occupies it for a fixed
time per token. Decoding is assumed to be memory-bound, so a token's time does not depend on the number of busy slots,
and prefill takes no time. As with verl's balancer and our client, all candidates of a decision go to the replica with
the fewest decisions in flight. Lengths follow from the requests' seeds, so they are the same in every schedule.
"""

from __future__ import annotations

import asyncio
import functools
import random
import selectors
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from fakes.scripted_policy import Numbered

from verl_atgrpo import Outcome, Score, Team, play
from verl_atgrpo.play.seeds import episode_seed
from verl_atgrpo.play.types import EpisodeRecord, TeamOptions
from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.rollout.policy import ServedPolicy

# ------------------------------------------------------------------ clock


class _Jump(selectors.SelectSelector):
    """Advances the clock to the next timer instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits, and no timer is set: nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, in which code takes no time; for one thread, without I/O."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Returns the virtual seconds since the loop was created."""
        return self._jump.now


def run_virtually(main: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    """Returns the result of `main` and the virtual seconds it took."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main), loop.time()
    finally:
        loop.close()


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a test of a coroutine, which runs in virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtually(test(*args, **kwargs))

    return run


# ------------------------------------------------------------------ engine


def log_normal(median: float, sigma: float) -> Callable[[int], int]:
    """Returns seed -> tokens; at least one."""
    return lambda seed: max(1, round(median * random.Random(seed).lognormvariate(0.0, sigma)))


@dataclass
class SimulatedEngine:
    """A fake of verl's client for a policy's servers."""

    tokens_of: Callable[[int], int] = log_normal(128, 0.8)
    """Seed -> tokens of the response, before the length limit."""
    seconds_per_token: float = 0.01
    replicas: int = 8
    slots: int = 256
    """Requests that a replica decodes concurrently (vLLM's `max_num_seqs`)."""
    served: list[tuple[str, float]] = field(default_factory=list)
    """(decision, seconds) of every request."""

    def __post_init__(self) -> None:
        self._free = [asyncio.Semaphore(self.slots) for _ in range(self.replicas)]
        self.decisions = [0] * self.replicas
        self.leases: dict[str, list[int]] = {}

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Returns a response when a slot has decoded it; all token ids are equal."""
        async with self.serving(request_id) as (_, replica):
            return await self.attempt(replica, request_id, prompt_ids, [], sampling_params)

    @asynccontextmanager
    async def serving(self, request_id: str, avoid: frozenset[str] = frozenset()) -> AsyncIterator[tuple[str, int]]:
        """Acquires the replica of a decision, as `DecisionClient`."""
        lease = self.leases.get(request_id)
        if lease is None:
            replica = min(range(self.replicas), key=self.decisions.__getitem__)
            lease = self.leases[request_id] = [replica, 0]
            self.decisions[replica] += 1
        lease[1] += 1
        try:
            yield str(lease[0]), lease[0]
        finally:
            lease[1] -= 1
            if not lease[1]:
                self.decisions[lease[0]] -= 1
                del self.leases[request_id]

    async def attempt(
        self,
        replica: int,
        request_id: str,
        prompt_ids: list[int],
        token_ids: list[int],
        sampling_params: dict[str, Any],
        timeout: float | None = None,
    ) -> Any:
        """Returns a response when a slot of the replica has decoded it."""
        tokens = min(self.tokens_of(sampling_params["seed"]), sampling_params["max_tokens"])
        seconds = tokens * self.seconds_per_token
        self.served.append((request_id, seconds))
        async with self._free[replica]:
            await asyncio.sleep(seconds)
        return SimpleNamespace(
            token_ids=[1] * tokens,
            log_probs=[-0.5] * tokens,
            stop_reason="completed",
            extra_fields={"global_steps": 0},
        )


@dataclass
class OneAtATime:
    """Sends a decision's candidates to the engine one after the other."""

    engine: SimulatedEngine
    _turn: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    async def generate(self, request_id: str, **request: Any) -> Any:
        """Sends the request after the decision's earlier ones have finished."""
        async with self._turn[request_id]:
            return await self.engine.generate(request_id, **request)


class Bound(NamedTuple):
    """Lower bounds on the time of any schedule of these requests, in seconds."""

    work: float
    """Total time of all requests, divided by the number of slots."""
    chain: float
    """The longest episode: the sum of its decisions' slowest candidates."""

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self)


def lower_bound(served: Iterable[tuple[str, float]], slots: int) -> Bound:
    """Returns the bound for requests (see `SimulatedEngine.served`) on `slots` slots in total.

    For episodes with sequential decisions; decision ids have Team's form, "EPISODE.AGENT.TURN".
    """
    work = 0.0
    slowest: dict[str, float] = defaultdict(float)
    for decision, seconds in served:
        work += seconds
        slowest[decision] = max(slowest[decision], seconds)
    chains: dict[str, float] = defaultdict(float)
    for decision, seconds in slowest.items():
        chains[decision.rsplit(".", 2)[0]] += seconds
    return Bound(work / slots, max(chains.values()))


# ------------------------------------------------------------------ episodes


class Lengths:
    """A tokenizer with one token per character, which decodes a response as its number of tokens."""

    eos_token_id = 0
    all_special_tokens = ()
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        """Returns the code points of the messages' contents."""
        return [ord(char) for message in messages for char in message["content"]]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        """Returns the number of tokens."""
        return str(len(token_ids))


class Barrier:
    """A reusable barrier."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._here = 0
        self._open = asyncio.Event()

    async def wait(self) -> None:
        """Returns when all parties have called it."""
        self._here += 1
        opens = self._open
        if self._here == self._parties:
            self._here, self._open = 0, asyncio.Event()
            opens.set()
        await opens.wait()


class Turns(Numbered):
    """Two agents in turns; scores depend on the response's length and take no time."""

    agents = ("tool_user", "planner")

    def __init__(self, turns: int = 4, barrier: Barrier | None = None) -> None:
        self._turns = turns
        self._barrier = barrier
        """If given, every episode waits there for all others before each decision."""

    async def run(self, task: int, team: Team) -> Outcome:
        """Plays the turns; an agent's prompt has the other's last response."""
        last = ""
        for turn in range(self._turns):
            for agent in self.agents:
                if self._barrier is not None:
                    await self._barrier.wait()
                answer = await team[agent].act(f"task {task}, turn {turn}, {last}", score=_score)
                last = answer.text
        return Outcome(success=int(last) % 2 == 0, team_reward=float(int(last) % 2 == 0))


def _score(reply: str) -> Score:
    return Score(team=float(int(reply) % 2 == 0), local=int(reply) % 3 / 2)


def served_policy(client: SimulatedEngine | OneAtATime) -> ServedPolicy:
    """Returns a `ServedPolicy` with this client."""
    return ServedPolicy(
        client=client,
        chat=Chat(Lengths()),
        sampling_params={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        max_prompt_length=1024,
        max_response_length=1024,
        request_timeout=1e9,
    )


async def rollout(
    engine: SimulatedEngine,
    *,
    episodes: int,
    turns: int = 4,
    candidates: int = 8,
    barriers: bool = False,
    sequential: bool = False,
) -> list[EpisodeRecord]:
    """Plays the episodes concurrently; without either flag, as in training.

    Args:
        barriers: every episode waits for all others before each decision.
        sequential: a decision's candidates are sampled one after the other.
    """
    environment = Turns(turns, Barrier(episodes) if barriers else None)
    policy = served_policy(OneAtATime(engine) if sequential else engine)
    options = TeamOptions(candidates=candidates)

    def team(index: int) -> Team:
        samplers = dict.fromkeys(environment.agents, policy)
        return Team(samplers, options, episode_id=f"t{index}.0", seed=episode_seed(0, "train", 1, index, 0))

    return await asyncio.gather(*(play(environment, index, team(index)) for index in range(episodes)))
