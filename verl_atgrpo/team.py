"""The team that plays an episode: decisions, candidates and their selection.

`await team.<agent>.act(prompt, score)` is a decision: one agent, one turn, one prompt. Its K candidates answer the
same token ids, so they form a comparison group by construction (AT-GRPO, arXiv 2510.11062, Sec. 4.1). The episode
continues with the committed one.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import math
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from verl_atgrpo.environment import (
    Environment,
    Message,
    Outcome,
    Score,
    Split,
    check_outcome,
    contained,
    stable_hash,
)
from verl_atgrpo.quoting import SHARES, sharing
from verl_atgrpo.thoughts import split_thought
from verl_atgrpo.tools import MessageError, Reply, Tool, ToolCall, ToolError, ToolSource, text_of, tools_of

if TYPE_CHECKING:
    from verl_atgrpo.endpoints import CallScore, Endpoint

Prompt = str | Sequence[Message]
PromptSource = Prompt | Callable[[], Prompt]
"""A prompt, or a function that makes it with quotes of the length that its policy can take (`quoting`)."""
ScoreFunction = Callable[[Any], Score | Awaitable[Score]]
"""Reply -> score: of what it says, without its thoughts, or of the `tools.Reply` to a prompt with tools."""
GroupScoreFunction = Callable[[Sequence[Any]], Sequence[Score] | Awaitable[Sequence[Score]]]
Scheme = Literal["tree", "parallel", "evaluate"]
Selection = Literal["greedy", "first", "random", "softmax"]
T = TypeVar("T")
_TAKEN = ("all", "counts", "decisions", "failure", "generated_tokens", "unsettled")
"""Attributes of a team that its class does not have, and the word for all agents in a recipe."""
_SCOPE: contextvars.ContextVar[tuple[object, str, float]] = contextvars.ContextVar("scope", default=(None, "", 1.0))
"""The team whose candidate is being scored, and the scope and the weight of decisions that its score makes."""


class EpisodeFailed(Exception):
    """A candidate could not be sampled (engine error, time-out, prompt too long) or scored; its episode ends."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Name of the counter: `prompt_too_long`, `timeout`, `engine`, `empty`, or an environment's own."""


class ReplayError(RuntimeError):
    """An episode that is played again with the same replies differs: a defect of the environment."""


@dataclass(frozen=True)
class Generation:
    """A policy's answer to one prompt."""

    token_ids: list[int]
    log_probs: list[float]
    """Log-prob of each sampled token, computed by the server; one per token id."""
    text: str
    """All of it, with its thoughts in `<think>`."""
    truncated: bool = False
    """Whether the answer reached the length limit."""
    weights_version: tuple[int, int] = (0, 0)
    """First and last version of the weights that produced tokens of this answer."""
    resumed: int = 0
    """How often the answer was interrupted and resumed."""
    temperature: float = 1.0
    """That it was sampled at."""
    cached_tokens: int = 0
    """Tokens of the prompt that were in the server's prefix cache."""
    reply: Reply | None = None
    """The answer as parsed by a server that returns no ids, to a prompt with tools."""
    usage: tuple[int, int] | None = None
    """Numbers of tokens of prompt and answer, from a server that returns no ids; all ids are placeholders then."""
    opened: bool = False
    """Whether its prompt ends in the beginning of a thought."""

    @cached_property
    def parts(self) -> tuple[str, str]:
        """What it thought and what it said."""
        return split_thought(self.text, self.opened)

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.token_ids) if self.usage is None else self.usage[1]


OnScoreError = Callable[[str, int, str, Exception], None]
"""Agent, turn, reply and what scoring the reply raised."""


@dataclass(frozen=True)
class Limits:
    """Where an answer ends earlier than the policy's own settings say."""

    max_tokens: int | None = None
    """Most tokens; the policy's `max_response_length` if it is smaller."""
    stop: tuple[str, ...] = ()
    """Texts at which it ends. They are among its tokens and not in its text."""
    calls: bool = False
    """Whether it may call tools, and ends where the model family ends a call."""

    def cut(self, text: str) -> str:
        """Returns a text up to the first of the stop texts."""
        ends = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


class Sampler(Protocol):
    """The source of a team's candidates: verl's servers, a local model or a script."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a prompt, with the chat template applied.

        Raises EpisodeFailed if the prompt is too long for the policy.
        """
        ...

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        """Samples one answer. Candidates of a decision have the same `decision_id`, so that they share a prefix cache.

        Raises EpisodeFailed if sampling failed.
        """
        ...


