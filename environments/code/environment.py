"""Coding: a coder writes a program and a tester a test, in parallel; both see the result if the program fails it.

Workflow and rewards follow AT-GRPO (arXiv 2510.11062, App. A). No prompt contains golden tests or solutions, and
programs run only in the sandbox.
"""

from __future__ import annotations

import asyncio
import pprint
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Le

from verl_atgrpo import Message, Outcome, Score, Split, Team
from verl_atgrpo.environments.code.formats import read_problems
from verl_atgrpo.environments.code.programs import Call, Exchange, Problem, Test, Verdict, judge
from verl_atgrpo.environments.code.replies import parse_test
from verl_atgrpo.environments.common.options import Turns, check_isolation, option_error, with_options
from verl_atgrpo.environments.common.records import DataSetEnvironment
from verl_atgrpo.environments.common.replies import extract_python
from verl_atgrpo.environments.common.workflow import chat, once
from verl_atgrpo.play.environment import RowDefect
from verl_atgrpo.play.quoting import quoted
from verl_atgrpo.sandbox.runner import Limits

Tests = Annotated[int, Ge(1), Le(100_000)]
Judged: TypeAlias = Callable[[str], "asyncio.Task[Verdict]"]
"""Runs a program on the golden tests of one problem."""


@dataclass(frozen=True)
class State:
    """State of an episode: the last program, the last test, and the program's result on the test."""

    problem: Problem
    program: str | None = None
    test: Test | None = None
    verdict: Verdict | None = None
    """None unless there are a program and a test."""

    @property
    def agreed(self) -> bool:
        """Whether the program passes the test."""
        return self.verdict is not None and all(self.verdict.passed)


@with_options
class Code(DataSetEnvironment[Problem]):
    """A coder and a tester work in parallel until the program passes the test, for up to `max_turns` turns."""

    agents: ClassVar[tuple[str, ...]] = ("coder", "tester")

    train: object = None
    """Training tasks, with `format`."""
    val: object = None
    """Validation tasks, likewise."""
    max_turns: Turns = 4
    """Most turns of an episode."""
    max_tests: Tests = 20
    """Golden tests per training task, the first ones."""
    tester_reward: Literal["golden", "format"] = "golden"
    """`golden`: .2 for a test in the agreed format and .8 if the data's solution passes it. `format`: only the .2, for
    data without solutions."""
    cpu_seconds: Annotated[int, Ge(1), Le(3600)] = 2
    """CPU time for one test (of a function: for all); at most four times that, and two seconds, may pass."""
    memory_mb: Annotated[int, Ge(64), Le(1_000_000)] = 256
    """Address space of a program, in MiB."""
    require_isolation: bool | None = None
    """True refuses machines below level `namespaces`; null those where programs could change the golden tests
    (docs/sandbox.md); false none."""
    val_max_tests: Tests | None = None
    """The same for validation; null: all."""

    def __post_init__(self) -> None:
        check_isolation(self.require_isolation)
        most: dict[Split, int | None] = {"train": self.max_tests, "val": self.val_max_tests}
        self.read_tasks(lambda split, section, where: read_problems(section, where, most[split]))
        if self.tester_reward == "golden" and not any(problem.solution for problem in self._tasks["train"]):
            raise option_error("tester_reward='golden': the data of train have no solutions; use format")
        # Generous wall-clock limit: scores must not depend on the machine's load. Golden output may be long.
        wall_seconds = 4.0 * self.cpu_seconds + 2
        self._limits = Limits(self.cpu_seconds, wall_seconds, self.memory_mb, output_bytes=1 << 20)

    def fingerprint(self, task: Problem) -> str:
        """Returns the statement without whitespace and case differences."""
        return " ".join(task.statement.split()).casefold()

    def dedup_text(self, task: Problem) -> str:
        """Returns the statement."""
        return task.statement

    async def row_defect(self, task: Problem) -> RowDefect | None:
        """Returns what is wrong with a problem's golden tests."""
        if (await judge(task, "", task.tests, self._limits)).fraction == 1:
            return "the empty reply passes"
        if task.solution is None:
            return "it has no solution to check"
        own = await judge(task, task.solution, task.tests, self._limits)
        return None if own.fraction == 1 else "its own solution fails"

    # ------------------------------------------------------------------ the workflow

    async def run(self, task: Problem, team: Team) -> Outcome:
        """Plays one episode; success means that the last program passes all golden tests."""
        judged = self.judged(task)
        state = State(task)
        turns = 0
        while turns < self.max_turns and not state.agreed:
            program, test = await asyncio.gather(
                team.coder.act(partial(self.coder_prompt, state), partial(self.score_program, judged)),
                team.tester.act(partial(self.tester_prompt, state), partial(self.score_test, task)),
            )
            state = await self._next(state, program.text, test.text)
            turns += 1
        return await self.outcome(judged, state.program, turns, agreed=float(state.agreed))

    def judged(self, problem: Problem) -> Judged:
        """Returns a function that runs a program on the golden tests, cached for equal programs."""
        return once(lambda program: judge(problem, program, problem.tests, self._limits))

    async def outcome(self, judged: Judged, program: str | None, turns: int, **metrics: float) -> Outcome:
        """Returns the outcome of an episode with this last program: the fraction of golden tests that it passes."""
        fraction = 0.0 if program is None else (await judged(program)).fraction
        return Outcome(fraction == 1, fraction, {"turns": float(turns), "passed": fraction, **metrics})

    async def score_program(self, judged: Judged, reply: str) -> Score:
        """Scores a program: builds .1, runs .1, golden tests .8 (paper, coder); team part: fraction passed."""
        program = extract_python(reply)
        if program is None:
            return Score()
        verdict = await judged(program)
        return Score(verdict.fraction, 0.1 * verdict.built + 0.1 * verdict.ran + 0.8 * verdict.fraction)

    async def score_test(self, problem: Problem, reply: str) -> Score:
        """Scores a test: agreed format .2, the data's solution passes it .8 (paper, tester).

        It has no team part: a test alone does not change the program.
        """
        test = parse_test(reply, problem)
        if test is None or self.tester_reward == "format" or problem.solution is None:
            return Score(local=0.2 * (test is not None))
        verdict = await judge(problem, problem.solution, [test], self._limits)
        return Score(local=0.2 + 0.8 * verdict.fraction)

    async def _next(self, state: State, coder_reply: str, tester_reply: str) -> State:
        # A reply that does not parse keeps the last program or test.
        program, test = extract_python(coder_reply), parse_test(tester_reply, state.problem)
        program, test = state.program if program is None else program, test or state.test
        if program is None or test is None:
            return State(state.problem, program, test)
        return State(state.problem, program, test, await judge(state.problem, program, [test], self._limits))

    # ------------------------------------------------------------------ prompts

    def coder_prompt(self, state: State) -> list[Message]:
        """Returns the coder's prompt."""
        return _dialogue(state.problem, _so_far(state), _CODER, _ask_program(state.problem))

    def tester_prompt(self, state: State) -> list[Message]:
        """Returns the tester's prompt."""
        name = state.problem.entry_point
        given, expected = (
            ("what the program reads", "what it must print")
            if name is None
            else (f"the arguments of one call of `{name}`", "what it must return")
        )
        literals = "" if name is None else " Write Python literals, arguments separated by commas."
        return _dialogue(
            state.problem,
            _so_far(state),
            "You write tests for Python programs. Every correct program must pass them.",
            f"Write one test whose result you are sure of, and no program. Give a line 'Input:', below it a ``` block "
            f"with {given}, then a line 'Output:', below it a ``` block with {expected}.{literals}",
        )


