"""The team that plays an episode: decisions, candidates and their selection.

`await team.<agent>.act(prompt, score)` is a decision: one agent, one turn, one prompt. Its K candidates answer the
same token ids, so they form a comparison group by construction (AT-GRPO, arXiv 2510.11062, Sec. 4.1). The episode
continues with the committed one.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_atgrpo.play.decision import Agent, Ask, GroupScoreFunction, ScoreFunction, lowest_for_errors, select
from verl_atgrpo.play.messages import Message, MessageError, Prompt, Reply, as_messages
from verl_atgrpo.play.quoting import SHARES, sharing
from verl_atgrpo.play.sampler import Sampler, ToolSampler
from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.tools import Tool, ToolError
from verl_atgrpo.play.types import (
    Candidate,
    Decision,
    EpisodeFailed,
    Generation,
    Replayed,
    ReplayError,
    Scheme,
    Score,
    TeamOptions,
)
from verl_atgrpo.play.user_code import contained, gather_or_cancel

if TYPE_CHECKING:
    from verl_atgrpo.play.endpoints import CallScore, Endpoint

_TAKEN = ("all", "counts", "decisions", "failure", "generated_tokens", "unsettled")
"""Attributes of a team that its class does not have, and the word for all agents in a recipe."""
_SCOPE: contextvars.ContextVar[tuple[object, str, float]] = contextvars.ContextVar("scope", default=(None, "", 1.0))
"""The team whose candidate is being scored, and the scope and the weight of decisions that its score makes."""
OnScoreError = Callable[[str, int, str, Exception], None]
"""Agent, turn, reply and what scoring the reply raised."""


class _NoScore(TypeError):
    """An environment returned something else than a score: a defect, whatever the reply was."""


class _NotScored(Exception):
    """A score made a decision in evaluation, where nobody needs its result."""


def end_in_evaluation() -> None:
    """Ends the running score if it is one of evaluation, where nobody needs its result.

    For what a score asks elsewhere; decisions of the team do it themselves.
    """
    team, scope, _ = _SCOPE.get()
    if isinstance(team, Team) and team._scheme == "evaluate":
        team._unscored.add(scope)
        raise _NotScored


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
        # Here, because no other team needs aiohttp.
        from verl_atgrpo.play.endpoints import serve

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

    async def _decide(self, agent: str, ask: Ask) -> Candidate:
        if self._closed:
            raise asyncio.CancelledError("the episode has ended")
        scope = self._scope()
        if scope != self._path:
            end_in_evaluation()
        turn, order = self._started[f"{scope}{agent}"], self._started[scope]
        self._started.update((f"{scope}{agent}", scope))
        options, train = self._options, ask.train
        k = ask.candidates or (options.agent_candidates.get(agent, options.candidates) if train else 1)
        # Prompt and candidates follow.
        policy, limits = self._policy_of[agent], ask.limits
        weight = self._weight()
        asked = Decision(agent, turn, policy, [], (), 0, scope, order, train, k, limits, weight)
        running = asyncio.current_task()
        assert running is not None  # coroutines run in tasks
        self._active.add(running)
        try:
            decision = await self._sample_and_commit(asked, ask)
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

    async def _sample_and_commit(self, asked: Decision, ask: Ask) -> Decision:
        """Returns a decision that has neither prompt nor candidates yet with both."""
        messages = as_messages(ask.prompt)
        asked = replace(asked, prompt_ids=self._encode(asked, messages, ask.tools))
        replayed = self._replayed.get(f"{asked.agent}.{asked.turn}") if asked.scope == self._path else None
        if replayed is not None and replayed.prompt_ids != asked.prompt_ids:
            raise ReplayError(f"the decision {asked.agent}.{asked.turn} has another prompt")
        single = self._scheme == "evaluate" or (asked.trained and self._scheme == "parallel")
        samples = 1 if single else asked.k
        if not self._scored and samples == 1:
            ask = replace(ask, score=None, score_all=None)

        async def answer(index: int) -> Candidate:
            if replayed is not None and isinstance(replayed.reply, Generation):
                generation = replayed.reply
            else:
                generation = await self.sample_candidate(asked, index)
            reply = await self._parse(generation, asked, index, ask.tools) if ask.tools else None
            return Candidate(generation, Score(), 0.0, reply=reply)

        async def sample(index: int) -> Candidate:
            answered = await answer(index)
            # Each candidate is sampled in a task of its own, with a copy of the context variables.
            self._enter(f"{asked.name}.{index}/", asked.weight / len(numbers))
            return await self._score(answered, asked, ask.score)

        numbers = range(samples if replayed is None else 1)
        if replayed is not None and isinstance(replayed.reply, Candidate):
            sampled = [replayed.reply]
        elif ask.score_all is None:
            sampled = lowest_for_errors(await gather_or_cancel([sample(index) for index in numbers]))
        else:
            answered = await gather_or_cancel([answer(index) for index in numbers])
            (sampled,) = await gather_or_cancel([self._score_all(answered, asked, ask.score_all)])
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