@runtime_checkable
class ToolSampler(Sampler, Protocol):
    """A source of candidates that may call tools and end early."""

    def encode_with_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Returns the token ids of a prompt in which the tools are described.

        Raises:
            EpisodeFailed: the prompt is too long for the policy.
            ToolError: its chat template knows no tools.
        """
        ...

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: Limits | None = None
    ) -> Generation:
        """As `Sampler.generate`, within limits."""
        ...

    async def parse(self, generation: Generation, tools: Sequence[Tool]) -> Reply:
        """Returns the calls and the rest of an answer; an unreadable answer is one without calls."""
        ...


@dataclass(frozen=True)
class Candidate:
    """One answer sampled at a decision, with its score."""

    generation: Generation
    score: Score
    reward: float
    """The mixed reward alpha * team + local_weight * local."""
    error: Exception | None = None
    """Why it could not be scored; its reward is the lowest of its group then, and at most 0."""
    reply: Reply | None = None
    """The parsed answer, at a decision with tools."""

    @property
    def text(self) -> str:
        """What the answer says, without its thoughts and, at a decision with tools, its calls."""
        return self.generation.parts[1] if self.reply is None else self.reply.text

    @property
    def reasoning(self) -> str:
        """What it thought; no score is given that, and no other agent's prompt should have it."""
        return self.generation.parts[0] if self.reply is None else self.reply.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Its calls, at a decision with tools."""
        return () if self.reply is None else self.reply.calls


@dataclass(frozen=True)
class Decision:
    """A comparison group: the K candidates of (episode, agent, turn)."""

    agent: str
    turn: int
    """Index of the decision among this agent's in its scope."""
    policy: str
    prompt_ids: list[int]
    candidates: tuple[Candidate, ...]
    committed: int
    """Index of the candidate that the episode continued with; -1 if it is none of them (branching at random)."""
    scope: str = ""
    """Empty in `run`; `<agent>.<turn>.<candidate>/` in the score of that candidate, `<agent>.<turn>.all/` in that of
    all."""
    order: int = 0
    """How many decisions of its scope had started before."""
    trained: bool = True
    """Whether its candidates are rows of the update."""
    k: int = 1
    """The number of its candidates in the scheme `tree`, and at a branch point."""
    limits: Limits | None = None
    """Where its candidates end early."""
    weight: float = 1.0
    """1 / the number of alternatives to it in its episode, of which all are played: the other candidates whose scores
    make the same decision, and the other branches. A sum over decisions with these weights is an expectation over
    episodes, whatever the number of candidates."""

    @property
    def name(self) -> str:
        """Its name in the episode, whatever the order in which decisions finish."""
        return f"{self.scope}{self.agent}.{self.turn}"


@dataclass(frozen=True)
class TeamOptions:
    """How many candidates are sampled, how their rewards are mixed, and which is selected."""

    candidates: int = 4
    """K, the number of candidates of a decision with the scheme `tree`."""
    agent_candidates: Mapping[str, int] = field(default_factory=dict)
    """Agent -> its own K."""
    alpha: float = 1.0
    """Weight of the team part in r = alpha * team + local_weight * local (paper, Eq. 3)."""
    local_weight: float = 1.0
    """Weight of the local part; 1 in the paper."""
    selection: Selection = "greedy"
    """Which candidate is committed; `greedy` takes the largest mixed reward, at ties the lowest index."""
    softmax_temperature: float = 1.0
    """Temperature of `selection: softmax`, in units of reward."""


@dataclass(frozen=True)
class Replayed:
    """What a decision is to be answered with when an episode is played again."""

    prompt_ids: list[int]
    """The prompt that it must have."""
    reply: Candidate | Generation
    """A reply that is not scored yet is scored."""


@dataclass(frozen=True)
class Request:
    """The arguments of `Agent.act`."""

    prompt: Prompt
    score: ScoreFunction | None = None
    score_all: GroupScoreFunction | None = None
    candidates: int | None = None
    train: bool = True
    tools: tuple[Tool, ...] = ()
    limits: Limits | None = None


class _NoScore(TypeError):
    """An environment returned something else than a score: a defect, whatever the reply was."""


class _NotScored(Exception):
    """A score made a decision in evaluation, where nobody needs its result."""


@dataclass
class EpisodeRecord:
    """An episode's decisions, in the order in which they were made, and its outcome."""

    decisions: list[Decision]
    outcome: Outcome


def end_in_evaluation() -> None:
    """Ends the running score if it is one of evaluation, where nobody needs its result.

    For what a score asks elsewhere; decisions of the team do it themselves.
    """
    team, scope, _ = _SCOPE.get()
    if isinstance(team, Team) and team._scheme == "evaluate":
        team._unscored.add(scope)
        raise _NotScored