@with_options
class SingleCode(Code):
    """One agent writes programs, sees its last one, and stops when it repeats it (the paper's single agent).

    Its prompts show no test, output or verdict; it has as many turns as the team.
    """

    agents: ClassVar[tuple[str, ...]] = ("solo",)
    tester_reward: Literal["golden", "format"] = field(default="format", init=False)

    async def run(self, task: Problem, team: Team) -> Outcome:
        """Plays one episode; success means that the last program passes all golden tests."""
        judged = self.judged(task)
        program: str | None = None
        turns, repeated = 0, False
        while turns < self.max_turns and not repeated:
            reply = await team.solo.act(partial(self.prompt, task, program), partial(self.score_program, judged))
            written = extract_python(reply.text)
            # A reply that does not parse keeps the last program.
            repeated, program = written is not None and written == program, program if written is None else written
            turns += 1
        return await self.outcome(judged, program, turns)

    def prompt(self, problem: Problem, program: str | None) -> list[Message]:
        """Returns the prompt, with the last program if there is one."""
        so_far = (
            ""
            if program is None
            else f"Your program so far:\n{_quoted(program)}\n"
            "Check it: write it again if it is right, and another one if not.\n\n"
        )
        return _dialogue(problem, so_far, _CODER, _ask_program(problem))


_CODER = "You write Python programs. They must pass tests that you do not see."


def _ask_program(problem: Problem) -> str:
    name = problem.entry_point
    task = (
        "reads its input from standard input and prints its answer to standard output"
        if name is None
        else f"defines `{name}`, which is then called"
    )
    return f"Write a whole program, imports included, in one ```python block. It {task}."


def _dialogue(problem: Problem, so_far: str, role: str, ask: str) -> list[Message]:
    starter = f"Start from:\n```python\n{problem.starter.rstrip()}\n```\n" if problem.starter.strip() else ""
    question = f"{problem.statement.strip()}\n\n{starter}{so_far}{ask}"
    return chat(question, role)


def _so_far(state: State) -> str:
    """Returns the results of the last turns, quoted to separate them from the instructions."""
    if state.program is None and state.test is None:
        return ""
    program = (
        "No program is written yet." if state.program is None else f"The program so far:\n{_quoted(state.program)}"
    )
    if state.test is None:
        return f"{program}\nNo test is written yet.\n\n"
    given, expected = _texts(state.test)
    test = f"The test so far, its input:\n{_quoted(given)}\nits output:\n{_quoted(expected)}"
    if state.verdict is None:
        return f"{program}\n{test}\n\n"
    output = f"On this input the program gave:\n{_quoted(state.verdict.shown[0] or '(nothing)')}"
    return f"{program}\n{test}\n{output}\nThey do not agree: the program is wrong, or the test, or both.\n\n"


def _texts(test: Test) -> tuple[str, str]:
    if isinstance(test, Exchange):
        return test.given, test.expected
    assert isinstance(test, Call)  # parse_test returns no other kind
    return ", ".join(map(_literal, test.arguments)), _literal(test.expected)


def _literal(value: object) -> str:
    """Returns `repr`, with the members of sets in an order that is the same in all processes."""
    return pprint.pformat(value, width=2**31, compact=True, sort_dicts=False)


def _quoted(text: str) -> str:
    return quoted(text.rstrip())
