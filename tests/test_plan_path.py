"""Plan-Path: the tasks dealt out, the rewards worked by hand, hostile replies, and whole episodes."""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo import environment
from verl_atgrpo.environment import EnvironmentConfigError, Score, make
from verl_atgrpo.environments import drafting
from verl_atgrpo.environments.drafting import Draft
from verl_atgrpo.environments.grid import PlanPathTask, State, team_reward, walk
from verl_atgrpo.environments.moves import parse_moves, parse_printed
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.splits import split_of
from verl_atgrpo.sandbox import ExecutionResult, Limits, run_python
from verl_atgrpo.team import Decision, EpisodeRecord, ScriptedTeam, play

Script = Callable[[str, int], str]
DELTAS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
STYLES = [{"style": "full", "tool": "moves"}, {"style": "compact", "tool": "moves"}]


def task_from(drawing: str) -> PlanPathTask:
    """The task drawn as lines of `.`, `#`, `P` and `G`."""
    cells = {(r, c): mark for r, line in enumerate(drawing.split()) for c, mark in enumerate(line)}
    (start,) = (cell for cell, mark in cells.items() if mark == "P")
    (goal,) = (cell for cell, mark in cells.items() if mark == "G")
    walls = frozenset(cell for cell, mark in cells.items() if mark == "#")
    return PlanPathTask(len(drawing.split()), walls, start, goal)


CORRIDOR = task_from("P...G ..... ..... ..... .....")
"""Four steps to the right, nothing in the way."""
WALLED = task_from("P#G.. .#... .#.#. ...#. .....")
"""The goal is two columns away and eight steps."""


def grid_in(prompt: str) -> str:
    """The last grid drawn in a prompt."""
    return re.findall(r"(?m)(?:^[.#PG]{2,}$\n?)+", prompt)[-1].strip()


def solve(drawing: str) -> str:
    """A shortest path by a search of this file's own, from the start, on the drawing alone."""
    rows = drawing.split()
    start = next((r, c) for r, line in enumerate(rows) for c, mark in enumerate(line) if mark == "P")
    paths = {start: ""}
    queue = deque([start])
    while queue:
        r, c = queue.popleft()
        for name, (dr, dc) in DELTAS.items():
            cell = (r + dr, c + dc)
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows[0])
            if inside and cell not in paths and rows[cell[0]][cell[1]] != "#":
                paths[cell] = paths[r, c] + name
                if rows[cell[0]][cell[1]] == "G":
                    return paths[cell]
                queue.append(cell)
    raise AssertionError(f"no way to the goal in\n{drawing}")


def full(moves: str) -> str:
    return f"Moves: {', '.join(moves)}"


def full_oracle(prompt: str, k: int) -> str:
    return full(solve(grid_in(prompt)))


def compact_oracle(prompt: str, k: int) -> str:
    return solve(grid_in(prompt))


ORACLES: dict[str, Script] = {"full": full_oracle, "compact": compact_oracle}


def episode(
    env: PlanPath, task: PlanPathTask, tool_user: Script, planner: Script, candidates: int = 1
) -> EpisodeRecord:
    team = ScriptedTeam({"tool_user": tool_user, "planner": planner}, candidates=candidates)
    return asyncio.run(play(env, task, team))


def prompt_of(decision: Decision) -> str:
    return "".join(map(chr, decision.prompt_ids))


def of(agent: str, record: EpisodeRecord) -> list[Decision]:
    return [decision for decision in record.decisions if decision.agent == agent]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Breaks into a loop that does not end."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------ tasks


