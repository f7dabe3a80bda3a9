"""Plan-Path with a team: episodes, programs, options."""

from __future__ import annotations

import functools
import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fakes.plan_path_players import CORRIDOR, STYLES, WALLED, full, full_oracle, grid_in, solve, task_from
from fakes.scripted_episodes import check_programs, episode, of, prompt_of
from growth import assert_linear
from waiting import HANG

from verl_atgrpo import EnvironmentConfigError, Score, make
from verl_atgrpo.environments.common import drafting
from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.common.moves import parse_moves, parse_printed
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.plan_path.grid import State, walk
from verl_atgrpo.play import registry
from verl_atgrpo.sandbox.runner import ExecutionResult, Limits, run_python

# ------------------------------------------------------------------ episodes


@pytest.mark.parametrize("options", STYLES)
def test_the_prompt_shows_where_the_walker_is(options: dict[str, Any]) -> None:
    """The reference prompt shows the start, not the current position."""
    env = PlanPath(size=5, max_turns=3, **options)
    answer = "RR" if options["style"] == "compact" else full("RR")
    record = episode(env, task_from("P.... ....G ..... ..... ....."), lambda prompt, k: "-", lambda prompt, k: answer)
    asked = [grid_in(prompt_of(decision)).split() for decision in record.decisions]
    assert [grid[0] for grid in asked] == ["P....", "P....", "..P..", "..P..", "....P", "....P"]
    assert len({prompt_of(decision) for decision in of("tool_user", record)}) == 3
    assert record.outcome.team_reward == pytest.approx(4 / 5)


@pytest.mark.parametrize("options", STYLES)
def test_the_planner_sees_the_draft_and_where_it_leads(options: dict[str, Any]) -> None:
    env = PlanPath(size=5, max_turns=1, **options)
    compact = options["style"] == "compact"

    def question(moves: str) -> str:
        tool_user = moves if compact else full(moves)
        record = episode(env, CORRIDOR, lambda prompt, k: tool_user, lambda prompt, k: "-")
        (decision,) = of("planner", record)
        prompt = prompt_of(decision)
        return prompt[prompt.rindex(grid_in(prompt)) :]

    def listed(moves: str) -> str:
        return moves if compact else ", ".join(moves)

    assert listed("RRRR") in question("RRRR")
    assert "goal" in question("RRRR")
    short, illegal, invalid = question("RRD"), question("RRU"), question("?")
    assert listed("RRD") in short
    assert "goal" not in short
    assert ("12" if compact else "row 1, column 2") in short
    assert ("02" if compact else "row 0, column 2") in illegal
    assert illegal != question("RR")  # both lead to the same cell, but one hits the border
    assert "none" in invalid if compact else "no valid moves" in invalid


def test_the_planner_sees_the_committed_draft() -> None:
    env = PlanPath(size=5, tool="moves", max_turns=1)
    drafts = [full("D"), full("RRRR"), full("RR"), "-"]
    record = episode(env, CORRIDOR, lambda prompt, k: drafts[k], lambda prompt, k: full("R" * (k + 1)), candidates=4)
    draft, plan = record.decisions
    assert draft.committed == 1
    assert [candidate.reward for candidate in draft.candidates] == pytest.approx([0.2, 2, 1.5, 0])
    assert "R, R, R, R" in prompt_of(plan)
    assert [candidate.reward for candidate in plan.candidates] == pytest.approx([1.25, 1.5, 1.75, 2])
    assert record.outcome.success  # the walker moved once, by the committed plan


def test_running_out_of_turns_is_not_success() -> None:
    env = PlanPath(size=5, tool="moves", max_turns=3)
    for answer, share in (("-", 0), (full("R"), 3 / 4), (full("DU"), 0), (full("RRLL"), 0)):
        record = episode(env, CORRIDOR, lambda prompt, k: "-", lambda prompt, k, answer=answer: answer)
        assert len(record.decisions) == 6
        assert not record.outcome.success
        assert record.outcome.team_reward == pytest.approx(share)
        assert record.outcome.metrics["turns"] == 3


def test_the_goal_on_the_last_turn_is_success() -> None:
    env = PlanPath(size=5, tool="moves", max_turns=4)
    record = episode(env, CORRIDOR, lambda prompt, k: "-", lambda prompt, k: full("R"))
    assert record.outcome.success
    assert record.outcome.metrics["turns"] == 4
    assert [decision.candidates[0].score.team for decision in of("planner", record)] == [0.25, 0.25, 0.25, 1]


# ------------------------------------------------------------------ python tool


def program(code: str) -> str:
    return f"Let me see.\n```python\n{code}\n```\n"


def test_programs_of_the_tool_user_are_run_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(run_python, limits=Limits(cpu_seconds=1, wall_seconds=HANG))
    monkeypatch.setattr(drafting, "run_python", quick)
    answers = {
        program("print(list('RRRR'), flush=True)\nwhile True: pass"): (0, 0.1),  # timed out after printing the path
        program("raise SystemExit(1)"): (0, 0.1),
        program("print(list('RRRR'))\nraise ValueError"): (0, 0.1),
        program("print('no idea')"): (0, 0.2),
        "no program": (0, 0),
        program("print(list('RR'))"): (0.5, 0.7),
        program("print(list('U'))"): (0, 0.4),
        program("moves = []\nfor _ in range(4): moves.append('R')\nprint('found')\nprint(moves)"): (1, 1.0),
    }
    shown = prompt_of(check_programs(PlanPath(size=5, max_turns=1), CORRIDOR, answers, full_oracle))
    assert textwrap.indent(list(answers)[-1], "> ") in shown
    assert "['R', 'R', 'R', 'R']" in shown
    assert "R, R, R, R. They lead to the goal" in shown