def as_messages(prompt: Prompt) -> list[Message]:
    """Returns `prompt` as chat messages: a text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def select(rewards: Sequence[float], selection: Selection, rng: random.Random, temperature: float) -> int:
    """Returns the index of the candidate to commit, given the candidates' mixed rewards."""
    if selection == "first":
        return 0
    if selection == "random":
        return rng.randrange(len(rewards))
    if selection == "softmax":
        top = max(rewards)
        weights = [math.exp((reward - top) / temperature) for reward in rewards]
        return rng.choices(range(len(rewards)), weights)[0]
    return max(range(len(rewards)), key=lambda index: rewards[index])


@dataclass(frozen=True)
class Agent:
    """One agent of a team, as the environment uses it."""

    _team: Team = field(repr=False)
    name: str

    async def act(
        self,
        prompt: PromptSource,
        score: ScoreFunction | None = None,
        *,
        score_all: GroupScoreFunction | None = None,
        candidates: int | None = None,
        train: bool = True,
        tools: Sequence[ToolSource] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Candidate:
        """Samples this agent's candidates for `prompt`, scores them and returns the committed one.

        Args:
            prompt: a text or chat messages; the same for every candidate. Or a function that returns them, if it
                quotes other replies (`quoting.quoted`): while the policy finds the prompt too long, it is called again
                with quotes half as long.
            score: what a reply says, without its thoughts -> Score, sync or async; it must not change the state. None
                scores 0. An async one may make decisions itself (a judge, a refinement); evaluation does not score
                such candidates.
            score_all: replies -> their scores, in place of `score`: for a judge that ranks the candidates of a group.
                It gets all of them at once, in evaluation and where each is sampled alone (`parallel`, `branch`) one,
                so a ranking is worth nothing there. What it raises ends the run: no single reply is at fault.
            candidates: K of this decision in training, in place of the recipe's; at least 2 if it is trained. With
                the scheme `parallel` a trained decision has one candidate nevertheless.
            train: False for a decision whose candidates are no rows of the update, such as a draft or a simulated
                user. It has one candidate unless `candidates` says more.
            tools: typed functions or OpenAI schemas that the reply may call. Nothing is called here (`tools.use_tools`
                does that); scores get a `tools.Reply`, and the returned candidate has `tool_calls`.
            max_tokens: most tokens of a reply, if fewer than `data.max_response_length`.
            stop: texts at which a reply ends; they are not in its text.

        Raises:
            EpisodeFailed: a candidate could not be sampled; the environment should not catch it.
            ToolError: something is no tool, or the policy's chat template knows none.
            TypeError: a score is no `Score`.
            ValueError: `candidates` or `max_tokens` is too small, a stop text is empty, or `score` and `score_all` are
                both given.
        """
        if score is not None and score_all is not None:
            raise ValueError(f"agent {self.name!r}: both score and score_all are given; use one")
        if candidates is not None and (not isinstance(candidates, int) or candidates < 1 + train):
            raise ValueError(
                f"agent {self.name!r}: candidates={candidates!r}, and train={train} needs {1 + train}, a whole number"
            )
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"agent {self.name!r}: max_tokens={max_tokens!r} is less than 1, or no whole number")
        for key, listed in (("stop", stop), ("tools", tools)):
            if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Sequence):  # read item by item
                raise ValueError(f"agent {self.name!r}: {key}={listed!r:.80} is no list: use {key}=[{listed!r:.80}]")
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(
                f"agent {self.name!r}: stop={list(stop)} has an empty text, which ends every reply, or none"
            )
        limits = Limits(max_tokens, tuple(stop), bool(tools)) if max_tokens is not None or stop or tools else None
        known = tools_of(tools)
        made = self._team._fitted(self.name, prompt, known) if callable(prompt) else prompt
        request = Request(made, score, score_all, candidates, train, known, limits)
        return await self._team._decide(self.name, request)


def check_agents(agents: object) -> None:
    """Raises ValueError unless an environment's `agents` are names for `team.<agent>` and `at_grpo.agents`."""
    if not isinstance(agents, tuple | list) or not agents:
        raise ValueError(f"agents={agents!r:.200}: a tuple of names, such as ('planner',)")
    for place, name in enumerate(agents):
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"agents: {name!r:.200} is no identifier that begins with a letter")
        if hasattr(Team, name) or name in _TAKEN:
            raise ValueError(f"agents: {name!r} is taken: team.{name} is something else; use another name")
        if name in agents[:place]:
            raise ValueError(f"agents: {name!r} is there twice")


