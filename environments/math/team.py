"""Mathematics: a tool user and a reasoner answer in parallel until they agree; an ensemble with a judge; a debate.

Workflow and rewards of the first follow AT-GRPO (arXiv 2510.11062, App. A). Problems come from data sets; `answers`
compares.
"""

from __future__ import annotations

import asyncio
import logging
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from verl_atgrpo import Agent, EpisodeFailed, Message, Outcome, Score, Team
from verl_atgrpo.environments.common.options import (
    Players,
    Turns,
    check_installed,
    check_isolation,
    check_libraries,
    option_error,
    with_options,
)
from verl_atgrpo.environments.common.records import DataSetEnvironment, read_records
from verl_atgrpo.environments.common.replies import extract_python
from verl_atgrpo.environments.common.running import runnable
from verl_atgrpo.environments.common.workflow import chat, once
from verl_atgrpo.environments.math.answers import (
    agree,
    correct,
    majority,
    parse_answer,
    parse_gold,
    parse_printed,
    verifiable,
)
from verl_atgrpo.play.decision import PromptSource
from verl_atgrpo.play.environment import RowDefect
from verl_atgrpo.play.quoting import quoted, shortened
from verl_atgrpo.sandbox.runner import Limits, run_python

logger = logging.getLogger(__name__)

_TRIED = 20
"""Answers at the start of a data set of which at least one must be verifiable; otherwise the column is wrong."""
ASK_REASONING = r"Reason step by step. End with the final answer in \boxed{}, and nothing but the answer in it."
LIMITS = Limits(cpu_seconds=5, wall_seconds=30.0, memory_mb=1024)
"""Limits of a program that can import sympy and numpy, whose import takes .6 s of CPU time (docs/sandbox.md)."""


def ask_program(libraries: Sequence[str]) -> str:
    """Returns the instruction to write a program, which can import `libraries`."""
    packages = ["the standard library", *libraries]
    listed = f"{', '.join(packages[:-1])} and {packages[-1]}" if libraries else packages[0]
    return (
        f"Write one ```python block. The program has {listed} alone and must print the final answer as its "
        "last line, with nothing else in that line. Several answers are separated by commas."
    )


@dataclass(frozen=True)
class MathTask:
    """A problem and its answer, tidied like answers in replies."""

    question: str
    answer: str

    async def solved_by(self, answer: str | None) -> bool:
        """Returns whether a tidied answer is right (`answers.correct`)."""
        return await correct(self.question, self.answer, answer)


@dataclass(frozen=True)
class Attempt:
    """A reply, as parsed and run."""

    text: str
    answer: str | None
    """The tidied answer, or None if it is not in the agreed format."""
    printed: str | None = None
    """Output of its program; None if the agent writes none."""
    ran: bool = False
    """Whether its program ended without error."""

    def quote(self, speaker: str) -> str:
        """Returns the attempt as quoted in prompts."""
        printed = "" if self.printed is None else f"\nThe program printed:\n{self.printed or '(nothing)'}"
        return f"{speaker}:\n{quoted(shortened(self.text) + printed)}"


@with_options
class MathEnvironment(DataSetEnvironment[MathTask]):
    """Problems from data sets, answered in words; subclasses define workflows.

    Refused if math-verify is missing, or a section is unreadable or has no verifiable answer.
    """

    train: object = None
    """Training problems (columns: question, answer)."""
    val: object = None
    """Validation problems."""

    def __post_init__(self) -> None:
        check_installed("math_verify", "math-verify, which checks answers,", "math")
        self.read_tasks(lambda split, section, where: _read_tasks(section, where))

    def fingerprint(self, task: MathTask) -> str:
        """Returns the problem's text without case, blanks, punctuation and LaTeX layout."""
        text = unicodedata.normalize("NFKC", task.question).casefold()
        text = re.sub(r"\\(?:left|right|displaystyle|q?quad)(?![a-z])|\\[,;:!()\[\] ]|[{}$~\\]", " ", text)
        text = re.sub(r"\b[dt]frac\b", "frac", text)
        # Blanks and commas between two numbers are kept, as commas; operators are kept.
        text = re.sub(r"(?<=\d)[\s,]+(?=\d)", ",", text)
        return re.sub(r"(?<!\d)[.,]|[.,](?!\d)|[^\w.,+\-*/=<>^|!%()\[\]]", "", text)

    def dedup_text(self, task: MathTask) -> str:
        """Returns the problem's text."""
        return task.question

    async def row_defect(self, task: MathTask) -> RowDefect | None:
        """Returns what is wrong with a problem's answer."""
        if not await asyncio.to_thread(verifiable, task.answer):
            return "its answer cannot be verified"
        own = parse_answer(rf"\boxed{{{task.answer}}}")
        return None if await task.solved_by(own) else "its own solution fails"

    # ------------------------------------------------------------------ answering and scores

    async def check(self, task: MathTask) -> None:
        """Raises EpisodeFailed if the problem's answer cannot be verified; every workflow calls this first.

        Not checked at the start, because verifying a large data set takes minutes in every process.
        """
        if not await asyncio.to_thread(verifiable, task.answer):
            raise EpisodeFailed("gold", f"the data set's answer {task.answer!r} cannot be verified")

    async def reason(
        self, agent: Agent, task: MathTask, prompt: PromptSource, train: bool = True, candidates: int | None = None
    ) -> Attempt:
        """Prompts an agent to answer in words: format .2, correct .8; team part: 1 if correct.

        `train` and `candidates` are those of `Agent.act`.
        """

        async def score(reply: str) -> Score:
            answer = parse_answer(reply)
            correct = await task.solved_by(answer)
            return Score(team=float(correct), local=0.2 * (answer is not None) + 0.8 * correct)

        reply = await agent.act(prompt, score, train=train, candidates=candidates)
        return Attempt(reply.text, parse_answer(reply.text))

    async def outcome(self, task: MathTask, answer: str | None, turns: int = 1, **metrics: float) -> Outcome:
        """Returns the outcome of an episode with this answer: 1 if correct, else 0 (paper, math)."""
        correct = await task.solved_by(answer)
        return Outcome(correct, float(correct), {"turns": float(turns), **metrics})


