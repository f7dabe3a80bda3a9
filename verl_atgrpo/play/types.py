"""What an episode consists of: scores, candidates, decisions and the outcome.

Nothing here depends on models or training.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Literal, TypeVar

from verl_atgrpo.play.messages import Reply, ToolCall
from verl_atgrpo.play.thoughts import split_thought

Value = TypeVar("Value")
Split = Literal["train", "val"]
Scheme = Literal["tree", "parallel", "evaluate"]
Selection = Literal["greedy", "first", "random"]


class EnvironmentConfigError(ValueError):
    """An environment refuses its options. The message names the key and what is accepted."""


class EpisodeFailed(Exception):
    """A candidate could not be sampled (engine error, time-out, prompt too long) or scored; its episode ends."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Name of the counter: `prompt_too_long`, `timeout`, `engine`, `empty`, or an environment's own."""


class PolicyUnusable(RuntimeError):
    """A policy cannot answer any request: the engine died, or the endpoint refuses all requests."""


class ReplayError(RuntimeError):
    """An episode that is played again with the same replies differs: a defect of the environment."""


def plain_of(value: object) -> object:
    """Returns Python's own value of a single number or bool of numpy, torch and the like, else the value itself."""
    item = None if isinstance(value, numbers.Real) else getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):  # an array of several, or no array at all
        return value


def float_of(value: object, name: str) -> float:
    """Returns a real number, of whatever library, as Python's float: records are JSON.

    Raises ValueError for anything else, and for a number beyond floats.

    Args:
        value: the number; it may be infinite or nan.
        name: its field, for messages.
    """
    plain = plain_of(value)
    if not isinstance(plain, numbers.Real | Decimal):
        raise ValueError(f"{name}={value!r:.200} is no number")
    try:
        return float(plain)
    except (OverflowError, ValueError):  # such as a fraction; a signalling nan
        raise ValueError(f"{name}={value!r:.200} is not a finite number") from None


@dataclass(frozen=True)
class Score:
    """The reward of a candidate in two parts: the team's and the agent's own (paper, Sec. 4.2).

    Raises ValueError for a part that is no number. One that is not finite is refused at the decision: it is the fault
    of a single reply, also with `score_all`.
    """

    team: float = 0.0
    """Effect on the shared goal; must depend on the state and the reply only."""
    local: float = 0.0
    """How well this agent did its own part."""

    def __post_init__(self) -> None:
        for name in ("team", "local"):
            object.__setattr__(self, name, float_of(getattr(self, name), f"Score.{name}"))

    def mixed(self, alpha: float, local_weight: float = 1.0) -> float:
        """Returns r = alpha * team + local_weight * local."""
        return alpha * self.team + local_weight * self.local


_OF_VALIDATION = ("acc", "failed", "reward")
"""Names of metrics that validation has itself."""


class OutcomeError(ValueError):
    """An environment's `run` returned no valid outcome."""


@dataclass(frozen=True)
class Outcome:
    """How an episode ended.

    Raises OutcomeError for a success that is no bool, a number that is not finite, or the name of a metric that
    validation has itself.
    """

    success: bool
    """Whether the task was solved; running out of turns is no success."""
    team_reward: float = 0.0
    """The episode's shared reward: with `scheme: parallel` every row's, unless `episode_reward` says another."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the episode; the logs have their means over episodes."""

    def __post_init__(self) -> None:
        success = plain_of(self.success)
        if not isinstance(success, bool):
            raise OutcomeError(f"Outcome.success={self.success!r:.200} is neither True nor False")
        object.__setattr__(self, "success", success)
        object.__setattr__(self, "team_reward", _finite(self.team_reward, "Outcome.team_reward"))
        metrics = {key: _finite(value, f"Outcome.metrics: {key}") for key, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)
        for key in metrics:
            if not isinstance(key, str) or key in _OF_VALIDATION:
                raise OutcomeError(f"Outcome.metrics: {key!r} is no text, or a metric that validation has itself")


def _finite(value: object, name: str) -> float:
    try:
        found = float_of(value, name)
    except ValueError as error:
        raise OutcomeError(str(error)) from None
    if not math.isfinite(found):
        raise OutcomeError(f"{name}={value!r:.200} is not a finite number")
    return found


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


@dataclass(frozen=True)
class ReplyLimits:
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