class Team:
    """The agents of one episode and their decisions."""

    def __init__(
        self,
        agents: Mapping[str, str],
        policies: Mapping[str, Sampler],
        options: TeamOptions,
        *,
        own: Mapping[str, Sampler] | None = None,
        scheme: Scheme = "tree",
        episode_id: str = "episode",
        seed: int | None = 0,
        on_score_error: OnScoreError | None = None,
        path: str = "",
        replayed: Mapping[str, Replayed] | None = None,
        scored: bool = True,
    ) -> None:
        """Binds agents to policies for one episode.

        Args:
            agents: agent name -> policy name.
            policies: policy name -> policy.
            options: K, alpha, selection.
            own: agent -> its own sampler of its policy, for agents that answer with settings of their own.
            scheme: `tree` samples K candidates a decision; `parallel` and `evaluate` sample one.
            episode_id: unique among the episodes of a step; decision ids derive from it.
            seed: from which the seed of every sample derives; None leaves seeding to the policy.
            on_score_error: called if scoring a reply raises, and may raise to end the episode; if it returns, the
                episode continues, unless the scores of all candidates of the decision raised. None raises at once.
            path: the scope of the decisions of `run`, other than "" for a continuation (`branching`).
            replayed: decisions of `run` that are not sampled, by `<agent>.<turn>`.
            scored: whether the score of a single candidate, which selects nothing, is called.

        Raises:
            ValueError: as `check_agents`.
        """
        check_agents(tuple(agents))
        self._policy_of = dict(agents)
        self._policies = policies
        self._own = own or {}
        self._options = options
        self._scheme = scheme
        self._episode_id = episode_id
        self._seed = seed
        self._on_score_error = on_score_error
        self._path = path
        self._replayed = replayed or {}
        self._scored = scored
        self._started: Counter[str] = Counter()
        """Decisions that have started, by scope and by scope and agent."""
        self._nested: dict[str, list[Decision]] = {}
        """Finished decisions of the scores of candidates whose own decision has not finished, by scope."""
        self._settled: set[str] = set()
        self._closed = False
        self._active: set[asyncio.Task[object]] = set()
        self.decisions: list[Decision] = []
        self.generated_tokens = 0
        self.counts: Counter[str] = Counter()
        """Tool calls of all candidates (`tool_calls_parsed`, `tool_calls_unparsed`), and the decisions that continue a
        dialogue, with those among them whose prompt does not begin with the tokens so far (`dialogue_turns`,
        `dialogue_turns_broken`), and the prompts whose quotes were shortened to fit (`prompts_shortened`)."""
        self._dialogues: dict[str, tuple[list[Message], list[int]]] = {}
        """Messages and tokens of the last decision, by scope and agent."""
        self._unscored: set[str] = set()
        """Scopes of scores that made a decision in evaluation."""
        self.unsettled: dict[str, Candidate] = {}
        """Name of a settled decision -> the committed candidate as `act` returned it."""
        self.failure: Exception | None = None
        """What a decision raised first. The episode has failed even if the environment catches the exception."""

    def __getattr__(self, name: str) -> Agent:
        agents = self.__dict__.get("_policy_of", ())
        if name not in agents:
            raise AttributeError(f"the team has no agent {name!r}; its agents are {', '.join(agents)}")
        # Made anew on each access: a stored agent would form a reference cycle that keeps the team's tokens until the
        # next garbage collection.
        return Agent(self, name)

    def __getitem__(self, name: str) -> Agent:
        return self.__getattr__(name)

    def serve(
        self,
        score: CallScore | None = None,
        *,
        agents: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        max_turns: int = 64,
        timeout: float | None = 3600.0,
    ) -> AbstractAsyncContextManager[Mapping[str, Endpoint]]:
        """Opens an OpenAI-compatible endpoint for each agent, as `async with team.serve() as urls`.

        What a decision raises other than `EpisodeFailed`, such as a defect of `score`, is raised at the end of the
        `async with`.

        Args:
            score: (agent, messages, reply) -> Score of a chat completion; None scores 0: train by the outcome
                (`at_grpo.scheme` `branch` or `parallel`) then.
            agents: those that are served; None for all.
            host: where to listen. The keys are the only protection on other addresses than the loopback.
            max_turns: most completions of each agent; further requests are refused, and a hundred of them end the
                episode.
            timeout: seconds after which requests are refused and those in flight end. What has not ended half a minute
                later is cancelled, and the episode fails. None for no limit.

        Raises:
            EpisodeFailed: within the `async with`, an agent's framework did not end at its limits, or did not catch
                that a request was refused by one.
            RuntimeError: it is called in a score.
            ValueError: a limit is not above 0, or `agents` is one text.
        """
        from verl_atgrpo.endpoints import serve

        if self._scope() != self._path:
            raise RuntimeError(
                "serve() in a score: its requests could not be told from those of the other candidates' scores; "
                "call act, or serve in run"
            )
        if max_turns < 1 or (timeout is not None and not timeout > 0):
            raise ValueError(f"serve: max_turns={max_turns}, timeout={timeout}: both are above 0, or timeout=None")
        if isinstance(agents, str):
            raise ValueError(f"serve: agents={agents!r} is no list: use agents=[{agents!r}]")
        served = list(self._policy_of) if agents is None else [self[agent].name for agent in agents]
        return serve(self, served, score, host=host, max_turns=max_turns, timeout=timeout)

    def policy_name(self, agent: str) -> str:
        """Returns the policy of an agent."""
        return self._policy_of[agent]

    def sampling_of(self, agent: str) -> Mapping[str, Any]:
        """Returns the sampling parameters of an agent in training, as far as they are known; none in evaluation."""
        return {} if self._scheme == "evaluate" else getattr(self._sampler(agent), "sampling_params", {})

    def _fitted(self, agent: str, prompt: Callable[[], Prompt], tools: Sequence[Tool]) -> Prompt:
        """Returns an agent's prompt with quotes as long as its policy can take (`quoting`), or the shortest."""
        policy = self._sampler(agent)
        for share in SHARES:
            with sharing(share):
                made = prompt()
            try:
                if tools and isinstance(policy, ToolSampler):
                    policy.encode_with_tools(as_messages(made), tools)
                else:
                    policy.encode(as_messages(made))
            except EpisodeFailed as failed:
                if failed.reason == "prompt_too_long":
                    continue
            except ValueError:  # of a message or a tool; the decision raises it again
                pass
            break
        self.counts["prompts_shortened"] += int(share < 1)
        return made

    def _sampler(self, agent: str) -> Sampler:
        own = self._own.get(agent)
        return self._policies[self._policy_of[agent]] if own is None else own

    async def _decide(self, agent: str, request: Request) -> Candidate:
        if self._closed:
            raise asyncio.CancelledError("the episode has ended")
        scope = self._scope()
        if scope != self._path:
            end_in_evaluation()
        turn, order = self._started[f"{scope}{agent}"], self._started[scope]
        self._started.update((f"{scope}{agent}", scope))
        options, train = self._options, request.train
        k = request.candidates or (options.agent_candidates.get(agent, options.candidates) if train else 1)
        # Prompt and candidates follow.
        policy, limits = self._policy_of[agent], request.limits
        weight = self._weight()
        asked = Decision(agent, turn, policy, [], (), 0, scope, order, train, k, limits, weight)
        running = asyncio.current_task()
        assert running is not None  # coroutines run in tasks
        self._active.add(running)
        try:
            decision = await self._sample_and_commit(asked, request)
            place = self.decisions if scope == self._path else self._nested.setdefault(scope, [])
            self._collect(decision, place)
            place.append(decision)  # after those of its scores
            return decision.candidates[decision.committed]
        except (_NotScored, MessageError):  # nothing was sampled, so the caller may ask otherwise
            raise
        except Exception as failure:
            self.failure = self.failure or failure
            raise
        finally:
            self._active.discard(running)

    def _scope(self) -> str:
        """Returns the scope of the running task: that of `run`, or of the candidate that is being scored in it."""
        team, scope, _ = _SCOPE.get()
        return scope if team is self else self._path

    def _weight(self) -> float:
        """Returns the weight of decisions of the running task."""
        team, _, weight = _SCOPE.get()
        return weight if team is self else 1.0

    def _enter(self, scope: str, weight: float = 1.0) -> None:
        """Sets scope and weight of the decisions of the running task, and of the tasks that it starts."""
        _SCOPE.set((self, scope, weight))

    def _collect(self, decision: Decision, place: list[Decision], when: str = "") -> None:
        """Adds the decisions of a decision's scores to `place`, in an order that no timing changes."""
        for part in (*range(len(decision.candidates)), "all"):
            place += sorted(self._nested.pop(f"{decision.name}.{part}{when}/", []), key=lambda inner: inner.order)

    async def settle(self, reply: Candidate, score: ScoreFunction) -> Candidate:
        """Scores a decision of the team's when more is known than at the decision: all its candidates, not one.

        The rewards take the place of those at the decision, which decided what was committed. A score that depends on
        what followed `reply` must not favour it over the candidates that nothing followed.

        Args:
            reply: what `act` returned.
            score: as in `act`.

        Returns:
            `reply` with its new score.

        Raises:
            EpisodeFailed: a decision of the score failed.
            TypeError: a candidate is left out: its score is none.
            ValueError: `reply` is of no decision of this team, or was settled before.
        """
        if self._closed:
            raise asyncio.CancelledError("the episode has ended")
        try:
            return await self._settle(reply, score)
        except Exception as failure:
            self.failure = self.failure or failure
            raise

    async def _settle(self, reply: Candidate, score: ScoreFunction) -> Candidate:
        places = [self.decisions, *self._nested.values()]
        found = [
            (place, index)
            for place in places
            for index, decision in enumerate(place)
            if decision.candidates[decision.committed] is reply
        ]
        if not found or found[0][0][found[0][1]].name in self._settled:
            raise ValueError("settle: this is no reply of a decision of the team, or it was settled before")
        place, index = found[0]
        decision = place[index]
        self._settled.add(decision.name)
        if not self._scored and len(decision.candidates) == 1:
            return reply

        async def settled(number: int, candidate: Candidate) -> Candidate:
            self._enter(f"{decision.name}.{number}.later/", decision.weight / len(decision.candidates))
            return await self._score(candidate, decision, score)

        numbered = enumerate(decision.candidates)
        scored = lowest_for_errors(await gather_or_cancel([settled(*candidate) for candidate in numbered]))
        place[index] = replace(decision, candidates=tuple(scored))
        self.unsettled[decision.name] = reply
        self._collect(decision, place, ".later")
        return scored[decision.committed]

    async def close(self) -> None:
        """Cancels decisions in flight and refuses new ones."""
        self._closed = True
        tasks = self._active - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_and_commit(self, asked: Decision, request: Request) -> Decision:
        """Returns a decision that has neither prompt nor candidates yet with both."""
        messages = as_messages(request.prompt)
        asked = replace(asked, prompt_ids=self._encode(asked, messages, request.tools))
        replayed = self._replayed.get(f"{asked.agent}.{asked.turn}") if asked.scope == self._path else None
        if replayed is not None and replayed.prompt_ids != asked.prompt_ids:
            raise ReplayError(f"the decision {asked.agent}.{asked.turn} has another prompt")
        single = self._scheme == "evaluate" or (asked.trained and self._scheme == "parallel")
        samples = 1 if single else asked.k
        if not self._scored and samples == 1:
            request = replace(request, score=None, score_all=None)

        async def answer(index: int) -> Candidate:
            if replayed is not None and isinstance(replayed.reply, Generation):
                generation = replayed.reply
            else:
                generation = await self.sample_candidate(asked, index)
            reply = await self._parse(generation, asked, index, request.tools) if request.tools else None
            return Candidate(generation, Score(), 0.0, reply=reply)

        async def sample(index: int) -> Candidate:
            answered = await answer(index)
            # Each candidate is sampled in a task of its own, with a copy of the context variables.
            self._enter(f"{asked.name}.{index}/", asked.weight / len(numbers))
            return await self._score(answered, asked, request.score)

        numbers = range(samples if replayed is None else 1)
        if replayed is not None and isinstance(replayed.reply, Candidate):
            sampled = [replayed.reply]
        elif request.score_all is None:
            sampled = lowest_for_errors(await gather_or_cancel([sample(index) for index in numbers]))
        else:
            answered = await gather_or_cancel([answer(index) for index in numbers])
            (sampled,) = await gather_or_cancel([self._score_all(answered, asked, request.score_all)])
        # The environment is not given a reply that its score could not read, if there is another.
        may = [index for index, one in enumerate(sampled) if one.error is None] or list(range(len(sampled)))
        options = self._options
        # Seeded by decision, not by episode: agents that act concurrently finish in any order.
        rng = random.Random(stable_hash(self._seed, "selection", *_parts(asked)))
        rewards = [sampled[index].reward for index in may]
        committed = may[select(rewards, options.selection, rng, options.softmax_temperature)]
        said = [*asked.prompt_ids, *sampled[committed].generation.token_ids]
        self._dialogues[f"{asked.scope}{asked.agent}"] = messages, said
        return replace(asked, candidates=tuple(sampled), committed=committed)

    async def sample_candidate(self, decision: Decision, index: int) -> Generation:
        """Samples an answer to the prompt of a decision of this team, its candidate `index`.

        Raises EpisodeFailed if sampling failed.
        """
        seed = None if self._seed is None else stable_hash(self._seed, *_parts(decision), index) & 0x7FFFFFFF
        request = f"{self._episode_id}.{decision.name}", decision.prompt_ids, seed
        if decision.limits is None:
            generation = await self._sampler(decision.agent).generate(*request)
        else:
            generation = await self._tool_sampler(decision).generate(*request, decision.limits)
        self.generated_tokens += generation.tokens
        if not generation.tokens:
            where = f"agent {decision.agent!r}, turn {decision.turn}"
            raise EpisodeFailed("empty", f"{where}: the engine returned no tokens")
        return generation

    def _encode(self, asked: Decision, messages: list[Message], tools: Sequence[Tool]) -> list[int]:
        """Returns the token ids of a decision's prompt, and counts whether they continue the agent's last one.

        Raises ToolError if the policy cannot be given the tools.
        """
        policy = self._sampler(asked.agent)
        if not tools:
            prompt_ids = policy.encode(messages)
        else:
            prompt_ids = self._tool_sampler(asked).encode_with_tools(messages, tools)
        before, said = self._dialogues.get(f"{asked.scope}{asked.agent}", ([], []))
        if before and len(messages) > len(before) and messages[: len(before)] == before:
            self.counts.update(dialogue_turns=1, dialogue_turns_broken=int(prompt_ids[: len(said)] != said))
        return prompt_ids

    def _tool_sampler(self, asked: Decision) -> ToolSampler:
        policy = self._sampler(asked.agent)
        if not isinstance(policy, ToolSampler):
            raise ToolError(f"agent {asked.agent!r}: a {type(policy).__name__} knows no tools and limits")
        return policy

    async def _parse(self, generation: Generation, asked: Decision, index: int, tools: Sequence[Tool]) -> Reply:
        reply = await self._tool_sampler(asked).parse(generation, tools)
        self.counts.update(tool_calls_parsed=len(reply.calls), tool_calls_unparsed=reply.unparsed)
        return reply.with_ids(asked.name, index)

    async def _score(self, answered: Candidate, asked: Decision, score: ScoreFunction | None) -> Candidate:
        """Returns a candidate with its score."""
        where = f"agent {asked.agent!r}, turn {asked.turn}"
        try:
            with contained(f"{where}: the score"):
                scored = Score() if score is None else score(_to_score(answered))
                if inspect.isawaitable(scored):
                    scored = await scored
            return self._scored_as(answered, scored, where)
        except (EpisodeFailed, _NoScore):
            raise
        except Exception as error:  # a reply that the environment's author did not think of, or a defect
            if (without := self._without_score(answered, asked, error)) is None:
                raise
            return without

    def _without_score(self, answered: Candidate, asked: Decision, error: Exception) -> Candidate | None:
        """Returns a candidate whose score raised an error; None where nobody counts such errors."""
        if self._scope() in self._unscored:
            return replace(answered, score=Score(), reward=0.0)
        if self._on_score_error is None:
            return None
        self._on_score_error(asked.agent, asked.turn, answered.generation.text, error)
        return replace(answered, score=Score(), reward=0.0, error=error)

    async def _score_all(
        self, answered: Sequence[Candidate], asked: Decision, score_all: GroupScoreFunction
    ) -> list[Candidate]:
        """Scores the candidates of a decision together; what `score_all` raises is raised: no reply is at fault."""
        where = f"agent {asked.agent!r}, turn {asked.turn}"
        self._enter(f"{asked.name}.all/", asked.weight)
        try:
            with contained(f"{where}: score_all"):
                scores = score_all([_to_score(candidate) for candidate in answered])
                if inspect.isawaitable(scores):
                    scores = await scores
        except Exception:
            if self._scope() not in self._unscored:
                raise
            scores = [Score()] * len(answered)
        if not isinstance(scores, Sequence):
            raise _NoScore(f"{where}: score_all gave {scores!r:.80}, not a list of scores")
        if len(scores) != len(answered):
            raise ValueError(f"{where}: score_all gave {len(scores)} scores for {len(answered)} replies")

        def scored(candidate: Candidate, score: Score) -> Candidate:
            try:
                return self._scored_as(candidate, score, where)
            except ValueError as error:
                if (without := self._without_score(candidate, asked, error)) is None:
                    raise
                return without

        return lowest_for_errors(list(map(scored, answered, scores)))

    def _scored_as(self, answered: Candidate, score: Score, where: str) -> Candidate:
        if not isinstance(score, Score):
            raise _NoScore(f"{where}: the score of {answered.text!r:.80} is {score!r:.80}, not a Score")
        reward = score.mixed(self._options.alpha, self._options.local_weight)
        if not math.isfinite(reward):
            raise ValueError(f"{where}: the environment gave a score of {score}, not finite")
        return replace(answered, score=score, reward=reward, error=None)