@with_options
class MathPrograms(MathEnvironment):
    """Problems that some agents answer by a program.

    Refused if programs cannot be run as required, or cannot import a library.
    """

    require_isolation: bool = False
    """Refuses machines below level `namespaces` (docs/sandbox.md)."""
    libraries: Sequence[str] | None = None
    """Packages that programs can import besides the standard library; by default sympy and numpy, if installed."""

    def __post_init__(self) -> None:
        check_isolation(self.require_isolation)
        super().__post_init__()
        self.packages = check_libraries(self.libraries, LIMITS)

    async def compute(self, agent: Agent, task: MathTask, prompt: PromptSource) -> Attempt:
        """Prompts an agent to answer by a program: a block .1, that ran .1, correct .8; team part: 1 if correct."""
        run = once(self._run_program)

        async def score(reply: str) -> Score:
            attempt = await run(reply)
            correct = await task.solved_by(attempt.answer)
            block = extract_python(reply) is not None
            return Score(team=float(correct), local=0.1 * block + 0.1 * attempt.ran + 0.8 * correct)

        reply = await agent.act(prompt, score)
        return await run(reply.text)

    async def _run_program(self, reply: str) -> Attempt:
        code = extract_python(reply)
        if code is None:
            return Attempt(reply, None, "")
        limits = LIMITS if self.packages else Limits()
        result = await run_python(runnable(code), limits=limits, libraries=self.packages)
        answer = parse_printed(result.stdout) if result.ok else None
        return Attempt(reply, answer, result.printed.strip()[-500:], result.ok)


@with_options
class Math(MathPrograms):
    """A tool user and a reasoner answer in parallel, see each other's answers, and stop when they agree."""

    agents: ClassVar[tuple[str, ...]] = ("tool_user", "reasoner")
    max_turns: Turns = 4
    """Most turns until the two agree."""

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the reasoner's last answer is correct."""
        await self.check(task)
        ask = ask_program(self.packages)
        turns: list[tuple[Attempt, Attempt]] = []
        agreed = False
        answer: str | None = None
        while len(turns) < self.max_turns and not agreed:
            computed, reasoned = await asyncio.gather(
                self.compute(team.tool_user, task, lambda: dialogue("tool user", task, _history(turns), ask)),
                self.reason(team.reasoner, task, lambda: dialogue("reasoner", task, _history(turns), ASK_REASONING)),
            )
            answer = reasoned.answer
            agreed = await agree(computed.answer, answer)
            turns.append((computed, reasoned))
        return await self.outcome(task, answer, len(turns), agreed=float(agreed))


