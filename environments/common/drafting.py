"""The workflow of games: a tool user drafts an answer, a planner sees the draft and decides.

AT-GRPO (arXiv 2510.11062, App. A): the tool user writes a program that prints an answer, or drafts one itself; the
planner sees the draft and its effect and answers; the answer is applied, and the next turn starts from the new state.
`SingleAgent` is the paper's baseline on the same games.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from verl_atgrpo import Agent, Candidate, Environment, Message, Outcome, Score, Team
from verl_atgrpo.environments.common.options import check_isolation, option_error
from verl_atgrpo.environments.common.replies import extract_python
from verl_atgrpo.environments.common.running import runnable
from verl_atgrpo.environments.common.workflow import Style, chat, once
from verl_atgrpo.play.quoting import READ, quoted, shortened
from verl_atgrpo.sandbox.runner import Limits, run_python

_LIMITS = Limits(wall_seconds=10.0)
"""Of two seconds of CPU time: a score must not depend on what else the machine does."""


class GameState(Protocol):
    """State of a game in an episode."""

    @property
    def solved(self) -> bool:
        """Whether the task is solved, which ends the episode."""


State = TypeVar("State", bound=GameState)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Draft(Generic[Answer]):
    """The tool user's reply, as parsed and run."""

    text: str
    answer: Answer | None
    """The drafted answer, or None if it is not in the agreed format."""
    output: str = ""
    """Output of its program."""
    ran: bool = False
    """Whether its program ended without error."""


