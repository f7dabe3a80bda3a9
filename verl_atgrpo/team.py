"""The team an environment talks to: decision points, candidates, selection.

`await team.<agent>.act(prompt, score)` is a decision point: one agent, one turn, one prompt. The K
candidates sampled there answer the same token ids, so they form one comparison group by construction
(AT-GRPO, arXiv 2510.11062, Sec. 4.1), and the committed one is what the rest of the episode sees.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from verl_atgrpo.environment import Environment, Message, Outcome, Score, Split, stable_hash

Prompt = str | Sequence[Message]
ScoreFunction = Callable[[str], Score | Awaitable[Score]]
Scheme = Literal["tree", "parallel", "evaluate"]
Selection = Literal["greedy", "first", "random", "softmax"]
SELECTIONS: tuple[Selection, ...] = ("greedy", "first", "random", "softmax")


class EpisodeFailed(Exception):
    """A candidate could not be had (engine error, time-out, over-long prompt), or judged, so its episode ends."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """One word for the counters: `prompt_too_long`, `timeout`, `engine` or `empty`; or an environment's own."""


@dataclass(frozen=True)
class Generation:
    """What a policy answered to one prompt."""

    token_ids: list[int]
    log_probs: list[float]
    """Log-probability of each sampled token, as the server computed it; one per token id."""
    text: str
    truncated: bool = False
    """True if the answer ran into the length limit."""
    weights_version: tuple[int, int] = (0, 0)
    """First and last version of the weights that produced tokens of this answer."""
    resumed: int = 0
    """How often the server ended the answer early and it was gone on with."""
    cached_tokens: int = 0
    """Tokens of the prompt that the server had in its prefix cache."""
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the answer as a server counted them that shows its users no ids; the ids here and
    those of the prompt are then stand-ins."""

    @property
    def tokens(self) -> int:
        """The number of tokens generated."""
        return len(self.token_ids) if self.usage is None else self.usage[1]


class Sampler(Protocol):
    """What a team samples candidates from; implemented over verl's servers, local models and scripts."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Applies the chat template once and returns the prompt's token ids.

        Raises EpisodeFailed if the prompt is longer than the policy accepts.
        """
        ...

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        """Samples one answer; `decision_id` is shared by candidates so that they share a prefix cache.

        Raises EpisodeFailed if no answer could be had.
        """
        ...


@dataclass(frozen=True)
class Candidate:
    """One answer sampled at a decision point, with its score."""

    generation: Generation
    score: Score
    reward: float
    """The mixed reward alpha * team + local_weight * local."""

    @property
    def text(self) -> str:
        """The decoded answer."""
        return self.generation.text


@dataclass(frozen=True)
class Decision:
    """One comparison group: the K candidates of (episode, agent, turn)."""

    agent: str
    turn: int
    """Counts this agent's decisions in the episode, from 0."""
    policy: str
    prompt_ids: list[int]
    candidates: tuple[Candidate, ...]
    committed: int
    """Index of the candidate that the episode went on with."""


@dataclass(frozen=True)
class TeamOptions:
    """How candidates are sampled, mixed and selected; one instance serves every episode of a run."""

    candidates: int = 4
    """K, the number of candidates at every decision of the tree scheme."""
    alpha: float = 1.0
    """Weight of the team part in r = alpha * team + local_weight * local (paper, Eq. 3)."""
    local_weight: float = 1.0
    """Weight of the local part; the paper's is 1."""
    selection: Selection = "greedy"
    """Which candidate is committed; greedy takes the best mixed reward, ties to the lowest index."""
    softmax_temperature: float = 1.0
    """Temperature of `selection: softmax`, in units of reward."""


@dataclass
class EpisodeRecord:
    """Everything that is kept of an episode: its outcome and the decisions on the way."""

    decisions: list[Decision]
    outcome: Outcome


