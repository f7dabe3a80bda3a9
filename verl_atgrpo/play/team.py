"""The team that plays an episode: decisions, candidates and their selection.

`await team.<agent>.act(prompt, score)` is a decision: one agent, one turn, one prompt. Its K candidates answer the
same token ids, so they form a comparison group by construction (AT-GRPO, arXiv 2510.11062, Sec. 4.1). The episode
continues with the committed one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_atgrpo.play.decision import Agent, Ask, GroupScoreFunction, ScoreFunction
from verl_atgrpo.play.messages import Message, MessageError, Prompt, Reply, as_messages
from verl_atgrpo.play.quoting import SHARES, sharing
from verl_atgrpo.play.sampler import Sampler
from verl_atgrpo.play.scoring import (
    SCOPE,
    NotNeeded,
    OnScoreError,
    Scope,
    Scorer,
    end_in_evaluation,
    lowest_for_errors,
    select,
)
from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import (
    TREE,
    Candidate,
    Decision,
    EpisodeFailed,
    Generation,
    PlayMode,
    Score,
    TeamOptions,
    for_agent,
)
from verl_atgrpo.play.user_code import cancel, gather_or_cancel

if TYPE_CHECKING:
    from verl_atgrpo.play.endpoints import CallScore, Endpoint

_TAKEN = ("all", "as_acted", "counts", "decisions", "failure", "generated_tokens")
"""Attributes of a team that its class does not have, and the word for all agents in a recipe."""


def check_agents(agents: object) -> None:
    """Raises ValueError unless an environment's `agents` are names for `team.<agent>` and `at_grpo.agents`."""
    if not isinstance(agents, tuple | list) or not agents:
        raise ValueError(f"agents={agents!r:.200}: a tuple of names, such as ('planner',)")
    for place, name in enumerate(agents):
        # A mixture's have the part before the name.
        parts = name.split(".", 1) if isinstance(name, str) else [""]
        if not all(part.isidentifier() and not part.startswith("_") for part in parts):
            raise ValueError(f"agents: {name!r:.200} is no identifier that begins with a letter")
        if hasattr(Team, name) or name in _TAKEN:
            raise ValueError(f"agents: {name!r} is taken: team.{name} is something else; use another name")
        if name in agents[:place]:
            raise ValueError(f"agents: {name!r} is there twice")


