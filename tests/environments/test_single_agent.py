"""The single agent that teams are compared with: one agent, no drafts, tool outputs or verdicts in its prompts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.coding_problems import ROWS, write
from fakes.math_problems import GOLD, box, sources
from fakes.sudoku_players import PUZZLE, SOLVED, WRONG

from verl_atgrpo import Environment, EnvironmentConfigError, ScriptedTeam, make, play
from verl_atgrpo.environments.plan_path.grid import State as PathState
from verl_atgrpo.environments.sokoban.board import State as BoardState
from verl_atgrpo.environments.sudoku.grid import State as SudokuState
from verl_atgrpo.play.types import EpisodeRecord


def sections(folder: Path) -> dict[str, Any]:
    section = {"path": write(folder, [row for row, _ in ROWS["apps"]]), "format": "apps"}
    return {"train": section, "val": section}


GAMES: Mapping[str, dict[str, Any]] = {
    "plan_path": {"size": 4, "max_turns": 3},
    "sokoban": {"max_turns": 3},
    "sudoku": {"max_turns": 3},
}
DRAFTS = {"plan_path": "moves", "sokoban": "moves", "sudoku": "grid"}
HINTS = re.compile(r"draft(?!\d|$)|tool user|planner|team|printed|program|```python|verdict|wrong", re.MULTILINE)
"""Words of a team's prompts; compact prompts begin with `draft`."""


def episode(env: Environment, task: object, reply: Any) -> tuple[EpisodeRecord, list[str]]:
    """Plays an episode with one script; returns it with its prompts."""
    asked: list[str] = []

    def script(prompt: str, k: int) -> str:
        asked.append(prompt)
        return str(reply(prompt, len(asked)))

    team = ScriptedTeam(dict.fromkeys(env.agents, script), candidates=1)
    return asyncio.run(play(env, task, team)), asked


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in GAMES), *((name, {"style": "compact"}) for name in ("plan_path", "sudoku"))],
)
def test_in_games_it_sees_only_the_state_for_as_many_turns(name: str, options: dict[str, str]) -> None:
    single = make(f"{name}_single", **GAMES[name], **options)
    team = make(name, **GAMES[name], **options, tool=DRAFTS[name])
    assert single.agents == ("solo",)
    assert single.task("val", 3) == team.task("val", 3)
    record, asked = episode(single, single.task("val", 3), lambda prompt, turn: "?")
    assert [(decision.agent, decision.turn) for decision in record.decisions] == [("solo", n) for n in range(3)]
    assert len(set(asked)) == 1  # nothing was played, and the prompt does not mention it
    assert not HINTS.search(asked[0])
    # The board is exactly the team's; the planner's prompt adds the draft.
    _, teams = episode(team, team.task("val", 3), lambda prompt, turn: "?")
    assert asked[0] == teams[0]


def test_the_next_prompt_shows_where_its_answer_led() -> None:
    env: Any = make("plan_path_single", size=4, style="compact")
    task = env.task("val", 1)
    there = task.shortest(task.start, __import__("random").Random(0))
    record, asked = episode(env, task, lambda prompt, turn: there[turn - 1])
    assert record.outcome.success is (len(there) <= 4)
    assert len(set(asked)) == len(asked) == min(4, len(there))


def test_its_scores_are_the_planner_s() -> None:
    from fakes.sudoku_players import written

    single: Any = make("sudoku_single", style="compact")
    for grid, reward in ((SOLVED, 2.0), (WRONG, 0.2)):
        record, _ = episode(single, PUZZLE, lambda prompt, turn, grid=grid: written(grid, {"style": "compact"}))
        assert record.decisions[0].candidates[0].reward == pytest.approx(reward)


@pytest.mark.parametrize("name", GAMES)
def test_a_team_s_options_are_refused_unless_they_are_null(name: str) -> None:
    for option, value in (("tool", DRAFTS[name]), ("tool", "python"), ("require_isolation", True)):
        with pytest.raises(EnvironmentConfigError, match=f"{option} is not an option of '{name}_single'"):
            make(f"{name}_single", **{option: value})
        assert make(f"{name}_single", **{option: None}).agents == ("solo",)
    if name != "sokoban":
        with pytest.raises(EnvironmentConfigError, match="style='terse'"):
            make(f"{name}_single", style="terse")


def test_the_states_of_these_games_have_no_draft() -> None:
    for state in (PathState, BoardState, SudokuState):
        assert not any("draft" in field for field in state.__dataclass_fields__)


def test_in_mathematics_it_sees_its_answers_until_it_repeats_one(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    env = make("math_single", **sources(tmp_path), max_turns=4)
    assert env.agents == ("solo",)
    said = [box("1"), box(GOLD), box(f"{GOLD}.0"), box("never asked")]
    record, asked = episode(env, env.task("train", 0), lambda prompt, turn: said[turn - 1])
    assert record.outcome.success and record.outcome.metrics == {"turns": 3}
    assert [decision.turn for decision in record.decisions] == [0, 1, 2]
    assert not any(HINTS.search(prompt) for prompt in asked)
    assert GOLD not in asked[1] and "boxed{1}" in asked[1]
    # Two missing answers are no repetition; the last answer counts, not earlier correct ones.
    record, _ = episode(env, env.task("train", 0), lambda prompt, turn: "?")
    assert record.outcome.metrics == {"turns": 4}
    record, _ = episode(env, env.task("train", 0), lambda prompt, turn: box(GOLD) if turn == 1 else box(str(turn)))
    assert not record.outcome.success


def test_in_coding_it_sees_its_program_until_it_repeats_it(tmp_path: Path) -> None:
    # Programs must not time out on a busy machine.
    env = make("code_single", **sections(tmp_path), max_turns=4, cpu_seconds=60)
    assert env.agents == ("solo",)
    task = env.task("train", 0)
    said = ["```python\nprint(1)\n```", "no program", f"```python\n{task.solution}\n```"]
    record, asked = episode(env, task, lambda prompt, turn: said[min(turn, 3) - 1])
    assert [decision.agent for decision in record.decisions] == ["solo"] * 4
    assert record.outcome.success and record.outcome.metrics == {"turns": 4, "passed": 1}
    assert not any(re.search("tester|On this input|Write one test|They do not agree", prompt) for prompt in asked)
    record, _ = episode(env, task, lambda prompt, turn: "no program")
    assert record.outcome.metrics["turns"] == 4  # two missing programs are no repetition
    assert "> print(1)" in asked[1] and "> print(1)" in asked[2]  # no program: the last one is kept
    assert "so far" not in asked[0]
    record, _ = episode(env, task, lambda prompt, turn: said[0])
    assert record.outcome.metrics["turns"] == 2  # repeated, without a verdict
    empty = ["```python\n\n```", said[2]]  # an empty program is one, as in the team
    record, _ = episode(env, task, lambda prompt, turn: empty[turn % 2])
    assert not record.outcome.success


def test_in_reasoning_gym_its_prompts_show_no_verdict() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"dataset": "chain_sum", "max_turns": 3, "style": "compact"}
    env: Any = make("reasoning_gym_single", **options)
    task = env.task("train", 0)
    gold = str(task.entry["answer"])
    record, asked = episode(env, task, lambda prompt, turn: gold if turn == 1 else "7" * turn)
    assert asked[0] == task.question and asked[1].endswith(f"\n{gold}") and "Not" not in asked[2]
    assert not record.outcome.success  # the last answer counts
    record, _ = episode(env, task, lambda prompt, turn: gold)
    assert record.outcome.success and record.outcome.metrics == {"turns": 2}