def test_the_planner_sees_the_output_of_the_scored_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's output may vary; the draft in the prompt must be the one that was scored."""
    outputs = iter(["['R', 'R', 'R', 'R']", "['D']", "['D']"])

    async def unsteady(code: str, **kwargs: Any) -> ExecutionResult:
        return ExecutionResult(next(outputs), "", 0, timed_out=False, output_truncated=False)

    monkeypatch.setattr(drafting, "run_python", unsteady)
    env = PlanPath(size=5, max_turns=1)
    record = episode(
        env, CORRIDOR, lambda prompt, k: program("import random"), lambda prompt, k: full("R"), candidates=3
    )
    draft, plan = record.decisions
    committed = draft.candidates[draft.committed]
    assert (committed.score.team == 1) == ("They lead to the goal" in prompt_of(plan))


def test_the_longest_output_of_a_program_is_read_quickly() -> None:
    # Parsing blocks the worker's event loop and so all its episodes.
    most = Limits().output_bytes // 2 - 2

    def read(numbers: int) -> None:
        assert parse_printed(f"[{','.join(['1'] * numbers)}]", 40) is None

    assert_linear(read, most // 2)


def test_model_output_is_never_evaluated(tmp_path: Path) -> None:
    """The reference code parses answers with eval()."""
    witness = tmp_path / "touched"
    attack = f"[__import__('os').system('touch {witness}')]"
    for text in (attack, f"Moves: {attack}", f"noise\n{attack}", f"(lambda: {attack})()"):
        assert parse_moves(text, "full", 40) is None
        assert parse_moves(text, "compact", 40) is None
        assert parse_printed(text, 40) is None
    env = PlanPath(size=5, max_turns=1)
    program = f"```python\nprint({attack!r})\n```"
    record = episode(env, CORRIDOR, lambda prompt, k: program, lambda prompt, k: attack)
    assert [decision.candidates[0].reward for decision in record.decisions] == pytest.approx([0.2, 0])
    assert not witness.exists()


# ------------------------------------------------------------------ options


def test_make_refuses_what_it_does_not_know() -> None:
    with pytest.raises(EnvironmentConfigError, match=r"'plan_pth' is unknown.*plan_path, plan_path_single"):
        make("plan_pth")
    with pytest.raises(EnvironmentConfigError, match=r"environment\.sise is not an option of 'plan_path'.*size"):
        make("plan_path", sise=5)
    with pytest.raises(EnvironmentConfigError, match="no_such_module"):
        make("no_such_module:PlanPath")
    with pytest.raises(EnvironmentConfigError, match="no class 'Nothing'"):
        make("verl_atgrpo.environments.plan_path:Nothing")


def test_make_builds_by_name_by_path_and_by_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    by_path = make("verl_atgrpo.environments.plan_path:PlanPath", size=5)
    by_name = make("plan_path", size=5)
    assert type(by_path) is type(by_name) is PlanPath
    assert by_path.task("train", 0) == by_name.task("train", 0)
    registry.register("mine", PlanPath)
    registry.register("mine", PlanPath)  # again the same: no harm
    assert isinstance(make("mine", size=4), PlanPath)
    assert "mine" in registry.registered()
    with pytest.raises(ValueError, match="'mine' is already registered"):
        registry.register("mine", "elsewhere:Env")


# ------------------------------------------------------------------ prompts of instruct models


def test_full_prompts_have_all_positions_and_a_method() -> None:
    env = PlanPath(size=5)
    state = walk(State.initial(WALLED), "DD").end
    program, plan = env.draft_prompt(state)[-1]["content"], env.plan_prompt(state, Draft("-", "D"))[-1]["content"]
    for prompt in (program, plan):
        assert f"P is at {state.position}, G is at {WALLED.goal}, walls are at (0, 1), (1, 1), " in prompt
    assert "breadth-first search" in program and "must print" in program
    assert "Think step by step" in plan and plan.index("Think") < plan.index("'Moves: ...'")


def test_prompts_with_examples_and_compact_ones_ask_for_the_answer_at_once() -> None:
    for options in ({"tool": "moves", "few_shot": 2}, {"tool": "moves", "style": "compact"}):
        env = PlanPath(size=5, **options)  # type: ignore[arg-type]
        for prompt in (
            env.draft_prompt(State.initial(WALLED)),
            env.plan_prompt(State.initial(WALLED), Draft("", "D")),
        ):
            assert not any(word in message["content"] for message in prompt for word in ("step by step", "(0, 1)"))


@pytest.mark.parametrize("state", [State.initial(WALLED), walk(State.initial(WALLED), "DDD").end])
def test_a_printed_list_that_solves_earns_most_and_one_without_progress_less_than_half(state: State) -> None:
    env = PlanPath(size=5)
    best = env.score_printed(state, solve(WALLED.draw(state.position)))
    assert best == Score(1, 1)
    lists = ["".join(moves) for length in range(1, 5) for moves in itertools.product("UDLR", repeat=length)]
    for moves in lists:
        score = env.score_printed(state, moves)
        assert score.local < best.local
        if walk(state, moves).end.closest == state.closest:
            assert score == Score(0, 0.4)