class DraftingGame(Environment, Generic[State, Answer]):
    """A game that a tool user and a planner play together, for up to `max_turns` turns."""

    agents: ClassVar[tuple[str, ...]] = ("tool_user", "planner")
    max_turns: int
    tool: str
    """`python` if the tool user writes a program; otherwise it drafts an answer in the planner's format."""
    style: Style
    require_isolation: bool
    rules: str
    """System message of `full` prompts."""
    program_instruction: str
    examples: Sequence[Message] = ()
    """Messages of `full` prompts between the rules and the question."""

    def check_form(self, without_program: str) -> None:
        """Raises EnvironmentConfigError for options that do not go together, or if programs cannot be run as required.

        Args:
            without_program: value of `tool` if the tool user drafts an answer itself.
        """
        if self.style == "compact" and self.uses_python:
            raise option_error(f"style=compact goes with tool: {without_program}, not python")
        if self.uses_python:
            check_isolation(self.require_isolation)
        elif self.require_isolation:
            raise option_error(
                f"require_isolation={self.require_isolation} has no effect with tool: {self.tool}, which runs no "
                "programs; remove it"
            )

    @property
    def uses_python(self) -> bool:
        """Whether the tool user writes a program."""
        return self.tool == "python"

    # ------------------------------------------------------------------ the game

    @abstractmethod
    def initial(self, task: Any) -> State:
        """Returns the state before the first turn."""

    @abstractmethod
    def apply(self, state: State, answer: Answer) -> State:
        """Returns the state after the planner's answer."""

    @abstractmethod
    def outcome(self, state: State, turns: int) -> Outcome:
        """Returns the outcome of an episode that ends in `state` after `turns` turns."""

    # ------------------------------------------------------------------ replies and scores

    @abstractmethod
    def parse(self, reply: str) -> Answer | None:
        """Returns the answer in a reply, or None if it is not in the agreed format."""

    @abstractmethod
    def parse_printed(self, output: str) -> Answer | None:
        """Returns the answer in a program's output, or None."""

    @abstractmethod
    def score_answer(self, state: State, answer: Answer) -> Score:
        """Scores an answer of the planner, or a draft that was written without a program."""

    @abstractmethod
    def score_printed(self, state: State, answer: Answer) -> Score:
        """Scores the answer that a program printed."""

    def score_reply(self, state: State, reply: str) -> Score:
        """Scores a reply that should contain an answer; one without an answer earns nothing."""
        answer = self.parse(reply)
        return Score() if answer is None else self.score_answer(state, answer)

    # ------------------------------------------------------------------ prompts

    @abstractmethod
    def shown(self, state: State) -> str:
        """Returns the state as prompts of this style show it; with `compact` it follows the agent's task at once."""

    @abstractmethod
    def effect(self, state: State, draft: Answer | None) -> str:
        """Returns a draft and its effect as the planner's prompt of this style shows them."""

    @abstractmethod
    def ask(self, draft: Answer | None = None) -> str:
        """Returns the instruction to answer, for `full` prompts: without a draft, or after one."""

    def answer_prompt(self, state: State) -> list[Message]:
        """Returns the prompt that shows the state and nothing else."""
        if self.style == "compact":
            return chat(f"draft{self.shown(state)}")
        return self._dialogue(f"{self.shown(state)}\n{self.ask()}")

    def draft_prompt(self, state: State) -> list[Message]:
        """Returns the tool user's prompt: `answer_prompt`, unless it writes a program."""
        if not self.uses_python:
            return self.answer_prompt(state)
        return self._dialogue(f"{self.shown(state)}\n{self.program_instruction}")

    def plan_prompt(self, state: State, draft: Draft[Answer]) -> list[Message]:
        """Returns the planner's prompt: the state, the draft and its effect."""
        effect = self.effect(state, draft.answer)
        if self.style == "compact":
            return chat(f"plan{self.shown(state)}\n{effect}")
        program = ""
        if self.uses_python:  # quoted, so that no line of the tool user parses as the planner's answer
            printed = draft.output or "(nothing)"
            wrote = f"A tool user wrote this:\n{shortened(draft.text, READ)}\nIt printed:\n{printed}"
            program = f"{quoted(wrote, 2 * READ)}\n"
        return self._dialogue(f"{self.shown(state)}\n{program}{effect}\n{self.ask(draft.answer)}")

    def _dialogue(self, question: str) -> list[Message]:
        return [{"role": "system", "content": self.rules}, *self.examples, *chat(question)]

    # ------------------------------------------------------------------ the workflow

    async def run(self, task: object, team: Team) -> Outcome:
        """Plays one episode; success means that the task is solved within the turns."""
        state = self.initial(task)
        turns = 0
        while turns < self.max_turns and not state.solved:
            reply = await self.decide(state, team)
            answer = self.parse(reply.text)
            if answer is not None:
                state = self.apply(state, answer)
            turns += 1
        return self.outcome(state, turns)

    async def decide(self, state: State, team: Team) -> Candidate:
        """Returns the reply that is played in a turn: the planner's, after the tool user's draft."""
        prompt = functools.partial(self.plan_prompt, state, await self._draft(state, team.tool_user))
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
                # A python block .1, that ran .1; the rest is for its output.
                return Score(local=0.1 * (extract_python(text) is not None) + 0.1 * draft.ran)
            return self.score_printed(state, draft.answer)

        reply = await tool_user.act(prompt, score)
        return await run(reply.text)

    async def _run_program(self, text: str) -> Draft[Answer]:
        code = extract_python(text)
        if code is None:
            return Draft(text, None)
        result = await run_python(runnable(code), limits=_LIMITS)
        answer = self.parse_printed(result.stdout) if result.ok else None
        return Draft(text, answer, result.printed.strip()[:500], result.ok)


class SingleAgent(DraftingGame[State, Answer]):
    """One agent instead of the team: it sees the state and answers, turn by turn (the paper's single agent).

    Its prompts show no draft, tool output or verdict; turns, answers and scores are the team's. A mixin that comes
    before the game: `class SinglePlanPath(SingleAgent, PlanPath)`.
    """

    agents: ClassVar[tuple[str, ...]] = ("solo",)

    async def decide(self, state: State, team: Team) -> Candidate:
        """Returns the reply that is played in a turn."""
        return await team.solo.act(self.answer_prompt(state), functools.partial(self.score_reply, state))