def test_tasks_are_the_same_in_another_process(tmp_path: Path) -> None:
    code = """
import hashlib, sys
from verl_atgrpo.environment import make
env = make("plan_path", size=6, seed=3)
text = "".join(env.fingerprint(env.task(split, index)) for split in ("train", "val") for index in range(20))
sys.stdout.write(hashlib.sha256(text.encode()).hexdigest())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    env = PlanPath(size=6, seed=3)
    text = "".join(env.fingerprint(env.task(split, index)) for split in ("train", "val") for index in range(20))
    assert done.stdout == hashlib.sha256(text.encode()).hexdigest()


def test_tasks_differ_by_index_split_and_seed() -> None:
    env, other = PlanPath(), PlanPath(seed=1)
    tasks = [env.task(split, index) for split in ("train", "val") for index in range(20)]
    tasks += [other.task("train", index) for index in range(20)]
    assert len({env.fingerprint(task) for task in tasks}) == 60


@pytest.mark.parametrize("options", [{}, {"size": 4, "min_distance": 3}, {"size": 5, "wall_density": 0.5}])
def test_splits_are_disjoint_reachable_and_decided_by_the_grid(options: dict[str, Any]) -> None:
    env = PlanPath(**options)
    prints: dict[str, set[str]] = {"train": set(), "val": set()}
    for split, seen in prints.items():
        for index in range(300):
            task = env.task(split, index)
            assert task.distance[task.start] == len(solve(env.fingerprint(task))) >= env.min_distance
            seen.add(env.fingerprint(task))
    assert not prints["train"] & prints["val"]
    # The grid alone decides, so splits stay disjoint where the seeds differ or the indices run on.
    for split, seen in prints.items():
        assert {split_of(text) for text in seen} == {split}
    other = PlanPath(**options, seed=99)
    assert not {other.fingerprint(other.task("train", index)) for index in range(100)} & prints["val"]


def test_fingerprint_tells_start_and_goal_and_walls_apart() -> None:
    env = PlanPath(size=3, min_distance=1)
    drawings = ["P.G ... ...", "G.P ... ...", "P#G ... ...", "P.. G.. ..."]
    assert len({env.fingerprint(task_from(drawing)) for drawing in drawings}) == 4
    assert env.fingerprint(task_from(drawings[2])) == drawings[2].replace(" ", "\n")


@pytest.mark.parametrize("min_distance", [1, 2])
def test_an_environment_without_tasks_says_so_instead_of_searching_for_ever(min_distance: int) -> None:
    """A 2x2 grid without walls has 12 tasks, 4 of them diagonal: none of those 4 may belong to validation."""
    with time_limit(1):
        try:
            env = make("plan_path", size=2, wall_density=0.0, min_distance=min_distance)
            assert env.task("val", 0).distance
        except EnvironmentConfigError as error:
            assert re.search("size|wall_density|min_distance", str(error))


def test_few_shot_examples_are_solved_and_never_from_validation() -> None:
    env = PlanPath(size=5, tool="moves", few_shot=4)
    *messages, question = env.draft_prompt(State.initial(CORRIDOR))
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 4]
    validation = {env.fingerprint(env.task("val", index)) for index in range(200)}
    for shown, answer in zip(messages[1::2], messages[2::2], strict=True):
        grid = grid_in(shown["content"])
        assert grid not in validation
        moves = env.parse(answer["content"])
        assert moves is not None
        assert len(moves) == len(solve(grid))
        assert walk(State.initial(task_from(grid)), moves).end.solved
    assert grid_in(question["content"]) == CORRIDOR.draw(CORRIDOR.start)


def test_shortest_is_a_shortest_path() -> None:
    env = PlanPath(size=7, wall_density=0.3)
    for index in range(40):
        task = env.task("train", index)
        moves = task.shortest(task.start, random.Random(index))
        assert len(moves) == len(solve(task.draw(task.start)))
        walked = walk(State.initial(task), moves)
        assert walked.end.solved
        assert walked.legal
        assert walked.on_shortest_path
    assert len(WALLED.shortest(WALLED.start, random.Random(0))) == 8
    assert CORRIDOR.shortest(CORRIDOR.goal, random.Random(0)) == ""


# ------------------------------------------------------------------ walking and rewards


@pytest.mark.parametrize(
    ("task", "moves", "end", "legal", "shortest"),
    [
        (CORRIDOR, "RRRR", (0, 4), True, True),
        (CORRIDOR, "RR", (0, 2), True, True),
        (CORRIDOR, "DR", (1, 1), True, False),
        (CORRIDOR, "RRRRD", (0, 4), True, False),  # stops at the goal
        (CORRIDOR, "RURR", (0, 1), False, False),  # stops at the border
        (CORRIDOR, "L", (0, 0), False, False),
        (WALLED, "R", (0, 0), False, False),  # stops at the wall
        (WALLED, "DRDD", (1, 0), False, False),
        (WALLED, "DDDRRUUU", (0, 2), True, True),
        (CORRIDOR, "", (0, 0), True, False),
    ],
)
def test_walk(task: PlanPathTask, moves: str, end: tuple[int, int], legal: bool, shortest: bool) -> None:
    walked = walk(State.initial(task), moves)
    assert (walked.end.position, walked.legal, walked.on_shortest_path) == (end, legal, shortest)
    assert walked.end.solved == (end == task.goal)


@pytest.mark.parametrize(
    ("moves", "team", "local"),
    [
        (None, 0, 0),
        ("RRRR", 1, 1),  # format .1 + legal .1 + shortest .8
        ("RR", 2 / 4, 1),
        ("RRL", 1 / 4, 0.2),
        ("D", 0, 0.2),  # away from the goal
        ("U", 0, 0.1),  # into the border
        ("RRRU", 3 / 4, 0.1),
        ("RRRRD", 1, 0.2),
        ("DRRRRU", 1, 0.2),
    ],
)
def test_scores_by_hand(moves: str | None, team: float, local: float) -> None:
    score = PlanPath(tool="moves").score_answer(State.initial(CORRIDOR), moves)
    assert score.team == pytest.approx(team)
    assert score.local == pytest.approx(local)


def test_progress_is_paid_once_against_the_closest_point() -> None:
    there = walk(State.initial(CORRIDOR), "RR").end
    assert team_reward(State.initial(CORRIDOR), there) == 0.5
    back = walk(there, "L").end
    assert team_reward(there, back) == 0
    assert team_reward(back, walk(back, "R").end) == 0  # (0, 2) was paid before
    assert team_reward(back, walk(back, "RR").end) == 0.25
    assert team_reward(back, walk(back, "RRR").end) == 1


def test_bouncing_earns_nothing_after_the_first_visit() -> None:
    """Trap 4: stepping back and forth paid more than solving."""
    env = PlanPath(size=5, tool="moves", max_turns=30)

    def bounce(prompt: str, k: int) -> str:
        return full("R" if grid_in(prompt).startswith("P") else "L")

    record = episode(env, CORRIDOR, lambda prompt, k: "-", bounce)
    paid = [decision.candidates[0].score.team for decision in of("planner", record)]
    assert paid == [0.25, *[0.0] * 29]
    solved = episode(env, CORRIDOR, lambda prompt, k: "-", full_oracle)
    assert sum(paid) < sum(decision.candidates[0].score.team for decision in of("planner", solved)) == 1
    assert not record.outcome.success
    assert record.outcome.team_reward == 0 < solved.outcome.team_reward == 1
    # At every decision of the way the walk to the goal is worth more than the next bounce.
    state = State.initial(CORRIDOR)
    for step in "RLRLRL":
        best = env.score_answer(state, solve(CORRIDOR.draw(state.position)))
        assert best.mixed(1.0) > env.score_answer(state, step).mixed(1.0)
        state = walk(state, step).end


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("UDLR", min_size=1, max_size=6), max_size=25), st.integers(0, 20))
def test_wandering_never_earns_as_much_as_solving(answers: list[str], index: int) -> None:
    task = PlanPath(size=4, wall_density=0.3).task("train", index)
    state, earned = State.initial(task), 0.0
    for moves in answers:
        after = walk(state, moves).end
        if after.solved:
            break
        earned += team_reward(state, after)
        assert after.closest <= state.closest
        state = after
    assert earned <= (task.distance[task.start] - 1) / task.distance[task.start] + 1e-9 < 1


# ------------------------------------------------------------------ replies


@pytest.mark.parametrize(
    ("reply", "style", "moves"),
    [
        ("Moves: R, D", "full", "RD"),
        ("Moves: RRD", "full", "RRD"),
        ("Moves:R D", "full", "RD"),
        ("First I thought.\nMoves: R, R, D.\n", "full", "RRD"),
        ("Moves: U\nno, better:\nMoves: D", "full", "D"),
        (f"Moves: {', '.join('R' * 9)}", "full", "R" * 9),
        ("RRD", "compact", "RRD"),
        ("  RRD\n", "compact", "RRD"),
        ("R" * 9, "compact", "R" * 9),
    ],
)
def test_parse_moves(reply: str, style: Any, moves: str) -> None:
    assert parse_moves(reply, style, 9) == moves


@pytest.mark.parametrize(
    "reply",
    [
        "",
        " \n",
        "Moves:",
        "Moves: ...",
        "Moves: <letters>",
        "Moves: r, d",
        "Moves: R, D then U",
        "Moves: RIGHT",
        "Moves: \uff32",
        "Mov\u0435s: R",
        "Moves: R\u2028D",
        "The Moves: R",
        "Moves: R\x00D",
        "\U0001f600\ud800",
        "Moves: ['R']",
        full("R" * 10),
        "Moves: " + "R" * 10,
        "[__import__('os').getcwd()]",
    ],
)
def test_replies_without_moves(reply: str) -> None:
    assert parse_moves(reply, "full", 9) is None
    assert parse_moves(reply, "compact", 9) is None


@pytest.mark.parametrize("reply", ["rrd", "R R", "R,R", "RR.", "R" * 10, "R\nD", "\u0280R", "RX"])
def test_compact_replies_are_nothing_but_letters(reply: str) -> None:
    assert parse_moves(reply, "compact", 9) is None


@pytest.mark.parametrize(
    ("output", "moves"),
    [
        ("RRD", "RRD"),
        ("R, R, D\n", "RRD"),
        ("['R', 'R', 'D']", "RRD"),
        ('["R"]', "R"),
        ("('R', 'D')", "RD"),
        ("searching\nLL\n ['R', 'D'] \n\n", "RD"),
    ],
)
def test_parse_printed(output: str, moves: str) -> None:
    assert parse_printed(output, 9) == moves


@pytest.mark.parametrize(
    "output",
    [
        *("", "\n \n", "no way", "RRD\ndone", "R;D", "rrd", "[]", "()", "('R')", "['R'", "['X']", "['RR']", "[1, 2]"),
        *("[['R']]", "{'R': 1}", "['R', None]", "[R, D]", "[\x00]", "['\ud800']", "[" * 5000, "[" + "-" * 9999 + "1]"),
        *("[" + "1+" * 9999 + "1]", "R" * 10, "['R'" + ", 'R'" * 9 + "]", "['\uff32']"),
        # ast.literal_eval raises more than ValueError: TypeError on the first two, OverflowError on the last.
        *("[{[]: 1}]", "[{{}}]", "[" + "9" * 400 + "+1j]"),
    ],
)
def test_printed_garbage_is_no_move_list(output: str) -> None:
    assert parse_printed(output, 9) is None


MEGABYTE = 10**6
HUGE = {
    "moves": "R" * MEGABYTE,
    "answer": "Moves: " + "R, " * (MEGABYTE // 3),
    "answer with a flaw at its end": "Moves: " + "R, " * (MEGABYTE // 3) + "x",
    "gap": "Moves: R" + " " * MEGABYTE + "x",
    "commas": "Moves: R" + ", " * (MEGABYTE // 2) + "x",
    "points": "Moves: R" + " ." * (MEGABYTE // 2) + "x",
    "blank answer": "Moves:" + " " * MEGABYTE + "x",
    "answers": "Moves: R\n" * (MEGABYTE // 9) + "Moves: x",
    "openings": "Moves: " * (MEGABYTE // 7),
    "lines": "\n" * MEGABYTE,
    "unicode": "\u00e9\U0001f600" * (MEGABYTE // 2),
    "brackets": "[" * MEGABYTE,
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE.keys())
def test_a_megabyte_is_read_quickly(text: str) -> None:
    before = time.process_time()
    parse_moves(text, "full", 40)
    parse_moves(text, "compact", 40)
    parse_printed(text, 40)
    assert time.process_time() - before < 1.5


def test_all_that_a_program_may_print_is_read_quickly() -> None:
    # The event loop of the rollout waits meanwhile, and with it every other episode of the worker.
    text = f"[{','.join(['1'] * (Limits().output_bytes // 2 - 2))}]"
    before = time.process_time()
    assert parse_printed(text, 40) is None
    assert time.process_time() - before < 0.5


def test_model_output_is_never_evaluated(tmp_path: Path) -> None:
    """Trap 3: the reference code parsed answers with eval()."""
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


def states_on_the_way() -> list[State]:
    state = State.initial(WALLED)
    return [state, walk(state, "DD").end, walk(state, "DDDRR").end, walk(state, "DDDRRUUL").end]


@pytest.mark.parametrize("options", [*STYLES, {"style": "full", "tool": "python"}])
def test_echoing_a_prompt_earns_nothing(options: dict[str, Any]) -> None:
    env = PlanPath(size=5, **options)
    for state in states_on_the_way():
        solution = solve(WALLED.draw(state.position))
        drafts = [Draft("no idea", None)]
        for moves in (solution, solution[:-1], "L", "U" * 3):
            program = f"Moves: R\n```python\nprint({list(moves)})\n```\nMoves: {', '.join(moves)}"
            drafts.append(Draft(program, moves, str(list(moves)), True))
        prompts = [env.draft_prompt(state), *(env.plan_prompt(state, draft) for draft in drafts)]
        for prompt in prompts:
            contents = [message["content"] for message in prompt]
            for text in ("\n".join(contents), *contents, contents[-1].splitlines()[-1]):
                assert env.score_answer(state, env.parse(text)) == Score(0, 0)


@pytest.mark.parametrize("options", [*STYLES, {"style": "full", "tool": "python"}])
def test_a_team_of_parrots_earns_nothing(options: dict[str, Any]) -> None:
    env = PlanPath(size=5, max_turns=2, **options)
    record = episode(env, WALLED, lambda prompt, k: prompt, lambda prompt, k: prompt)
    assert [decision.candidates[0].reward for decision in record.decisions] == [0] * 4
    assert not record.outcome.success
    assert record.outcome.team_reward == 0


almost = st.text("UDLR, .", max_size=30)
replies = st.one_of(st.text(), almost, almost.map("Moves: {}".format), almost.map("so\nMoves: {}\n".format))


@settings(deadline=None, max_examples=100)
@given(replies, st.sampled_from(["full", "compact"]), st.sampled_from(states_on_the_way()))
def test_any_reply_gets_a_finite_score_and_leaves_the_state_alone(reply: str, style: Any, state: State) -> None:
    env = PlanPath(size=5, style=style, tool="moves")
    before = copy.deepcopy(state)
    moves = env.parse(reply)
    assert moves is None or set(moves) <= set("UDLR")
    assert moves is None or 1 <= len(moves) <= env.max_moves
    score = env.score_answer(state, moves)
    assert math.isfinite(score.mixed(1.0))
    assert 0 <= score.team <= 1
    assert 0 <= score.local <= 1 + 1e-9
    assert (moves is None) == (score == Score())
    assert state == before
    assert state.task.distance == before.task.distance
    assert env.score_answer(state, moves) == score
    printed = parse_printed(reply, env.max_moves)
    assert printed is None or set(printed) <= set("UDLR")


def test_the_order_of_scoring_does_not_matter() -> None:
    env = PlanPath(size=5, tool="moves")
    state = walk(State.initial(WALLED), "DD").end
    answers = ["DRRUUU", "D", "U", "L", None, "DRR"]
    forward = [env.score_answer(state, moves) for moves in answers]
    assert [env.score_answer(state, moves) for moves in reversed(answers)] == forward[::-1]


# ------------------------------------------------------------------ episodes


@pytest.mark.parametrize("options", STYLES)
def test_the_prompt_shows_where_the_walker_is(options: dict[str, Any]) -> None:
    """Trap 4: the reference prompt shows the start, not the current position."""
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
    assert illegal != question("RR")  # where it leads is the same, but one of them hits the border
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
    assert record.outcome.success  # the walker moved by the committed plan, once


@pytest.mark.parametrize("options", STYLES)
def test_a_scripted_oracle_solves_every_task(options: dict[str, Any]) -> None:
    env = PlanPath(size=6, **options)
    oracle = ORACLES[options["style"]]
    for index in range(10):
        record = episode(env, env.task("val", index), lambda prompt, k: "-", oracle)
        assert record.outcome.success
        assert record.outcome.team_reward == 1
        assert record.outcome.metrics["turns"] == 1
        assert [decision.candidates[0].reward for decision in record.decisions] == pytest.approx([0, 2])


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


@pytest.mark.parametrize("options", STYLES)
def test_the_single_agent_is_asked_what_the_team_is_asked(options: dict[str, Any]) -> None:
    """The comparison is fair only with the same prompts, feedback, calls and turns."""
    compact = options["style"] == "compact"

    def answer(prompt: str, k: int) -> str:
        moves = solve(grid_in(prompt))[:1]
        return moves if compact else full(moves)

    team = PlanPath(size=5, max_turns=3, **options)
    single = make("plan_path_single", size=5, max_turns=3, **options)
    record = episode(team, WALLED, answer, answer)
    alone = asyncio.run(play(single, WALLED, ScriptedTeam({"solo": answer})))
    assert [decision.prompt_ids for decision in alone.decisions] == [
        decision.prompt_ids for decision in record.decisions
    ]
    assert len(alone.decisions) == 6
    assert [decision.turn for decision in alone.decisions] == list(range(6))
    assert alone.outcome == record.outcome
    assert single.agents == ("solo",)
    assert single.task("val", 3) == team.task("val", 3)


# ------------------------------------------------------------------ python tool


def program(code: str) -> str:
    return f"Let me see.\n```python\n{code}\n```\n"


def test_programs_of_the_tool_user_are_run_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(run_python, limits=Limits(cpu_seconds=1, wall_seconds=2.0))
    monkeypatch.setattr(drafting, "run_python", quick)
    answers = {
        program("print(list('RRRR'), flush=True)\nwhile True: pass"): (0, 0.1),  # timed out, though it printed the way
        program("raise SystemExit(1)"): (0, 0.1),
        program("print(list('RRRR'))\nraise ValueError"): (0, 0.1),
        program("print('no idea')"): (0, 0.2),
        "no program": (0, 0),
        program("print(list('RR'))"): (0.5, 1.0),
        program("moves = []\nfor _ in range(4): moves.append('R')\nprint('found')\nprint(moves)"): (1, 1.0),
    }
    texts = list(answers)
    env = PlanPath(size=5, max_turns=1)
    record = episode(env, CORRIDOR, lambda prompt, k: texts[k], full_oracle, candidates=len(texts))
    draft, plan = record.decisions
    teams, locals_ = zip(*answers.values(), strict=True)
    assert [candidate.score.team for candidate in draft.candidates] == pytest.approx(teams)
    assert [candidate.score.local for candidate in draft.candidates] == pytest.approx(locals_)
    assert draft.committed == len(texts) - 1
    told = prompt_of(plan)
    assert textwrap.indent(texts[-1], "> ") in told
    assert "['R', 'R', 'R', 'R']" in told
    assert "R, R, R, R. They lead to the goal" in told
    assert record.outcome.success


def test_the_planner_is_told_what_the_scored_run_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may print something else each time; the draft shown must be the one that was scored."""
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


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 1}, "size=1"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_moves": 0}, "max_moves=0"),
        ({"wall_density": 0.7}, "wall_density=0.7"),
        ({"wall_density": -0.1}, "wall_density=-0.1"),
        ({"wall_density": math.nan}, "wall_density=nan"),
        ({"min_distance": 0}, "min_distance=0"),
        ({"size": 5, "min_distance": 6}, "min_distance=6"),
        ({"tool": "bash"}, "tool='bash'"),
        ({"style": "terse"}, "style='terse'"),
        ({"style": "compact"}, "style=compact"),
        ({"few_shot": 2}, "few_shot=2"),
        ({"few_shot": 2, "tool": "moves", "style": "compact"}, "few_shot=2"),
    ],
)
def test_option_errors_name_key_and_value(options: dict[str, Any], named: str) -> None:
    for name in ("plan_path", "plan_path_single"):
        with pytest.raises(EnvironmentConfigError, match=re.escape(f"at_grpo.environment.{named}")) as caught:
            make(name, **options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"size": "5"},
        {"size": 5.5},
        {"max_turns": None},
        {"max_moves": [4]},
        {"wall_density": "high"},
        {"few_shot": -1, "tool": "moves"},
        {"few_shot": "two", "tool": "moves"},
    ],
)
def test_options_of_a_wrong_kind_are_refused_by_name(options: dict[str, Any]) -> None:
    key = next(iter(options))
    with pytest.raises(EnvironmentConfigError, match=key):
        make("plan_path", **options)


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
    monkeypatch.setattr(environment, "_REGISTRY", dict(environment._REGISTRY))
    by_path = make("verl_atgrpo.environments.plan_path:PlanPath", size=5)
    by_name = make("plan_path", size=5)
    assert type(by_path) is type(by_name) is PlanPath
    assert by_path.task("train", 0) == by_name.task("train", 0)
    environment.register("mine", PlanPath)
    environment.register("mine", PlanPath)  # again the same: no harm
    assert isinstance(make("mine", size=4), PlanPath)
    assert "mine" in environment.registered()
    with pytest.raises(ValueError, match="'mine' is already registered"):
        environment.register("mine", "elsewhere:Env")