@dataclass(frozen=True)
class Candidate:
    """One answer sampled at a decision, with its score."""

    generation: Generation
    score: Score
    reward: float
    """The mixed reward alpha * team + local_weight * local; at a branch, what followed counts."""
    error: Exception | None = None
    """Why it could not be scored; its reward is the lowest of its decision then, and at most 0."""
    reply: Reply | None = None
    """The parsed answer, at a decision with tools."""

    def __str__(self) -> str:
        """Returns its text: a prompt that quotes a candidate must not tell its score."""
        return self.text

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
    """A prompt of (episode, agent, turn) and its candidates: in `tree` and `branch` a group."""

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
    after: int = 0
    """How many decisions of `run`, those of scores included, had ended when it started."""
    trained: bool = True
    """Whether its candidates are rows of the update."""
    k: int = 1
    """The number of its candidates in the scheme `tree`, and at a branch point."""
    limits: ReplyLimits | None = None
    """Where its candidates end early."""
    weight: float = 1.0
    """Of K alternatives that are all played each has 1 / K: a decision made by the scores of K candidates, or after K
    branches. So a sum over decisions is an expectation over episodes, whatever the number of candidates."""

    @property
    def name(self) -> str:
        """Its name in the episode, whatever the order in which decisions finish."""
        return f"{self.scope}{self.agent}.{self.turn}"


def names_of(agent: str) -> tuple[str, ...]:
    """Returns the names under which a recipe may speak of an agent, the narrowest first: `walk.navigator`, `walk`."""
    part = agent.partition(".")[0]
    return (agent,) if part == agent else (agent, part)


def part_of(agent: str) -> str:
    """Returns the part of a mixture that an agent is of; an empty text without a mixture."""
    return agent.rpartition(".")[0]


def for_agent(given: Mapping[str, Value], agent: str, default: Value) -> Value:
    """Returns what a recipe says of an agent, or of the part of a mixture that it is of."""
    return next((given[name] for name in names_of(agent) if name in given), default)


@dataclass(frozen=True)
class TeamOptions:
    """How many candidates are sampled, how their rewards are mixed, and which is selected."""

    candidates: int = 4
    """K, the number of candidates of a decision with the scheme `tree`."""
    agent_candidates: Mapping[str, int] = field(default_factory=dict)
    """Agent, or part of a mixture -> its own K."""
    alpha: float = 1.0
    """Weight of the team part in r = alpha * team + local_weight * local (paper, Eq. 3)."""
    local_weight: float = 1.0
    """Weight of the local part; 1 in the paper."""
    selection: Selection = "greedy"
    """Which candidate is committed; `greedy` takes the largest mixed reward, at ties the lowest index."""


@dataclass(frozen=True)
class Replayed:
    """What a decision is to be answered with when an episode is played again."""

    prompt_ids: list[int]
    """The prompt that it must have."""
    reply: Candidate | Generation
    """A reply that is not scored yet is scored."""


@dataclass(frozen=True)
class PlayMode:
    """How a team plays its episode."""

    scheme: Scheme = "tree"
    """`tree` samples K candidates a decision; `parallel` and `evaluate` sample one."""
    scored: bool = True
    """Whether the score of a single candidate, which selects nothing, is called."""
    path: str = ""
    """The scope of the decisions of `run`, other than "" for a continuation (`branching`)."""
    replayed: Mapping[str, Replayed] = field(default_factory=dict)
    """Decisions of `run` that are not sampled, by `<agent>.<turn>`."""

    def samples(self, decision: Decision) -> int:
        """Returns how many candidates a decision has."""
        single = self.scheme == "evaluate" or (decision.trained and self.scheme == "parallel")
        return 1 if single else decision.k

    def replay(self, decision: Decision) -> Candidate | Generation | None:
        """Returns the reply that takes the place of a decision's candidates, or None if they are to be sampled.

        Raises ReplayError if the decision has another prompt than before.
        """
        place = f"{decision.agent}.{decision.turn}"
        replayed = self.replayed.get(place) if decision.scope == self.path else None
        if replayed is None:
            return None
        if replayed.prompt_ids != decision.prompt_ids:
            raise ReplayError(f"the decision {place} has another prompt")
        return replayed.reply


TREE, EVALUATE = PlayMode(), PlayMode("evaluate")


@dataclass
class EpisodeRecord:
    """An episode's decisions, in the order in which they were made, and its outcome."""

    decisions: list[Decision]
    outcome: Outcome
    opponents: Sequence[str] = ()
    """Agents that played against the others (`Environment.opponents`)."""
