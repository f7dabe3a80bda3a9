"""The environment contract: every environment here keeps it, and each way to break it is named."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import random
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fakes.coding_problems import write
from fakes.scripted_episodes import here

from verl_atgrpo import Environment, Outcome, Score, Split, Team, check_environment
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.plan_path.grid import PlanPathTask
from verl_atgrpo.environments.sokoban.board import SokobanTask
from verl_atgrpo.environments.sokoban.levels import solve
from verl_atgrpo.environments.sudoku.grid import EMPTY, SudokuTask
from verl_atgrpo.play.registry import registered
from verl_atgrpo.play.testing import EnvironmentContractError, Script, ScriptError
from verl_atgrpo.play.tool_use import use_tools

BASE = {"plan_path": {"size": 4, "min_distance": 2, "max_moves": 16}, "sokoban": {"max_moves": 60}, "sudoku": {}}
DRAFTS = {"plan_path": "moves", "sokoban": "moves", "sudoku": "grid"}


REASONING = ("math", "math_ensemble", "math_debate", "math_drafts", "math_refined", "math_judged")
IN_WORDS = ("walk", "walk_walls", "number_search")
"""Checked in test_games_in_words.py."""
ADAPTERS = ("pettingzoo", "textarena", "reasoning_gym", "verifiers")
"""Checked in test_pettingzoo.py, test_textarena.py, test_reasoning_gym.py and test_verifiers.py."""


def everyone(script: Script) -> Mapping[str, Script]:
    """The same script for every agent."""
    return dict.fromkeys(("tool_user", "planner", "solo"), script)


def in_turn(agents: int, *replies: str) -> Script:
    """One reply per turn. A prompt keeps the turn of its first call, since scripts are also called out of order."""
    asked: dict[str, int] = {}
    return lambda prompt, k: replies[(asked.setdefault(prompt, len(asked)) // agents + k) % len(replies)]


def moves(listed: str, style: str) -> str:
    return listed if style == "compact" else f"Moves: {', '.join(listed)}"


def rows(grid: str, style: str) -> str:
    size = int(len(grid) ** 0.5)
    lines = "\n".join(grid[start : start + size] for start in range(0, len(grid), size))
    return lines if style == "compact" else f"Grid:\n{lines}"


def solution(task: Any) -> str:
    if isinstance(task, PlanPathTask):
        return task.shortest(task.start, random.Random(0))
    if isinstance(task, SokobanTask):
        return solve(task) or ""
    return str(task.solution)


def gold(style: str, tool: str) -> Any:
    def scripts(task: Any) -> Mapping[str, Script]:
        written = rows if isinstance(task, SudokuTask) else moves
        answer = written(solution(task), style)
        lines = [list(solution(task))] if written is moves else rows(solution(task), "compact").split()
        program = "```python\n" + "".join(f"print({line!r})\n" for line in lines) + "```\n"
        # A prompt that asks for a program mentions it.
        return everyone(lambda prompt, k: program if tool == "python" and "must print" in prompt else answer)

    return scripts


def exploits(style: str, agents: int) -> Any:
    """Moves back and forth, or gives half of the solution and withdraws it, turn by turn."""

    def scripts(task: Any) -> Mapping[str, Script]:
        whole = solution(task)
        if isinstance(task, SudokuTask):
            holes = [cell for cell, given in enumerate(task.givens) if given == EMPTY]
            half = "".join(EMPTY if cell in holes[::2] else digit for cell, digit in enumerate(whole))
            other = "".join(EMPTY if cell in holes[1::2] else digit for cell, digit in enumerate(whole))
            return everyone(in_turn(agents, rows(half, style), rows(other, style)))
        back = {name: other for name, other in zip("UDLR", "DURL", strict=True)}
        assert set(back) == set(MOVES)
        there = whole[:-1]
        return everyone(
            in_turn(agents, moves(there, style), moves("".join(back[name] for name in there[::-1]), style))
        )

    return scripts


def test_every_environment_is_checked_here() -> None:
    elsewhere = {
        "code",
        "connect_four",
        "curriculum",
        "mixture",
        "openenv",
        "search",
        "search_routed",
        "tic_tac_toe",
    }  # in tests of their own
    assert {name.partition("_single")[0] for name in registered()} == {
        *BASE,
        *IN_WORDS,
        *REASONING,
        *ADAPTERS,
        *elsewhere,
    }


@pytest.mark.parametrize(
    ("name", "style"),
    [
        (f"{family}{kind}", style)
        for family in BASE
        for kind in ("", "_single")
        for style in ("full", "compact")
        if (family, style) != ("sokoban", "compact")
    ],
)
def test_every_game_keeps_the_contract(name: str, style: str) -> None:
    """That other processes make the same tasks is tested in test_reproducible.py."""
    family = name.removesuffix("_single")
    tool = DRAFTS[family]
    check_environment(
        here(name),
        {**BASE[family], "style": None if family == "sokoban" else style, "tool": tool if name == family else None},
        gold=gold(style, tool),
        exploits=[exploits(style, 2 if name == family else 1)],
        tasks=10,
        episodes=2 if style == "full" else 1,
        bounds=(0, 1),
        floor=0,
    )


@pytest.mark.parametrize("name", ["plan_path", "sokoban", "sudoku"])
def test_every_family_keeps_the_contract_with_programs(name: str) -> None:
    options = {**BASE[name], "max_turns": 1}
    check_environment(here(name), options, gold=gold("full", "python"), tasks=3, episodes=1, bounds=(0, 1), floor=0)


def files(folder: Path, rows: Mapping[str, list[dict[str, str]]]) -> dict[str, dict[str, str]]:
    """Writes the rows of every split and returns the options that name the files."""
    return {split: {"path": write(folder, those, f"{split}.jsonl")} for split, those in rows.items()}


@pytest.mark.parametrize("name", [pytest.param("math", marks=pytest.mark.slow), *REASONING[1:], "math_single"])
def test_teams_that_reason_keep_the_contract(name: str, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    sums = {"train": range(2, 5), "val": range(5, 8)}
    data = {
        split: [{"question": f"What is {n} times 17?", "answer": str(17 * n)} for n in those]
        for split, those in sums.items()
    }

    def scripts(task: Any) -> Mapping[str, Script]:
        program, words = f"```python\nprint({task.answer})\n```\n", rf"It is \boxed{{{task.answer}}}."
        script: Script = lambda prompt, k: program if "must print" in prompt else words  # noqa: E731
        players = dict.fromkeys(("tool_user", "reasoner", "debater", "solo", "solver"), script)
        players |= dict.fromkeys(("generator", "verifier", "drafter", "refiner", "judge"), script)
        if name == "math_judged":
            players["judge"] = lambda prompt, k: "right" if words in prompt else "wrong"
        return players

    options = {**files(tmp_path, data), **({"max_turns": 1} if name == "math" else {})}
    # All of them have the same tasks.
    factory = name if name == "math" else here(name)
    bounds = (-2, 2) if name == "math_judged" else (0, 1)
    check_environment(factory, options, gold=scripts, tasks=3, episodes=1, bounds=bounds)


@pytest.mark.parametrize("name", [pytest.param("code", marks=pytest.mark.slow), "code_single"])
def test_teams_that_program_keep_the_contract(name: str, tmp_path: Path) -> None:
    solution = "print(sum(map(int, input().split())))"
    tests = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    data = {
        split: [
            {
                "question": f"Print the sum of the numbers, as task {number} of {split} asks.",
                "input_output": json.dumps(tests),
                "solutions": json.dumps([solution]),
            }
            for number in range(2)
        ]
        for split in ("train", "val")
    }
    sections = {split: {**section, "format": "apps"} for split, section in files(tmp_path, data).items()}

    def script(prompt: str, k: int) -> str:
        if "whole program" in prompt:
            return f"```python\n{solution}\n```\n"
        return "Input:\n```\n5 6\n```\nOutput:\n```\n11\n```\n"

    check_environment(
        name if name == "code" else here(name),
        {**sections, "max_turns": 1},
        gold=lambda task: dict.fromkeys(("coder", "tester", "solo"), script),
        tasks=2,
        episodes=1,
        bounds=(0, 1),
    )


# ------------------------------------------------------------------ what is caught


class Sums(Environment):
    """Addition; keeps the contract, unlike its subclasses."""

    agents = ("guesser", "checker")

    def task(self, split: Split, index: int) -> tuple[int, int]:
        return index + 2, 1001 + (split == "val")

    def fingerprint(self, task: tuple[int, int]) -> str:
        return str(task)

    def score(self, task: tuple[int, int], reply: str) -> Score:
        return Score(team=float(reply == str(sum(task))))

    def prompt(self, task: tuple[int, int], turn: int) -> Any:
        return [{"role": "user", "content": f"{task} {turn}"}]

    async def run(self, task: tuple[int, int], team: Team) -> Outcome:
        for turn, agent in itertools.product(range(2), self.agents):
            reply = await team[agent].act(self.prompt(task, turn), lambda reply: self.score(task, reply))
            if reply.text == str(sum(task)):
                return self.outcome(reply.text, True)
        return self.outcome(reply.text, False)

    def outcome(self, last: str, success: bool) -> Outcome:
        return Outcome(success, float(success), {"length": float(len(last))})


def sums_gold(task: tuple[int, int]) -> Mapping[str, Script]:
    return dict.fromkeys(Sums.agents, lambda prompt, k: str(sum(task)))


def to_and_fro(task: tuple[int, int]) -> Mapping[str, Script]:
    return dict.fromkeys(Sums.agents, lambda prompt, k: "fro" if prompt.endswith("1") else "to")


class NoIdentifiers(Sums):
    agents = ("tool user",)  # type: ignore[assignment]


class AnotherTaskEachTime(Sums):
    count = itertools.count()

    def task(self, split: Split, index: int) -> tuple[int, int]:
        return next(self.count), 1001 + (split == "val")


class HashedTasks(Sums):
    def fingerprint(self, task: tuple[int, int]) -> str:
        return str(hash(str(task)))


class PromptOfASet(Sums):
    """The order of a set of texts follows PYTHONHASHSEED."""

    def prompt(self, task: tuple[int, int], turn: int) -> Any:
        return f"{super().prompt(task, turn)} {set(map(str, range(9)))}"


class RandomTasks(Sums):
    """What the fingerprint does not show differs each time."""

    def task(self, split: Split, index: int) -> Any:
        first, second = super().task(split, index)
        return first, second + random.random() / 4

    def fingerprint(self, task: Any) -> str:
        return super().fingerprint((task[0], int(task[1])))


class OneSplit(Sums):
    def task(self, split: Split, index: int) -> tuple[int, int]:
        return index, index


class TooFewTasks(Sums):
    def num_tasks(self, split: Split) -> int | None:
        return 30

    def task(self, split: Split, index: int) -> tuple[int, int]:
        return [Sums.task(self, split, number) for number in range(29)][index]


class RaisesOnGarbage(Sums):
    def score(self, task: tuple[int, int], reply: str) -> Score:
        return Score(team=float(int(reply) == sum(task)))


class RaisesInATask(RaisesOnGarbage):
    async def run(self, task: tuple[int, int], team: Team) -> Outcome:
        await team.checker.act("?", lambda reply: Score())
        try:
            return await super().run(task, team)
        except EnvironmentContractError:
            return Outcome(False, metrics={"length": 0})


class CatchesAll(Sums):
    async def run(self, task: tuple[int, int], team: Team) -> Outcome:
        try:
            return await super().run(task, team)
        except Exception:  # noqa: BLE001  (what an environment of a user may do)
            return self.outcome("", False)


class NotANumber(Sums):
    def score(self, task: tuple[int, int], reply: str) -> Score:
        return Score(local=float("nan") if not reply else 0)


class TooMuch(Sums):
    def score(self, task: tuple[int, int], reply: str) -> Score:
        return Score(team=-float(len(reply)))


class CountsAttempts(Sums):
    calls = 0

    def score(self, task: tuple[int, int], reply: str) -> Score:
        self.calls += 1
        return Score(local=0.01 * (self.calls % 7))


class PromptDependsOnOtherEpisodes(Sums):
    asked = 0

    def prompt(self, task: tuple[int, int], turn: int) -> Any:
        self.asked += 1
        return f"{task} {self.asked}"


class PaysEchoes(Sums):
    def score(self, task: tuple[int, int], reply: str) -> Score:
        return Score(local=0.5 * (str(task[0]) in reply))


class SucceedsOnTimeOut(Sums):
    def outcome(self, last: str, success: bool) -> Outcome:
        return super().outcome(last, True)


class PaysBouncing(Sums):
    def score(self, task: tuple[int, int], reply: str) -> Score:
        return Score(team=1.0 if reply == str(sum(task)) else 0.4 * (reply in ("to", "fro")))


class PaysHesitation(Sums):
    def score(self, task: tuple[int, int], reply: str) -> Score:
        return Score(team=0.3 if reply == str(sum(task)) else 0.4 * (reply in ("to", "fro")))


class OtherKeys(Sums):
    def outcome(self, last: str, success: bool) -> Outcome:
        return Outcome(success, metrics={"length": 1.0} if last else {})


class InfiniteMetrics(Sums):
    def outcome(self, last: str, success: bool) -> Outcome:
        return Outcome(success, metrics={"length": float("inf")})


class NoBool(Sums):
    def outcome(self, last: str, success: bool) -> Outcome:
        return Outcome(1.0 * success)  # type: ignore[arg-type]


class NoChat(Sums):
    def prompt(self, task: tuple[int, int], turn: int) -> Any:
        return [{"role": "user", "text": "?"}]


class AnotherScheme(Sums):
    schemes: ClassVar[Mapping[str, tuple[str, ...]]] = {"guesser": ("tree", "trees")}


class NeverEnds(Sums):
    async def run(self, task: tuple[int, int], team: Team) -> Outcome:
        while True:
            await team.checker.act("?")


class Unsolvable(Sums):
    def outcome(self, last: str, success: bool) -> Outcome:
        return super().outcome(last, False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NoIdentifiers, "declared: .*'tool user'"),
        (
            AnotherScheme,
            r"schemes: 'guesser' -> \('tree', 'trees'\) is not an agent and a tuple of branch, own, parallel, tree",
        ),
        (AnotherTaskEachTime, r"task: task \(train, 0\) differs when"),
        (HashedTasks, r"task: task \(train, 0\) differs in another process"),
        (PromptOfASet, r"prompt: task \(train, 0\) has other prompts in another process"),
        (RandomTasks, r"side effect: task \(train, 0\), .*making the task again.*changes the prompt of"),
        (OneSplit, r"splits: task \(val, 0\) has the key of task \(train, 0\)"),
        (TooFewTasks, r"task: task \(train, 29\) cannot be made: IndexError"),
        (RaisesOnGarbage, r"run: task \(train, 0\), empty team: raises ValueError: invalid literal"),
        (RaisesInATask, r"run: task \(train, 0\), empty team: raises ValueError"),
        (NotANumber, r"score: task \(train, 0\), empty team: 'guesser' gets .*nan"),
        (TooMuch, r"score: task \(train, 0\), .*-49\.0.* not a Score inside \[-1, 1\]"),
        (CountsAttempts, r"side effect: task \(train, 0\), empty team: 'guesser' earns .* scored again"),
        (PromptDependsOnOtherEpisodes, r"side effect: task \(train, 0\), .* changes the prompt of"),
        (PaysEchoes, r"floor: task \(train, 0\), echo team: the decision 'guesser.0' earns 0\.5 .* more than 0\.2"),
        (SucceedsOnTimeOut, r"floor: task \(train, 0\), empty team: it succeeds"),
        (PaysBouncing, r"gold: task \(train, 0\), exploits 0 team: its team parts add up to 1\.6.* gold only 1"),
        (PaysHesitation, r"gold: task \(train, 0\), gold team: .* earns 0\.3; the exploits 0 team's 'to', 0\.4"),
        (OtherKeys, r"metrics: the episodes of 'val' have \[\(\), \('length',\)\]"),
        (InfiniteMetrics, r"outcome: task \(train, 0\), empty team: Outcome\.metrics: length=inf"),
        (NoBool, r"outcome: task \(train, 0\), empty team: Outcome\.success=0\.0"),
        (NoChat, r"prompt: task \(train, 0\), empty team: 'guesser' gets .*, not a text or a chat"),
        (NeverEnds, r"end: task \(train, 0\), empty team: none after 100 decisions"),
        (Unsolvable, r"gold: task \(train, 0\), gold team: it does not succeed"),
    ],
)
def test_a_broken_environment_is_refused_with_the_check_named(broken: type[Sums], message: str) -> None:
    # A lambda skips the other process, which only these need.
    factory = broken if broken in (HashedTasks, PromptOfASet) else lambda: broken()
    with pytest.raises(EnvironmentContractError, match=f"^{message}") as caught:
        check_environment(factory, gold=sums_gold, exploits=[to_and_fro])
    assert "\n" not in str(caught.value)


async def _helper(team: Team) -> None:
    await team.checker.act("?")


@pytest.mark.parametrize(
    "forgotten",
    [
        lambda team, reply: team.checker.act("?"),
        lambda team, reply: team.settle(reply, lambda text: Score()),
        lambda team, reply: use_tools(team.checker, "?", []),
        lambda team, reply: asyncio.sleep(0),
        lambda team, reply: _helper(team),
    ],
)
def test_what_is_not_awaited_is_named(forgotten: Any) -> None:
    class Forgetful(Sums):
        async def run(self, task: tuple[int, int], team: Team) -> Outcome:
            forgotten(team, await team.checker.act("first"))
            return await super().run(task, team)

    with pytest.raises(EnvironmentContractError, match=r"^await: task \(train, 0\).*coroutine .* was never awaited"):
        check_environment(lambda: Forgetful(), gold=sums_gold)


def test_a_decision_that_run_does_not_wait_for_is_named() -> None:
    class Hasty(Sums):
        async def run(self, task: tuple[int, int], team: Team) -> Outcome:
            begun.append(asyncio.create_task(team.checker.act("in passing")))
            return await super().run(task, team)

    begun: list[Any] = []
    with pytest.raises(
        EnvironmentContractError, match=r"^await: task \(train, 0\).*a decision of 'checker' .*: await it"
    ):
        check_environment(lambda: Hasty(), gold=sums_gold)


def test_scores_that_come_later_are_inside_the_bounds_too() -> None:
    class Later(Sums):
        async def run(self, task: tuple[int, int], team: Team) -> Outcome:
            await team.settle(await team.checker.act("first"), lambda text: Score(team=50.0))
            return await super().run(task, team)

    with pytest.raises(EnvironmentContractError, match=r"^score: task \(train, 0\).*'checker' gets Score\(team=50\.0"):
        check_environment(lambda: Later(), gold=sums_gold)


def test_judges_of_replies_that_are_tried_are_no_decisions_of_the_episode() -> None:
    class Judging(Sums):
        async def run(self, task: tuple[int, int], team: Team) -> Outcome:
            async def by_judge(reply: str) -> Score:
                await team.checker.act("judge")
                return Score()

            for _ in range(8):
                await team.checker.act("first", by_judge)
            return await super().run(task, team)

    check_environment(lambda: Judging(), gold=sums_gold, max_decisions=40)


def test_an_episode_without_a_decision_is_named() -> None:
    class Lucky(Sums):
        async def run(self, task: tuple[int, int], team: Team) -> Outcome:
            return Outcome(False)

    with pytest.raises(
        EnvironmentContractError, match=r"^decisions: task \(train, 0\).*run makes none, and a training"
    ):
        check_environment(lambda: Lucky())


def test_other_warnings_are_passed_on() -> None:
    class Warns(Sums):
        async def run(self, task: tuple[int, int], team: Team) -> Outcome:
            warnings.warn("old data", UserWarning, stacklevel=1)
            return await super().run(task, team)

    with pytest.warns(UserWarning, match="old data"):
        check_environment(lambda: Warns(), gold=sums_gold)


class ExitsInAScore(Sums):
    def score(self, task: tuple[int, int], reply: str) -> Score:
        return super().score(task, reply) if reply else sys.exit(2)


def test_a_score_that_would_end_the_check_is_named() -> None:
    with pytest.raises(EnvironmentContractError, match=r"^run: .*, empty team: raises Ended: .*SystemExit: 2"):
        check_environment(lambda: ExitsInAScore(), gold=sums_gold)


def test_a_sound_environment_passes_by_class_and_by_name() -> None:
    check_environment(Sums, gold=sums_gold, exploits=[to_and_fro])
    check_environment(f"{__name__}:Sums")


def test_a_notebook_checks_in_a_cell_as_its_loop_runs() -> None:
    async def cell() -> None:
        check_environment(Sums, gold=sums_gold, exploits=[to_and_fro], legal=sums_gold)

    asyncio.run(cell())


class Loud(Sums):
    """Prints where another process ends, and takes an option that JSON has no form for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        assert isinstance(folder, Path)
        atexit.register(print, "goodbye")