@with_options
class SingleMath(MathEnvironment):
    """One agent reasons, sees its earlier answers, and stops when it repeats one (the paper's single agent).

    Its prompts show no program, output or verdict; it has as many turns as the team.
    """

    agents: ClassVar[tuple[str, ...]] = ("solo",)
    max_turns: Turns = 4

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the last answer is correct."""
        await self.check(task)
        attempts: list[Attempt] = []
        repeated = False
        while len(attempts) < self.max_turns and not repeated:
            attempt = await self.reason(team.solo, task, partial(self.prompt, task, attempts))
            repeated = bool(attempts) and await agree(attempts[-1].answer, attempt.answer)
            attempts.append(attempt)
        return await self.outcome(task, attempts[-1].answer, len(attempts))

    def prompt(self, task: MathTask, attempts: Sequence[Attempt]) -> list[Message]:
        """Returns the prompt after some answers."""
        earlier = [attempt.quote(f"Turn {number}, your answer") for number, attempt in enumerate(attempts, 1)]
        again = ["Check your answer: give it again if it is right, and another one if not."] if attempts else []
        question = "\n\n".join([task.question, *earlier, *again, ASK_REASONING])
        return chat(question, "You solve a mathematical problem.")


@with_options
class MathEnsemble(MathPrograms):
    """Reasoners and tool users answer in parallel; a judge sees all answers and decides.

    All reasoners are the agent `reasoner`, with one decision and so one group each; likewise the tool users.
    """

    agents: ClassVar[tuple[str, ...]] = ("reasoner", "tool_user", "judge")
    reasoners: Players = 2
    """Their number."""
    tool_users: Players = 1
    """Agents that answer by a program."""

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the judge's answer is correct."""
        await self.check(task)
        ask = ask_program(self.packages)
        names = [f"reasoner {number + 1}" for number in range(self.reasoners)]
        tools = [f"tool user {number + 1}" for number in range(self.tool_users)]
        attempts = await asyncio.gather(
            *(self.reason(team.reasoner, task, dialogue(name, task, [], ASK_REASONING)) for name in names),
            *(self.compute(team.tool_user, task, dialogue(name, task, [], ask)) for name in tools),
        )
        decide = f"Some of them may be wrong: decide. {ASK_REASONING}"
        asked = partial(_seen, "judge", task, dict(zip(names + tools, attempts, strict=True)), decide)
        verdict = await self.reason(team.judge, task, asked)
        return await self.outcome(task, verdict.answer)


@with_options
class MathDebate(MathEnvironment):
    """Debaters answer in parallel, see each other's answers and revise theirs; the majority's answer counts."""

    agents: ClassVar[tuple[str, ...]] = ("debater",)
    debaters: Annotated[int, Ge(2), Le(64)] = 3
    """Their number."""
    rounds: Turns = 2
    """Rounds; from the second on, prompts show the others' answers."""

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the majority's answer after the last round is correct."""
        await self.check(task)
        names = [f"debater {number + 1}" for number in range(self.debaters)]
        earlier: Mapping[str, Attempt] = {}
        answers: list[str | None] = []
        for _ in range(self.rounds):
            attempts = await asyncio.gather(
                *(
                    self.reason(team.debater, task, partial(_seen, name, task, earlier, ASK_REASONING))
                    for name in names
                )
            )
            answers = [attempt.answer for attempt in attempts]
            earlier = dict(zip(names, attempts, strict=True))
        return await self.outcome(task, await majority(answers), self.rounds)


def dialogue(role: str, task: MathTask, earlier: Iterable[str], ask: str) -> list[Message]:
    """Returns a prompt: the agent's role, the problem, earlier attempts, and the instruction to answer."""
    system = f"You are the {role} of a team that solves a mathematical problem."
    return chat("\n\n".join([task.question, *earlier, ask]), system)


def _seen(role: str, task: MathTask, attempts: Mapping[str, Attempt], ask: str) -> list[Message]:
    """Returns a prompt that quotes attempts by the names of those who made them."""
    return dialogue(role, task, [attempt.quote(f"The {name}") for name, attempt in attempts.items()], ask)


def _history(turns: Sequence[tuple[Attempt, Attempt]]) -> list[str]:
    parts = []
    for number, (computed, reasoned) in enumerate(turns, 1):
        parts += [
            computed.quote(f"Turn {number}, the tool user"),
            reasoned.quote(f"Turn {number}, the reasoner"),
            "The two do not agree. Find out what is wrong, and answer again.",
        ]
    return parts


def _read_tasks(source: object, option: str) -> tuple[MathTask, ...]:
    where = f"{option}.columns"
    tasks: list[MathTask] = []
    asked, read = 0, 0
    for row in read_records(source, option, {"question": "question", "answer": "answer"}):
        if read == 0:
            first = row
        question, answer = _text_of(row["question"]), parse_gold(row["answer"])
        read, asked = read + 1, asked + bool(question)
        if question and answer is not None:
            tasks.append(MathTask(question, answer))
    if not asked:
        raise option_error(
            f"{where}.question: no row of it has a text, or one message of the role user; the first is "
            f"{str(first['question'])[:80]!r}; name the column of the problems"
        )
    if not any(verifiable(task.answer) for task in tasks[:_TRIED]):
        raise option_error(
            f"{where}.answer: no answer in it can be verified, the first is {str(first['answer'])[:80]!r}; name the "
            "column of the answers"
        )
    if len(tasks) < read:
        lacking = f"{read - asked} without a question, {asked - len(tasks)} without an answer"
        logger.warning("%s: %d of %d problems left out: %s", option, read - len(tasks), read, lacking)
    return tuple(tasks)


def _text_of(question: object) -> str:
    """Returns a problem's text, also of a prompt in verl's form that is one message of the user; "" if there is none.

    More messages are none: whoever wrote them meant another prompt than ours.
    """
    if isinstance(question, list) and len(question) == 1 and isinstance(question[0], Mapping):
        question = question[0].get("content") if question[0].get("role") == "user" else None
    return question if isinstance(question, str) and question.strip() else ""