def _to_score(answered: Candidate) -> str | Reply:
    return answered.text if answered.reply is None else answered.reply


def _parts(of: Decision) -> tuple[object, ...]:
    """Returns what the seeds of a decision derive from beside the episode's seed."""
    return (*((of.scope,) if of.scope else ()), of.agent, of.turn)


def lowest_for_errors(sampled: list[Candidate]) -> list[Candidate]:
    """Returns candidates in which those without a score have the lowest reward of the others, and at most 0.

    Raises the first error if none of several candidates could be scored: not a single reply is at fault.
    """
    errors = [candidate.error for candidate in sampled if candidate.error is not None]
    if len(errors) == len(sampled) > 1:
        raise errors[0]
    lowest = min([0.0, *(candidate.reward for candidate in sampled if candidate.error is None)])
    return [candidate if candidate.error is None else replace(candidate, reward=lowest) for candidate in sampled]


async def gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Like asyncio.gather, but the first error cancels the other awaitables and waits for them.

    Otherwise a failed episode would continue to use the engine.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def episode_seed(seed: int, split: Split, step: int | Literal["val"], index: int, session: int, deal: int = 0) -> int:
    """Returns the seed of an episode's samples.

    Training samples differ between steps. Validation (`step="val"`) always has the same seeds, so that its curve
    shows changes of the policy only.

    Args:
        seed: the run's, `at_grpo.seed`.
        split: the task's split.
        step: the training step.
        index: of the task in its split.
        session: index of the episode among the task's.
        deal: how often the task was submitted before in the same step, which happens when a data set starts again.
    """
    return stable_hash(seed, split, step, index, session, *([deal] if deal else []))


