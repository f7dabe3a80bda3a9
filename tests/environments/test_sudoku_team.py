"""Sudoku with a team: prompts, episodes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from fakes.scripted_episodes import check_programs, episode, of, prompt_of
from fakes.sudoku_players import (
    ALL_OPTIONS,
    CHANGED,
    CLASH,
    PUZZLE,
    RIGHT,
    RIGHT_TOO,
    SOLVED,
    STANDING,
    STATES,
    STYLES,
    WRONG,
    WRONG_TOO,
    full,
    grid,
    grids_in,
    rows,
    written,
)
from waiting import HANG

from verl_atgrpo import Score
from verl_atgrpo.environments.common import drafting
from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.sudoku import Sudoku
from verl_atgrpo.environments.sudoku.grid import State, SudokuTask, enter
from verl_atgrpo.sandbox.runner import Limits, run_python

# ------------------------------------------------------------------ prompts


def prompts(env: Sudoku, state: State, *drafts: str | None) -> list[list[str]]:
    asked = [env.draft_prompt(state)]
    for draft in drafts:
        text = "no idea" if draft is None else f"```python\nprint({rows(draft)!r})\n```"
        asked.append(env.plan_prompt(state, Draft(text, draft, rows(draft or ""), True)))
    return [[message["content"] for message in prompt] for prompt in asked]


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_echoing_the_grids_of_a_prompt_earns_the_format_at_most(options: dict[str, Any]) -> None:
    env = Sudoku(**options)
    for state in STATES:
        for contents in prompts(env, state, None, STANDING, state.grid):
            lines = "\n".join(contents).split("\n")
            seen = 0
            for start in range(len(lines) - 3):
                text = "\n".join(lines[start : start + 4])
                for reply in (text, f"Grid:\n{text}"):
                    score = env.score_reply(state, reply)
                    assert score.team == 0
                    assert score.local in (0, 0.1)
                    seen += score.local > 0
                printed = env.parse_printed(text)
                assert printed is None or env.score_printed(state, printed) == Score(0, 0.2)
            assert seen  # the current grid was among them


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_feedback_depends_only_on_the_rules(options: dict[str, Any]) -> None:
    """Prompts are the same for all drafts that break no rule, correct or not: the solution stays hidden."""
    env = Sudoku(**options)
    for state in STATES:
        told = set()
        for draft in (RIGHT, RIGHT_TOO, WRONG, WRONG_TOO):
            (question,) = [contents[-1].replace("\n> ", "\n") for contents in prompts(env, state, draft)[1:]]
            for drawn in (rows(draft), rows(draft, " "), repr(rows(draft))):
                question = question.replace(drawn, "<draft>")
            told.add(question)
        # If the draft is the current grid, that grid is replaced as well.
        assert (
            len({text.replace(rows(state.grid), "<draft>").replace(rows(state.grid, " "), "<draft>") for text in told})
            == 1
        )


def test_nothing_shown_depends_on_the_solution() -> None:
    """Until the puzzle is solved, prompts and grids are the same for another solution."""
    other = SudokuTask(4, STANDING, SOLVED[::-1])
    env = Sudoku(tool="grid")
    mine, theirs = State.initial(PUZZLE), State.initial(other)
    for answer in (RIGHT, WRONG, CLASH, CHANGED, RIGHT_TOO):
        assert prompts(env, mine, answer, CLASH) == prompts(env, theirs, answer, CLASH)
        mine, theirs = enter(mine, answer), enter(theirs, answer)
        assert mine.grid == theirs.grid


@pytest.mark.parametrize("options", STYLES)
def test_the_planner_sees_the_draft_and_what_the_rules_say(options: dict[str, Any]) -> None:
    env = Sudoku(max_turns=1, **options)
    compact = options["style"] == "compact"
    for draft, verdict, short in (
        (SOLVED, "is complete and consistent.", ">goal"),
        (WRONG, "breaks no rule; cells left empty: 7.", ">7"),
        (CLASH, "is wrong: row 1 repeats 3; column 4 repeats 3; box 2 repeats 3.", ">r13#"),
        (
            "2" + SOLVED[1:],
            "is wrong: given at row 1, column 1 is changed; row 1 repeats 2; column 1 repeats 2; and more.",
            ">g11#",
        ),
    ):
        record = episode(env, PUZZLE, lambda prompt, k, draft=draft: written(draft, options), lambda prompt, k: "-")
        asked = prompt_of(of("planner", record)[0])
        assert grids_in(asked) == [STANDING, draft]
        assert short in asked if compact else verdict in asked
    record = episode(env, PUZZLE, lambda prompt, k: "?", lambda prompt, k: "-")
    assert (">none" if compact else "no valid grid") in prompt_of(of("planner", record)[0])


# ------------------------------------------------------------------ episodes


@pytest.mark.parametrize("options", STYLES)
def test_the_prompt_shows_the_current_grid_and_the_givens(options: dict[str, Any]) -> None:
    """The reference prompt shows the start, not the current state."""
    answers = {STANDING: WRONG, WRONG: RIGHT, RIGHT: CLASH}
    env = Sudoku(max_turns=4, **options)
    record = episode(
        env,
        PUZZLE,
        lambda prompt, k: "-",
        lambda prompt, k: written(answers.get(grids_in(prompt)[0], SOLVED), options),
    )
    after_clash = grid("12.. 3412 2143 4321")
    shown = [[STANDING], [WRONG, STANDING], [RIGHT, STANDING], [after_clash, STANDING]]
    for agent in ("tool_user", "planner"):
        assert [grids_in(prompt_of(decision)) for decision in of(agent, record)] == shown
    assert record.outcome.success
    assert [decision.candidates[0].reward for decision in of("planner", record)] == pytest.approx([0.2, 0.3, 0.6, 2])


def test_running_out_of_turns_is_not_success() -> None:
    env = Sudoku(tool="grid", max_turns=3)
    almost_solved = SOLVED[:2] + "." + SOLVED[3:]
    for answer, share in (("-", 0), (full(WRONG), 0), (full(almost_solved), 7 / 8), (full(CHANGED), 0)):
        record = episode(env, PUZZLE, lambda prompt, k: "-", lambda prompt, k, answer=answer: answer)
        assert len(record.decisions) == 6
        assert not record.outcome.success
        assert record.outcome.team_reward == 0
        assert record.outcome.metrics == {"turns": 3, "correct": share}


def test_solving_on_the_last_turn_is_success() -> None:
    steps = [RIGHT, RIGHT[:4] + SOLVED[4:8] + RIGHT[8:], SOLVED]
    env = Sudoku(tool="grid", max_turns=3)
    following = dict(zip([STANDING, *steps], steps, strict=False))
    record = episode(env, PUZZLE, lambda prompt, k: "-", lambda prompt, k: full(following[grids_in(prompt)[0]]))
    assert record.outcome.success
    assert record.outcome.metrics["turns"] == 3
    assert [decision.candidates[0].reward for decision in of("planner", record)] == pytest.approx([0.3, 0.4, 2])


def test_the_best_candidate_is_entered() -> None:
    env = Sudoku(tool="grid", max_turns=1)
    plans = [full(WRONG), full(SOLVED), full(RIGHT), "-"]
    record = episode(env, PUZZLE, lambda prompt, k: "-", lambda prompt, k: plans[k], candidates=4)
    (plan,) = of("planner", record)
    assert [candidate.reward for candidate in plan.candidates] == pytest.approx([0.2, 2, 0.3, 0])
    assert plan.committed == 1
    assert record.outcome.success


def test_programs_of_the_tool_user_are_run_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(run_python, limits=Limits(cpu_seconds=1, wall_seconds=HANG))
    monkeypatch.setattr(drafting, "run_python", quick)

    def program(code: str) -> str:
        return f"Let me see.\n```python\n{code}\n```\n"

    def printing(text: str) -> str:
        return program(f"print({rows(text)!r}, flush=True)")

    answers = {
        program(f"print({rows(SOLVED)!r}, flush=True)\nwhile True: pass"): (0, 0.1),  # timed out after printing
        program("raise SystemExit(1)"): (0, 0.1),
        program("print('no idea')"): (0, 0.2),
        "no program": (0, 0),
        full(SOLVED): (0, 0),
        printing(STANDING): (0, 0.2),
        printing(CLASH): (0, 0.75),
        printing(RIGHT): (0, 0.475),
        program(f"print('found')\nfor row in {rows(SOLVED)!r}.split(): print(*row)"): (1, 1.0),
    }
    plan = check_programs(Sudoku(max_turns=1), PUZZLE, answers, lambda prompt, k: full(SOLVED))
    told = prompt_of(plan).replace("\n> ", "\n")  # the tool user's reply is quoted
    assert list(answers)[-1] in told
    assert f"found\n{rows(SOLVED, ' ')}" in told
    assert "This draft is complete and consistent." in told


def test_full_prompts_name_the_empty_cells_and_a_method() -> None:
    env = Sudoku()
    (_, program), (_, plan) = prompts(env, State.initial(PUZZLE), None)
    for prompt in (program, plan):
        assert (
            "counted from 1 at the top left: (1, 3), (1, 4), (2, 1), (2, 2), (3, 2), (3, 3), (4, 1), (4, 3)." in prompt
        )
    assert "backtracking" in program and "Think step by step" in plan
    assert "(" not in "".join(prompts(Sudoku(style="compact", tool="grid"), State.initial(PUZZLE), None)[0])