class Team:
    """The agents of one episode and their decisions."""

    def __init__(
        self,
        samplers: Mapping[str, Sampler],
        options: TeamOptions,
        mode: PlayMode = TREE,
        *,
        policies: Mapping[str, str] | None = None,
        opponents: Collection[str] = (),
        episode_id: str = "episode",
        seed: int | None = 0,
        on_score_error: OnScoreError | None = None,
    ) -> None:
        """Binds agents to what samples their candidates for one episode.

        Args:
            samplers: agent -> its sampler; agents may share one.
            options: K, alpha, selection.
            mode: how the episode is played.
            policies: agent -> the name of its policy, for records; None for the agents' own names.
            opponents: agents whose decisions are not trained, as with `train=False` (`Environment.opponents`).
            episode_id: unique among the episodes of a step; decision ids derive from it.
            seed: from which the seed of every sample derives; None leaves seeding to the policy.
            on_score_error: called if scoring a reply raises, and may raise to end the episode; if it returns, the
                episode continues, unless the scores of all candidates of the decision raised. None raises at once.

        Raises:
            ValueError: as `check_agents`.
        """
        check_agents(tuple(samplers))
        self._samplers = samplers
        self._policies = {agent: agent for agent in samplers} if policies is None else policies
        self._opponents = opponents
        self._options = options
        self._mode = mode
        self._episode_id = episode_id
        self._seed = seed
        self._scorer = Scorer(options, on_score_error)
        self._run = Scope(mode.path)
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
        self.as_acted: dict[str, Candidate] = {}
        """Name of a settled decision -> the committed candidate as `act` returned it."""
        self.failure: Exception | None = None
        """What a decision raised first. The episode has failed even if the environment catches the exception."""

    def __getattr__(self, name: str) -> Agent:
        agents = self.__dict__.get("_samplers", ())
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

        if self._scope() is not self._run:
            raise RuntimeError(
                "serve() in a score: its requests could not be told from those of the other candidates' scores; "
                "call act, or serve in run"
            )
        if max_turns < 1 or (timeout is not None and not timeout > 0):
            raise ValueError(f"serve: max_turns={max_turns}, timeout={timeout}: both are above 0, or timeout=None")
        if isinstance(agents, str):
            raise ValueError(f"serve: agents={agents!r} is no list: use agents=[{agents!r}]")
        served = list(self._samplers) if agents is None else [self[agent].name for agent in agents]
        return serve(self, served, score, host=host, max_turns=max_turns, timeout=timeout)

    def policy_name(self, agent: str) -> str:
        """Returns the policy of an agent."""
        return self._policies[agent]

    def sampling_of(self, agent: str) -> Mapping[str, Any]:
        """Returns the sampling parameters of an agent in training, as far as they are known; none in evaluation."""
        return {} if self._mode.scheme == "evaluate" else getattr(self._samplers[agent], "sampling_params", {})

    def _fitted(self, agent: str, source: Callable[[], Prompt], tools: Sequence[Tool]) -> Prompt:
        """Returns an agent's prompt with quotes as long as its policy can take (`quoting`), or the shortest."""
        for share in SHARES:
            with sharing(share):
                prompt = source()
            try:
                self._tokens(agent, as_messages(prompt), tools)
            except EpisodeFailed as failed:
                if failed.reason == "prompt_too_long":
                    continue
            except ValueError:  # of a message or a tool; the decision raises it again
                pass
            break
        self.counts["prompts_shortened"] += int(share < 1)
        return prompt

    async def _decide(self, agent: str, ask: Ask) -> Candidate:
        if self._closed:
            raise asyncio.CancelledError("the episode has ended")
        scope = self._scope()
        if scope is not self._run:
            end_in_evaluation()
        turn, order = self._started[f"{scope.name}{agent}"], self._started[scope.name]
        self._started.update((f"{scope.name}{agent}", scope.name))
        options, train = self._options, ask.train and agent not in self._opponents
        k = ask.candidates or (for_agent(options.agent_candidates, agent, options.candidates) if train else 1)
        if ask.train and not train:
            k = 1  # an opponent's best of K would play against single samples
        # Prompt and candidates follow.
        ended, policy = len(self.decisions), self._policies[agent]
        decision = Decision(
            agent, turn, policy, [], (), 0, scope.name, order, ended, train, k, ask.limits, scope.weight
        )
        running = asyncio.current_task()
        assert running is not None  # coroutines run in tasks
        self._active.add(running)
        try:
            decision = await self._sample_and_commit(decision, ask)
            place = self.decisions if scope is self._run else self._nested.setdefault(scope.name, [])
            self._collect(decision, place)
            place.append(decision)  # after those of its scores
            return decision.candidates[decision.committed]
        except (NotNeeded, MessageError):  # nothing was sampled, so the caller may ask otherwise
            raise
        except asyncio.CancelledError:
            self._forget(f"{decision.name}.")
            raise
        except Exception as failure:
            self.failure = self.failure or failure
            raise
        finally:
            self._active.discard(running)

    def _forget(self, beginning: str) -> None:
        """Removes the decisions of scores that were cancelled: there is no candidate that they belong to."""
        for scope in [scope for scope in self._nested if scope.startswith(beginning)]:
            del self._nested[scope]

    def _scope(self) -> Scope:
        """Returns the scope of the running task: `run`, or the score of a candidate."""
        team, scope = SCOPE.get()
        return scope if team is self else self._run

    def _enter(self, name: str, weight: float = 1.0) -> Scope:
        """Makes a score the scope of the running task, and of the tasks that it starts."""
        scope = Scope(name, weight, needed=self._mode.scheme != "evaluate")
        SCOPE.set((self, scope))
        return scope

    def _collect(self, decision: Decision, place: list[Decision], when: str = "") -> None:
        """Adds the decisions of a decision's scores to `place`, in an order that no timing changes."""
        for part in (*range(len(decision.candidates)), "all"):
            place += sorted(self._nested.pop(f"{decision.name}.{part}{when}/", []), key=lambda inner: inner.order)

    async def settle(self, reply: Candidate, score: ScoreFunction) -> Candidate:
        """Scores a decision of the team's when more is known than at the decision: all its candidates, not one.

        The rewards take the place of those at the decision, which decided what was committed. A score that depends on
        what followed `reply`, which `act` returned, must not favour it over the candidates that nothing followed.
        Returns `reply` with its new score.

        Raises:
            EpisodeFailed: a decision of the score failed.
            TypeError: a candidate is left out: its score is none.
            ValueError: `reply` is of no decision of this team, or was settled before.
        """
        if self._closed:
            raise asyncio.CancelledError("the episode has ended")
        try:
            return await self._settle(reply, score)
        except asyncio.CancelledError:
            for decision in self.decisions:
                if decision.candidates[decision.committed] is reply:
                    self._forget(f"{decision.name}.")
            raise
        except Exception as failure:
            self.failure = self.failure or failure
            raise

    async def _settle(self, reply: Candidate, score: ScoreFunction) -> Candidate:
        found = [
            (place, index)
            for place in (self.decisions, *self._nested.values())
            for index, one in enumerate(place)
            if one.candidates[one.committed] is reply and one.name not in self._settled
        ]
        if not found:
            raise ValueError("settle: this is no reply of a decision of the team, or it was settled before")
        place, index = found[0]
        decision = place[index]
        self._settled.add(decision.name)
        if not self._mode.scored and len(decision.candidates) == 1:
            return reply

        async def settled(number: int, candidate: Candidate) -> Candidate:
            scope = self._enter(f"{decision.name}.{number}.later/", decision.weight / len(decision.candidates))
            return await self._scorer.one(candidate, decision, score, scope)

        numbered = enumerate(decision.candidates)
        scored = lowest_for_errors(await gather_or_cancel([settled(*candidate) for candidate in numbered]))
        place[index] = replace(decision, candidates=tuple(scored))
        self.as_acted[decision.name] = reply
        self._collect(decision, place, ".later")
        return scored[decision.committed]

    @property
    def left_over(self) -> list[str]:
        """The names of decisions that ended after the score that had begun them."""
        return [one.name for decisions in self._nested.values() for one in decisions]

    async def close(self) -> None:
        """Cancels decisions in flight and refuses new ones."""
        self._closed = True
        await cancel(self._active - {asyncio.current_task()})

    async def _sample_and_commit(self, decision: Decision, ask: Ask) -> Decision:
        """Returns a decision that has neither prompt nor candidates yet with both."""
        messages = as_messages(ask.prompt)
        decision = replace(decision, prompt_ids=self._tokens(decision.agent, messages, ask.tools))
        before, tokens = self._dialogues.get(f"{decision.scope}{decision.agent}", ([], []))
        if before and len(messages) > len(before) and messages[: len(before)] == before:
            self.counts.update(
                dialogue_turns=1, dialogue_turns_broken=int(decision.prompt_ids[: len(tokens)] != tokens)
            )
        sampled = await self._candidates(decision, ask, self._mode.replay(decision))
        # The environment is not given a reply that its score could not read, if there is another.
        choices = [index for index, one in enumerate(sampled) if one.error is None] or list(range(len(sampled)))
        options = self._options
        # Seeded by decision, not by episode: agents that act concurrently finish in any order.
        rng = random.Random(stable_hash(self._seed, "selection", *_parts(decision)))
        rewards = [sampled[index].reward for index in choices]
        committed = choices[select(rewards, options.selection, rng)]
        tokens = [*decision.prompt_ids, *sampled[committed].generation.token_ids]
        self._dialogues[f"{decision.scope}{decision.agent}"] = messages, tokens
        return replace(decision, candidates=tuple(sampled), committed=committed)

    async def _candidates(
        self, decision: Decision, ask: Ask, replay: Candidate | Generation | None
    ) -> list[Candidate]:
        """Samples and scores the candidates of a decision, or those of them that are not replayed."""
        if isinstance(replay, Candidate):
            return [replay]
        number = self._mode.samples(decision) if replay is None else 1
        if not self._mode.scored and number == 1:
            ask = replace(ask, score=None, score_all=None)

        async def answer(index: int) -> Candidate:
            generation = await self.sample_candidate(decision, index) if replay is None else replay
            reply = await self._parse(generation, decision, index, ask.tools) if ask.tools else None
            return Candidate(generation, Score(), 0.0, reply=reply)

        # Scores have tasks of their own, each with a copy of the context variables.
        async def sample(index: int) -> Candidate:
            candidate = await answer(index)
            scope = self._enter(f"{decision.name}.{index}/", decision.weight / number)
            return await self._scorer.one(candidate, decision, ask.score, scope)

        async def score_all(candidates: Sequence[Candidate], score: GroupScoreFunction) -> list[Candidate]:
            return await self._scorer.group(
                candidates, decision, score, self._enter(f"{decision.name}.all/", decision.weight)
            )

        if ask.score_all is None:
            return lowest_for_errors(await gather_or_cancel([sample(index) for index in range(number)]))
        candidates = await gather_or_cancel([answer(index) for index in range(number)])
        (scored,) = await gather_or_cancel([score_all(candidates, ask.score_all)])
        return lowest_for_errors(scored)

    async def sample_candidate(self, decision: Decision, index: int) -> Generation:
        """Samples an answer to the prompt of a decision of this team, its candidate `index`.

        Raises EpisodeFailed if sampling failed.
        """
        seed = None if self._seed is None else stable_hash(self._seed, *_parts(decision), index) & 0x7FFFFFFF
        generate = self._samplers[decision.agent].generate
        request = f"{self._episode_id}.{decision.name}", decision.prompt_ids, seed
        generation = await (generate(*request) if decision.limits is None else generate(*request, decision.limits))
        self.generated_tokens += generation.tokens
        if not generation.tokens:
            where = f"agent {decision.agent!r}, turn {decision.turn}"
            raise EpisodeFailed("empty", f"{where}: the engine returned no tokens")
        return generation

    def _tokens(self, agent: str, messages: list[Message], tools: Sequence[Tool]) -> list[int]:
        encode = self._samplers[agent].encode
        return encode(messages, tools) if tools else encode(messages)

    async def _parse(self, generation: Generation, decision: Decision, index: int, tools: Sequence[Tool]) -> Reply:
        reply = await self._samplers[decision.agent].parse(generation, tools)
        self.counts.update(tool_calls_parsed=len(reply.calls), tool_calls_unparsed=reply.unparsed)
        return reply.with_ids(decision.name, index)


def _parts(of: Decision) -> tuple[object, ...]:
    """Returns what the seeds of a decision derive from beside the episode's seed."""
    return (*((of.scope,) if of.scope else ()), of.agent, of.turn)