def as_messages(prompt: Prompt) -> list[Message]:
    """Returns `prompt` as chat messages: a plain text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def select(rewards: Sequence[float], selection: Selection, rng: random.Random, temperature: float = 1.0) -> int:
    """Returns the index of the candidate to commit among those with these mixed `rewards`."""
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
    """One member of the team, seen from the environment."""

    _team: Team = field(repr=False)
    name: str

    async def act(self, prompt: Prompt, score: ScoreFunction | None = None) -> Candidate:
        """Samples this agent's candidates for `prompt`, scores them and returns the committed one.

        Args:
            prompt: a text or chat messages; the same for every candidate.
            score: reply -> Score, sync or async; it must not change the state. None scores 0.

        Raises:
            EpisodeFailed: a candidate could not be had; the environment lets it pass.
        """
        return await self._team._decide(self.name, prompt, score)


class Team:
    """The agents of one episode and the record of what they decided."""

    def __init__(
        self,
        agents: Mapping[str, str],
        policies: Mapping[str, Sampler],
        options: TeamOptions,
        *,
        scheme: Scheme = "tree",
        episode_id: str = "episode",
        seed: int | None = 0,
    ) -> None:
        """Binds agents to policies for one episode.

        Args:
            agents: agent name -> policy name.
            policies: policy name -> policy.
            options: K, alpha, selection.
            scheme: `tree` samples K candidates a decision; `parallel` and `evaluate` sample one.
            episode_id: unique among the episodes of a step; decision ids derive from it.
            seed: every sample of the episode derives from it; None leaves sampling to the policy.

        Raises:
            ValueError: an agent's name is no identifier or is an attribute of every team.
        """
        for name in agents:
            if not name.isidentifier() or hasattr(Team, name) or name in ("decisions", "failure", "generated_tokens"):
                raise ValueError(f"agent name {name!r}: use an identifier other than the attributes of Team")
        self._policy_of = dict(agents)
        self._policies = policies
        self._options = options
        self._samples = options.candidates if scheme == "tree" else 1
        self._episode_id = episode_id
        self._seed = seed
        self._turns = dict.fromkeys(agents, 0)
        self._closed = False
        self._active: set[asyncio.Task[object]] = set()
        self.decisions: list[Decision] = []
        self.generated_tokens = 0
        self.failure: EpisodeFailed | None = None
        """The first candidate that could not be had: the episode has failed, whatever becomes of it."""

    def __getattr__(self, name: str) -> Agent:
        agents = self.__dict__.get("_policy_of", ())
        if name not in agents:
            raise AttributeError(f"the team has no agent {name!r}; its agents are {', '.join(agents)}")
        # Not kept: a team in a reference cycle, and all its tokens with it, would wait for the garbage collector.
        return Agent(self, name)

    def __getitem__(self, name: str) -> Agent:
        return self.__getattr__(name)

    async def _decide(self, agent: str, prompt: Prompt, score: ScoreFunction | None) -> Candidate:
        if self._closed:
            raise asyncio.CancelledError("the episode has ended")
        running = asyncio.current_task()
        assert running is not None  # a coroutine that runs is run by a task
        self._active.add(running)
        try:
            return await self._sample_and_commit(agent, prompt, score)
        except EpisodeFailed as failure:
            self.failure = self.failure or failure
            raise
        finally:
            self._active.discard(running)

    async def close(self) -> None:
        """Ends decisions still in flight and refuses new ones: the episode is over, or has failed."""
        self._closed = True
        tasks = self._active - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_and_commit(self, agent: str, prompt: Prompt, score: ScoreFunction | None) -> Candidate:
        turn = self._turns[agent]
        self._turns[agent] = turn + 1
        policy_name = self._policy_of[agent]
        policy = self._policies[policy_name]
        prompt_ids = policy.encode(as_messages(prompt))
        decision_id = f"{self._episode_id}.{agent}.{turn}"
        sampled = await _gather(
            [
                self._sample(policy, decision_id, prompt_ids, score, agent, turn, index)
                for index in range(self._samples)
            ]
        )
        rewards = [candidate.reward for candidate in sampled]
        options = self._options
        # By decision, not by episode: agents that act at once finish in any order.
        rng = random.Random(stable_hash(self._seed, "selection", agent, turn))
        committed = select(rewards, options.selection, rng, options.softmax_temperature)
        self.decisions.append(Decision(agent, turn, policy_name, prompt_ids, tuple(sampled), committed))
        return sampled[committed]

    async def _sample(
        self,
        policy: Sampler,
        decision_id: str,
        prompt_ids: list[int],
        score: ScoreFunction | None,
        agent: str,
        turn: int,
        index: int,
    ) -> Candidate:
        seed = None if self._seed is None else stable_hash(self._seed, agent, turn, index) & 0x7FFFFFFF
        generation = await policy.generate(decision_id, prompt_ids, seed)
        self.generated_tokens += generation.tokens
        if not generation.tokens:
            raise EpisodeFailed("empty", f"agent {agent!r}, turn {turn}: the engine returned no tokens")
        scored = Score() if score is None else score(generation.text)
        if inspect.isawaitable(scored):
            scored = await scored
        reward = scored.mixed(self._options.alpha, self._options.local_weight)
        if not math.isfinite(reward):
            raise ValueError(f"agent {agent!r}, turn {turn}: the environment gave a score of {scored}, not finite")
        return Candidate(generation, scored, reward)


async def _gather(awaitables: Sequence[Awaitable[Candidate]]) -> list[Candidate]:
    """Like asyncio.gather, but the first error cancels the siblings and waits for them to end.

    A failed episode must not go on using the engine for candidates that nobody will train on.
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

    Training samples differ from step to step; validation (`step="val"`) repeats the same ones, so that its curve shows
    the policy and not the dice.

    Args:
        seed: the run's, `at_grpo.seed`.
        split: where the task is from.
        step: the training step.
        index: of the task in its split.
        session: which of the task's episodes.
        deal: how often the task was dealt before in the same step, which happens where a data set begins anew.
    """
    return stable_hash(seed, split, step, index, session, *([deal] if deal else []))


async def play(environment: Environment, task: object, team: Team) -> EpisodeRecord:
    """Runs one episode and returns its outcome with every decision taken.

    Raises EpisodeFailed if a candidate could not be had, whatever the environment made of that: a task
    group wraps the exception into another, a careless handler drops it, and the episode has failed still.
    """
    try:
        outcome = await environment.run(task, team)
    except Exception as error:
        if team.failure is None or error is team.failure:
            raise
        raise team.failure from error
    finally:
        await team.close()
    if team.failure is not None:
        raise team.failure
    return EpisodeRecord(team.decisions, outcome)


@dataclass
class ScriptedPolicy:
    """A policy that answers from a script: for tests, docs and benchmarks, without any model.

    Token ids are the answer's unicode code points, so that decoding is exact.
    """

    script: Callable[[str, int], str]
    """(prompt text, index of the call for this prompt) -> answer."""
    calls: Counter[str] = field(default_factory=Counter)
    """How often each prompt text was asked."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the code points of the messages' contents, joined by newlines."""
        return [ord(char) for char in "\n".join(message["content"] for message in messages)]

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        """Returns the script's next answer to this prompt, with log-probabilities of 0."""
        prompt = "".join(map(chr, prompt_ids))
        text = self.script(prompt, self.calls[prompt])
        self.calls[prompt] += 1
        return Generation([ord(char) for char in text], [0.0] * len(text), text)


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