def test_what_a_process_prints_and_its_options_do_not_matter(tmp_path: Path) -> None:
    check_environment(Loud, {"folder": tmp_path}, gold=sums_gold)
    with pytest.raises(ValueError, match=r"^options .* cannot be given to another process"):
        check_environment(Loud, {"folder": type("Local", (type(tmp_path),), {})(tmp_path)})


def test_a_class_that_another_process_cannot_import_is_checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one in a test that pytest found by its path."""
    monkeypatch.setattr(Sums, "__module__", "tests_of_mine.test_sums")
    check_environment(Sums, gold=sums_gold)


def raises(prompt: str, k: int) -> str:
    return {"known": "answer"}[prompt]


@pytest.mark.parametrize(
    ("team", "scripts", "message"),
    [
        ("gold", lambda task: {"guesser": raises, "checker": raises}, "the script of 'guesser' raises KeyError: "),
        ("gold", lambda task: {"guesser": raises}, "no script for 'checker'"),
        ("gold", lambda task: {"x": 1}[task], r"the function that makes its scripts raises KeyError: \(2, 1001\)"),
        (
            "gold",
            lambda task: dict.fromkeys(Sums.agents, lambda prompt, k: 7),
            "the script of 'guesser' returns 7, not a text",
        ),
        ("exploits 0", lambda task: dict.fromkeys(Sums.agents, raises), "the script of 'guesser' raises KeyError: "),
    ],
)
@pytest.mark.parametrize("environment", [Sums, CatchesAll])
def test_a_script_at_fault_is_named_and_not_the_environment(
    environment: type[Sums], team: str, scripts: Any, message: str
) -> None:
    gold, exploits = (scripts, to_and_fro) if team == "gold" else (sums_gold, scripts)
    with pytest.raises(ScriptError, match=rf"^script: task \(train, 0\), {team} team: {message}") as caught:
        check_environment(lambda: environment(), gold=gold, exploits=[exploits])
    assert "\n" not in str(caught.value)


def test_what_exploits_earn_needs_something_to_compare_it_with() -> None:
    with pytest.raises(ValueError, match="give gold as well"):
        check_environment(Sums, exploits=[to_and_fro])
