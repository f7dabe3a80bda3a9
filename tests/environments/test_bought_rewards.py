"""Rewards cannot be bought: the same answer to every task earns no more than chance.

Empty replies and echoes earn nothing by `check_environment`, constants in reasoning-gym by its port's own trial.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from fakes.coding_problems import humaneval, needs_humaneval, verdicts
from fakes.math_problems import box
from fakes.scripted_episodes import scripted

from verl_atgrpo import Environment, make
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.sudoku.grid import EMPTY, generate
from verl_atgrpo.play.testing import Script

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = 60
MARGIN = 0.08
"""What `TASKS` tasks may differ by luck: twice the standard error of a mean of scores between 0 and 1."""


def earned(env: Environment, tasks: Sequence[object], script: Script) -> tuple[float, float]:
    """Returns the share of solved tasks, and the mean score of a decision, if all agents play this script."""
    solved, scores = 0, []
    for task in tasks:
        record = scripted(env, task, dict.fromkeys(env.agents, script))
        solved += record.outcome.success
        scores += [decision.candidates[0].score.mixed(1.0) for decision in record.decisions]
    return solved / len(tasks), sum(scores) / len(scores)


def check(env: Environment, constants: Sequence[str], chance: Callable[[random.Random], str]) -> None:
    """Asserts that no constant earns more than replies that are drawn anew for every decision."""
    rng, tasks = random.Random(0), [env.task("train", index) for index in range(TASKS)]
    lucky_solved, lucky_score = earned(env, tasks, lambda prompt, k: chance(rng))
    for constant in constants:
        solved, score = earned(env, tasks, lambda prompt, k, constant=constant: constant)
        assert solved <= lucky_solved + MARGIN, f"{constant!r} solves {solved:.2f}, chance {lucky_solved:.2f}"
        assert score <= lucky_score + MARGIN, f"{constant!r} earns {score:.2f}, chance {lucky_score:.2f}"


def sweep(size: int) -> str:
    """Returns moves through all cells, row by row."""
    return "D".join(("R" if row % 2 == 0 else "L") * (size - 1) for row in range(size))


@pytest.mark.parametrize("length", [1, 3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["plan_path", "sokoban"])
def test_constant_moves(name: str, length: int) -> None:
    """A single agent's answers have the same scores and effects."""
    patterns = (*MOVES, "URDL", sweep(10), sweep(10)[::-1])
    constants = {(pattern * length)[:length] for pattern in patterns}
    check(
        make(name, tool="moves"),
        [f"Moves: {moves}" for moves in sorted(constants)],
        lambda rng: f"Moves: {''.join(rng.choices(list(MOVES), k=length))}",
    )


def test_constant_grids() -> None:
    draws = (generate(4, 8, random.Random(seed)) for seed in range(20))
    solved = [task.solution for task in draws if task is not None][:3]
    rows = partial(map, lambda grid: "\n".join(grid[start : start + 4] for start in range(0, 16, 4)))
    constants = (*solved, "1234" * 4, "1" * 16, EMPTY * 16, "1" + EMPTY * 15)
    check(
        make("sudoku", style="compact", tool="grid"),
        list(rows(constants)),
        lambda rng: next(rows(["".join(rng.choices("1234", k=16))])),
    )


TEXTARENA = {
    "GuessTheNumber-v0": (["[1]", "[10]", "[20]"], lambda rng: f"[{rng.randint(1, 20)}]"),
    "FrozenLake-v0-random": ([f"[{way}]" for way in ("up", "down", "left", "right")], None),
    "2048-v0-ultra-easy": ([f"[{way}]" for way in ("up", "down", "left", "right")], None),
}


@pytest.mark.parametrize("game", TEXTARENA)
def test_constant_moves_of_textarena(game: str) -> None:
    pytest.importorskip("textarena")
    constants, chance = TEXTARENA[game]
    check(make("textarena", game=game, max_steps=6), constants, chance or (lambda rng: rng.choice(constants)))


WAYS = ("up", "down", "left", "right")
# A checker that always says free is right as often as ways are free, so chance does as well.
WORDS: dict[str, tuple[list[str], Callable[[random.Random], str]]] = {
    "walk": (
        [f"{way} {steps}" for way in WAYS for steps in (1, 3)],
        lambda rng: f"{rng.choice(WAYS)} {rng.randint(1, 5)}",
    ),
    "walk_walls": (
        [f"{way} {verdict}" for way in WAYS for verdict in ("wall", "free")],
        lambda rng: f"{rng.choice(WAYS)} free",
    ),
    "number_search": (
        ["17", "24", "31", "39"],
        lambda rng: str(rng.randint(10, 53)),
    ),
}


@pytest.mark.parametrize("kind", ["", "_single"])
@pytest.mark.parametrize("name", WORDS)
def test_constant_words(name: str, kind: str) -> None:
    # "wall" is always right in the questions about walls, which train the checker and have no effect.
    options = {"wall_questions": 0.0} if name + kind == "walk_walls" else {}
    check(make(f"{name}{kind}", **options), *WORDS[name])


def test_constant_moves_of_pettingzoo(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pettingzoo")
    monkeypatch.syspath_prepend(EXAMPLES / "pettingzoo")
    game = {"env": "meeting:env", "actions": ["U", "D"], "task_key": "meeting:street", "style": "compact"}
    check(make("pettingzoo", **game), ["U", "D"], lambda rng: rng.choice("UD"))


ANYTHING = (
    *("0", "1", "2", "-1", "10", "100", "nan", "inf", "-inf", r"\infty", "x", "n", "a", "0x", "1=1", "x=x", "0=0"),
    *(r"\mathbb{R}", r"\mathbb{Z}", "(-inf, inf)", r"(-\infty, \infty)", "[0, 1000]", "{}", r"\emptyset", "True", ""),
    *("0, 1, 2, 3, 4, 5", "{0, 1, 2}", r"0 \text{ or } 1", r"\pm 1", "x > 0", "all", "any real number", "1 to 1000"),
)
GOLDS = ("72", r"\frac{1}{2}", r"2\sqrt{3}", "(3, 4)", "[2, 5)", "x^2+1", "{4, 5}")


@pytest.mark.slow
def test_no_answer_equals_many_golds() -> None:
    pytest.importorskip("math_verify")
    from verl_atgrpo.environments.math.answers import equal, parse_answer, parse_gold

    golds = [gold for gold in map(parse_gold, GOLDS) if gold]
    assert len(golds) == len(GOLDS)

    async def hits(answer: str) -> list[str]:
        return [gold for gold in golds if await equal(gold, parse_answer(box(answer)))]

    async def all_hits() -> dict[str, list[str]]:
        return {answer: found for answer in ANYTHING if (found := await hits(answer))}

    assert asyncio.run(all_hits()) == {}


@needs_humaneval
def test_constant_functions() -> None:
    programs = [
        (problem, f"def {problem.entry_point}(*a): return {returned}")
        for problem in random.Random(0).sample(humaneval(), 4)
        for returned in ("None", "True", "0", "''", "[]", "a[0] if a else None")
    ]
    for (problem, program), found in zip(programs, verdicts(programs), strict=True):
        assert not all(found.passed), (problem.entry_point, program)