async def play(environment: Environment, task: object, team: Team) -> EpisodeRecord:
    """Plays one episode and returns its outcome with all decisions.

    Raises:
        EpisodeFailed: a decision failed, even if the environment wrapped the exception (as task groups do), or
            caught it.
        OutcomeError: the environment returned no valid outcome.
        Ended: the environment raised what would end the process, such as `SystemExit`.
    """
    try:
        with contained(f"{type(environment).__name__}.run"):
            outcome = await environment.run(task, team)
    except Exception as error:
        if team.failure is None or error is team.failure:
            raise
        raise team.failure from error
    finally:
        await team.close()
    if team.failure is not None:
        raise team.failure
    check_outcome(environment, outcome)
    return EpisodeRecord(team.decisions, outcome)


@dataclass
class ScriptedPolicy:
    """A policy that answers from a script instead of a model, for tests and benchmarks.

    Token ids are Unicode code points, so that decoding is exact.
    """

    script: Callable[[str, int], str]
    """(prompt text, index of the call for this prompt) -> answer."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each prompt text."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the code points of the messages' contents, joined by newlines."""
        return [ord(char) for char in "\n".join(map(text_of, messages))]

    def encode_with_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Returns the same after a line with the names of the tools."""
        return self.encode([{"content": f"tools: {', '.join(tool.name for tool in tools)}"}, *messages])

    async def parse(self, generation: Generation, tools: Sequence[Tool]) -> Reply:
        """Returns the calls of an answer of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
        calls, unparsed = [], 0
        thought, said = generation.parts
        for text in re.findall("<tool_call>(.*?)(?:</tool_call>|$)", said, re.DOTALL):
            try:
                call = json.loads(text)
                calls.append(ToolCall(call["name"], json.dumps(call["arguments"])))
            except (ValueError, KeyError, TypeError, RecursionError):
                unparsed += 1
        text = said.partition("<tool_call>")[0]
        return Reply(text, thought, tuple(calls), unparsed=unparsed, raw=generation.text)

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: Limits | None = None
    ) -> Generation:
        """Returns the script's next answer to this prompt, with log-probs of 0."""
        prompt = "".join(map(chr, prompt_ids))
        whole = self.script(prompt, self.calls[prompt])
        self.calls[prompt] += 1
        text = whole if limits is None else limits.cut(whole[: limits.max_tokens])
        truncated = limits is not None and limits.max_tokens is not None and len(whole) > limits.max_tokens
        return Generation([ord(char) for char in text], [0.0] * len(text), text, truncated)


class ScriptedTeam(Team):
    """A team whose agents answer from scripts: `ScriptedTeam({"planner": lambda prompt, k: "R"})`."""

    def __init__(
        self,
        scripts: Mapping[str, Callable[[str, int], str]],
        *,
        candidates: int = 1,
        alpha: float = 1.0,
        selection: Selection = "greedy",
        scheme: Scheme = "tree",
        seed: int | None = 0,
    ) -> None:
        self.policies = {name: ScriptedPolicy(script) for name, script in scripts.items()}
        super().__init__(
            {name: name for name in scripts},
            self.policies,
            TeamOptions(candidates=candidates, alpha=alpha, selection=selection),
            scheme=scheme,
            seed=seed,
        )
