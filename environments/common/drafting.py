"""The workflow of games and planning: one agent drafts with a tool, another sees the draft and decides.

AT-GRPO (arXiv 2510.11062, App. A): the tool user writes a program that prints a solution, or drafts it itself;
the planner sees the draft and where it leads and gives the answer; the game moves; the next turn starts from where
it stands. `SingleAgent` plays the same games without all of that: the paper's baseline.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from verl_atgrpo.environment import Environment, EnvironmentConfigError, Message, Outcome, Score
from verl_atgrpo.environments.common.options import check_choice, check_isolation, check_whole_numbers
from verl_atgrpo.environments.common.replies import extract_python, quoted
from verl_atgrpo.environments.common.workflow import STYLES, Style, once
from verl_atgrpo.sandbox.runner import run_python
from verl_atgrpo.team import Agent, Candidate, Team


class GameState(Protocol):
    """Where an episode of a game stands."""

    @property
    def solved(self) -> bool:
        """Whether the task is solved."""
        ...


State = TypeVar("State", bound=GameState)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Draft(Generic[Answer]):
    """What the tool user's reply came to."""

    text: str
    answer: Answer | None
    """The solution it drafted, or None if there is none in the agreed format."""
    output: str = ""
    """What its program printed."""
    ran: bool = False
    """Its program ran to the end."""


class DraftingGame(Environment, Generic[State, Answer]):
    """A game that a tool user and a planner play together, for up to `max_turns` turns."""

    agents: ClassVar[tuple[str, ...]] = ("tool_user", "planner")
    max_turns: int
    uses_python: bool
    """The tool user writes a program; otherwise it drafts as the planner answers."""
    style: Style

    def set_form(
        self, max_turns: int, tool: str, without_program: str, style: Style, require_isolation: bool = False
    ) -> None:
        """Sets what all such games take: the number of turns, and the form of drafts and prompts.

        Args:
            max_turns: turns of an episode (T).
            tool: the tool user writes a `python` program, or drafts what `without_program` names.
            without_program: the other value that `tool` may have.
            style: `full` prompts explain the task; `compact` ones are for tiny models trained on them.
            require_isolation: refuses machines where programs do not run in namespaces of their own.

        Raises EnvironmentConfigError for a value that does not make sense, or if programs cannot be run so.
        """
        check_whole_numbers(max_turns=(max_turns, 1))
        check_choice("tool", tool, ("python", without_program))
        check_choice("style", style, STYLES)
        if style == "compact" and tool == "python":
            raise EnvironmentConfigError(
                f"at_grpo.environment.style=compact goes with tool: {without_program}, not python"
            )
        if tool == "python":
            check_isolation(require_isolation)
        elif require_isolation:
            raise EnvironmentConfigError(
                f"at_grpo.environment.require_isolation={require_isolation} has no effect with tool: {tool}, "
                "which runs no programs; remove it"
            )
        self.max_turns = max_turns
        self.uses_python = tool == "python"
        self.style = style

    # ------------------------------------------------------------------ the game

    @abstractmethod
    def initial(self, task: Any) -> State:
        """Returns the state before the first turn."""

    def solved(self, state: State) -> bool:
        """Returns whether the task is solved, which ends the episode."""
        return state.solved

    @abstractmethod
    def apply(self, state: State, answer: Answer) -> State:
        """Returns the state after the planner's answer."""

    @abstractmethod
    def outcome(self, state: State, turns: int) -> Outcome:
        """Returns how an episode that stands in `state` after `turns` turns ended."""

    # ------------------------------------------------------------------ replies and scores

    @abstractmethod
    def parse(self, reply: str) -> Answer | None:
        """Returns the answer in a reply, or None if it is not in the agreed format."""

    @abstractmethod
    def parse_printed(self, output: str) -> Answer | None:
        """Returns the answer in what a program printed, or None."""

    @abstractmethod
    def score_answer(self, state: State, answer: Answer | None) -> Score:
        """Scores an answer of the planner, or a draft made without a program."""

    @abstractmethod
    def score_printed(self, state: State, answer: Answer) -> Score:
        """Scores the answer that a program printed."""

    def score_reply(self, state: State, reply: str) -> Score:
        """Scores a reply that gives an answer."""
        return self.score_answer(state, self.parse(reply))

    # ------------------------------------------------------------------ prompts

    @abstractmethod
    def answer_prompt(self, state: State) -> list[Message]:
        """Returns the question to an agent that sees the state and nothing else."""

    @abstractmethod
    def draft_prompt(self, state: State) -> list[Message]:
        """Returns the tool user's question: `answer_prompt`, unless it writes a program."""

    @abstractmethod
    def plan_prompt(self, state: State, draft: Draft[Answer]) -> list[Message]:
        """Returns the planner's question: the state, the draft and where it leads."""

    # ------------------------------------------------------------------ the workflow

    async def run(self, task: object, team: Team) -> Outcome:
        """Plays one episode; success means that the task is solved within the turns."""
        state = self.initial(task)
        turns = 0
        while turns < self.max_turns and not self.solved(state):
            reply = await self.decide(state, team)
            answer = self.parse(reply.text)
            if answer is not None:
                state = self.apply(state, answer)
            turns += 1
        return self.outcome(state, turns)

    async def decide(self, state: State, team: Team) -> Candidate:
        """Returns the reply that is played in a turn: the planner's, who sees the tool user's draft."""
        prompt = self.plan_prompt(state, await self._draft(state, team.tool_user))
        return await team.planner.act(prompt, functools.partial(self.score_reply, state))

    async def _draft(self, state: State, tool_user: Agent) -> Draft[Answer]:
        prompt = self.draft_prompt(state)
        if not self.uses_python:
            reply = await tool_user.act(prompt, functools.partial(self.score_reply, state))
            return Draft(reply.text, self.parse(reply.text))
        run = once(self._run_program)

        async def score(text: str) -> Score:
            draft = await run(text)
            if draft.answer is None:
                # A python block .1, that ran .1; the rest is for what it printed.
                return Score(local=0.1 * (extract_python(text) is not None) + 0.1 * draft.ran)
            return self.score_printed(state, draft.answer)

        reply = await tool_user.act(prompt, score)
        return await run(reply.text)

    async def _run_program(self, text: str) -> Draft[Answer]:
        code = extract_python(text)
        if code is None:
            return Draft(text, None)
        result = await run_python(code)
        answer = self.parse_printed(result.stdout) if result.ok else None
        return Draft(text, answer, result.stdout.strip()[:500], result.ok)


class SingleAgent(DraftingGame[State, Answer]):
    """One agent in the place of the team: it sees the state and answers, turn by turn (the paper's single agent).

    There is one kind of prompt, without a draft, a tool's output or a verdict; turns, answers and scores are the
    team's. Mixed into a game, before it: `class SinglePlanPath(SingleAgent, PlanPath)`.
    """

    agents: ClassVar[tuple[str, ...]] = ("solo",)

    async def decide(self, state: State, team: Team) -> Candidate:
        """Returns the reply that is played in a turn."""
        return await team.solo.act(self.answer_prompt(state), functools.partial(self.score_reply, state))


def told_of(draft: Draft[Answer]) -> str:
    """Returns what a planner is told of a program: the reply with it, and what it printed.

    Quoted, because a line of the tool user's own must not read as the planner's answer.
    """
    return quoted(f"A tool user wrote this:\n{draft.text}\nIt printed:\n{draft.output or '(nothing)'}\n")
