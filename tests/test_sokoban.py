"""Sokoban: the boards dealt out, moves and deadlocks, the solver, the rewards worked by hand, and whole episodes."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
import logging
import math
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo.environment import EnvironmentConfigError, Score, make
from verl_atgrpo.environments.drafting import Draft
from verl_atgrpo.environments.sokoban import SingleSokoban, Sokoban
from verl_atgrpo.environments.sokoban_board import SokobanTask, State, walk
from verl_atgrpo.environments.sokoban_levels import read_levels
from verl_atgrpo.environments.sokoban_solver import solve
from verl_atgrpo.environments.splits import split_of
from verl_atgrpo.team import Decision, EpisodeRecord, ScriptedTeam, play

Script = Callable[[str, int], str]
Position = tuple[int, frozenset[int]]
"""Player and boxes."""
BOXOBAN = Path("/work/shared/data/boxoban_medium.txt")
STYLES: list[dict[str, Any]] = [{"style": "full", "tool": "moves"}, {"style": "compact", "tool": "moves"}]


def board(*rows: str) -> SokobanTask:
    """The board with these inner rows (`_` is floor), walled in."""
    border = "#" * (len(rows[0]) + 2)
    return SokobanTask("\n".join([border, *(f"#{row}#" for row in rows), border]).replace("_", " "))


ROOM = board("_____", "@$__.", "_____")
"""One box, three pushes to the right."""
TWO = board("@$_._", "_____", "_$_._")
"""Two boxes, two pushes to the right each."""
ROUND_TRIP = ["R", "URRDL", "ULLDR", "URRDL", "ULLDR"]
"""In ROOM: a push to the right, then back, and so on."""


def full(moves: str) -> str:
    return f"Moves: {', '.join(moves)}"


def board_in(prompt: str) -> SokobanTask:
    """The first board drawn in a prompt: the one that the question is about."""
    found = re.search(r"(?m)(?:^[-#.$*@+]{5,}$\n?)+", prompt)
    assert found
    return SokobanTask(found[0].strip().replace("-", " "))


def oracle(prompt: str, k: int) -> str:
    return full(solve(board_in(prompt)) or "U")


def compact_oracle(prompt: str, k: int) -> str:
    return solve(board_in(prompt)) or "U"


def nothing(prompt: str, k: int) -> str:
    return "-"


def in_turn(*answers: str) -> Script:
    """A script of answers given one after the other, whatever is asked."""
    left = itertools.cycle(answers)
    return lambda prompt, k: next(left)


def episode(env: Sokoban, task: SokobanTask, tool_user: Script, planner: Script, candidates: int = 1) -> EpisodeRecord:
    team = ScriptedTeam({"tool_user": tool_user, "planner": planner}, candidates=candidates)
    return asyncio.run(play(env, task, team))


def of(agent: str, record: EpisodeRecord) -> list[Decision]:
    return [decision for decision in record.decisions if decision.agent == agent]


def earned(agent: str, record: EpisodeRecord) -> list[float]:
    return [decision.candidates[decision.committed].reward for decision in of(agent, record)]


def prompt_of(decision: Decision) -> str:
    return "".join(map(chr, decision.prompt_ids))


def moved(task: SokobanTask, position: Position, name: str) -> Position | None:
    """What a move comes to, by the rules alone; None if it is blocked."""
    player, boxes = position
    row = task.drawing.index("\n") + 1
    step = {"U": -row, "D": row, "L": -1, "R": 1}[name]
    ahead, beyond = player + step, player + 2 * step
    if task.drawing[ahead] == "#":
        return None
    if ahead not in boxes:
        return ahead, boxes
    return None if beyond in boxes or task.drawing[beyond] == "#" else (ahead, boxes - {ahead} | {beyond})


def distances(task: SokobanTask) -> dict[Position, float]:
    """Moves to a solution from every position that play can come to (infinite: none), by trying everything."""
    start = (task.player, task.boxes)
    before: dict[Position, list[Position]] = {start: []}
    queue = deque([start])
    while queue:
        position = queue.popleft()
        for name in "UDLR":
            after = moved(task, position, name)
            if after is not None:
                if after not in before:
                    before[after] = []
                    queue.append(after)
                before[after].append(position)
    queue = deque(position for position in before if position[1] == task.targets)
    steps: dict[Position, float] = dict.fromkeys(queue, 0)
    while queue:
        position = queue.popleft()
        for earlier in before[position]:
            if earlier not in steps:
                steps[earlier] = steps[position] + 1
                queue.append(earlier)
    return {position: steps.get(position, math.inf) for position in before}


# ------------------------------------------------------------------ moves


@pytest.mark.parametrize(
    ("task", "moves", "after", "legal"),
    [
        (ROOM, "R", board("_____", "_@$_.", "_____"), True),
        (ROOM, "RRR", board("_____", "___@*", "_____"), True),
        (ROOM, "RRRLLUD", board("_____", "___@*", "_____"), True),  # stops when solved
        (ROOM, "L", ROOM, False),
        (ROOM, "UURR", board("@____", "_$__.", "_____"), False),  # stops at the wall
        (ROOM, "URRR", board("___@_", "_$__.", "_____"), True),
        (ROOM, "URD", board("_____", "_@__.", "_$___"), True),
        (ROOM, "URDD", board("_____", "_@__.", "_$___"), False),  # the wall is behind the box
        (board("_____", "@$$_.", "____."), "R", board("_____", "@$$_.", "____."), False),  # two boxes in a row
        (board("@$.$."), "RR", board("_@*$."), False),
        (board("@._$_", "_$_._"), "R", board("_+_$_", "_$_._"), True),
        (board("@*__", "_$._"), "R", board("_+$_", "_$._"), True),
        (ROOM, "", ROOM, True),
    ],
)
def test_moves_and_pushes(task: SokobanTask, moves: str, after: SokobanTask, legal: bool) -> None:
    walked = walk(State.initial(task), moves)
    assert walked.end.draw() == after.drawing
    assert walked.legal == legal
    assert walked.end.solved == ("$" not in after.drawing)


@settings(deadline=None, max_examples=60)
@given(st.text("UDLR", max_size=30), st.integers(0, 30))
def test_moves_follow_the_rules_on_any_board(moves: str, index: int) -> None:
    task = Sokoban(boxes=3).task("train", index)
    position: Position | None = (task.player, task.boxes)
    last = (task.player, task.boxes)
    for name in moves:
        if last[1] == task.targets:
            break
        position = moved(task, last, name)
        if position is None:
            break
        last = position
    walked = walk(State.initial(task), moves)
    assert (walked.end.player, walked.end.boxes) == last
    assert walked.legal == (position is not None)


# ------------------------------------------------------------------ deadlocks and the solver


@pytest.mark.parametrize(
    ("task", "dead"),
    [
        (ROOM, False),
        (board("$____", "@___.", "_____"), True),  # a corner
        (board("__$__", "@___.", "_____"), True),  # along a wall without a target
        (board("__$_.", "@____", "_____"), False),  # along a wall with one
        (board("_____", "@$$__", "_$*__", "____.", "_..__"), True),  # a square of boxes, one on its target
        (
            board("_____", "@**__", "_**__", "_____", "_$__."),
            False,
        ),  # a square of boxes that are all where they belong
        (board("_____", "_#$__", "@_$#_", "_____", "..___"), False),  # a box may leave
        (board("_____", "_#$__", "@#$__", "_____", "..___"), True),
    ],
)
def test_deadlocks_by_hand(task: SokobanTask, dead: bool) -> None:
    assert task.deadlocked(task.boxes) == dead
    if dead:
        assert solve(task) is None


@pytest.mark.parametrize(
    ("options", "tasks"),
    [({"size": 5, "boxes": 2}, 25), ({"boxes": 2, "wall_density": 0.3}, 25), ({"boxes": 3, "wall_density": 0.3}, 4)],
)
def test_deadlocks_and_bounds_are_sound_wherever_play_can_go(options: dict[str, Any], tasks: int) -> None:
    """Against every position of many boards: nothing that can be solved is called a deadlock."""
    env = Sokoban(**options)
    flagged = lost = 0
    for index in range(tasks):
        task = env.task("train", index)
        left = distances(task)
        solution = solve(task)
        assert solution is not None
        assert len(solution) == left[task.player, task.boxes]
        for (_, boxes), steps in left.items():
            lost += steps == math.inf
            flagged += task.deadlocked(boxes)
            assert task.potential(boxes) <= steps
            if task.deadlocked(boxes):
                assert steps == math.inf
            assert (task.potential(boxes) == 0) == (boxes == task.targets)
    assert flagged > lost / 2  # and it is good for something


@pytest.mark.parametrize(
    ("task", "length"),
    [
        (ROOM, 3),
        (TWO, 8),
        (board("@$."), 1),
        (board("_.##", "__##", "*@__", "__$_", "__##"), 33),  # the first of David W. Skinner's Microban
        (board("_____", "$@__.", "_____"), None),  # against the wall on the far side
        (board("@#$.", "_#__", "_#__"), None),  # cannot be reached
    ],
)
def test_solver_on_boards_of_known_length(task: SokobanTask, length: int | None) -> None:
    solution = solve(task)
    assert (None if solution is None else len(solution)) == length
    if solution is not None and length is not None:
        walked = walk(State.initial(task), solution)
        assert walked.end.solved
        assert walked.legal
        assert solve(task, below=length) is None
        assert solve(task, below=length + 1) == solution


# ------------------------------------------------------------------ boards


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 5},
        {"boxes": 2},
        {"boxes": 3, "wall_density": 0.3},
        {"size": 8, "boxes": 2, "wall_density": 0.0},
        {"min_solution": 12},
        {"boxes": 2, "min_solution": 14},
    ],
)
def test_generated_boards_can_be_solved(options: dict[str, Any]) -> None:
    env = Sokoban(**options)
    size, boxes = options.get("size", 6), options.get("boxes", 1)
    for index in range(12):
        task = env.task("val", index)
        assert [len(row) for row in task.drawing.split("\n")] == [size] * size
        assert len(task.boxes) == len(task.targets) == boxes
        assert not task.boxes & task.targets
        solution = solve(task)
        assert solution is not None
        assert len(solution) >= options.get("min_solution", 1)
        assert walk(State.initial(task), solution).end.solved
        assert task.draw(task.player, task.boxes) == task.drawing


def test_splits_are_disjoint_and_decided_by_the_board() -> None:
    env, other = Sokoban(), Sokoban(seed=1)
    prints = {split: {env.fingerprint(env.task(split, index)) for index in range(300)} for split in ("train", "val")}
    assert not prints["train"] & prints["val"]
    for split, seen in prints.items():
        assert {split_of(text) for text in seen} == {split}
        assert len(seen) > 250
    drawn = {other.fingerprint(other.task("train", index)) for index in range(300)}
    assert not drawn & prints["val"]
    assert drawn != prints["train"]
    assert env.size("train") is None


def test_boards_are_the_same_in_another_process(tmp_path: Path) -> None:
    code = """
import hashlib, sys
from verl_atgrpo.environment import make
env = make("sokoban", boxes=2, min_solution=8, seed=3)
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
    # Written down, so that a Python version that draws otherwise is noticed.
    assert done.stdout == "0dac455f204d924fe671dc5ef988306c2a93418342e61d937c9e596b21f78f46"
    env = Sokoban(boxes=2, min_solution=8, seed=3)
    text = "".join(env.fingerprint(env.task(split, index)) for split in ("train", "val") for index in range(20))
    assert done.stdout == hashlib.sha256(text.encode()).hexdigest()


def level_file(folder: Path, *levels: str) -> str:
    path = folder / "levels.txt"
    path.write_text("\n".join(f"; {number}\n{level}\n" for number, level in enumerate(levels)))
    return str(path)


@pytest.mark.skipif(not BOXOBAN.exists(), reason=f"the Boxoban levels are not at {BOXOBAN}")
def test_boxoban_levels_are_read_as_they_are_drawn() -> None:
    levels = read_levels(str(BOXOBAN))
    assert len(levels) == 513  # of 514: the file breaks off in the last one
    text = BOXOBAN.read_text()
    for number, task in enumerate(levels):
        assert f"; {number}\n{task.draw(task.player, task.boxes)}\n" in text
        assert State.initial(task).draw() == task.drawing
        assert len(task.boxes) == len(task.targets) == 4
        assert task.stride == 11
    env = Sokoban(levels=str(BOXOBAN))
    sizes = {split: env.size(split) for split in ("train", "val")}
    assert sizes["train"] + sizes["val"] == 513
    assert 40 < sizes["val"] < 90
    dealt = [env.fingerprint(env.task(split, index)) for split, size in sizes.items() for index in range(size)]
    assert len(set(dealt)) == 513
    assert {split_of(text) for text in dealt[: sizes["train"]]} == {"train"}
    assert {split_of(text) for text in dealt[sizes["train"] :]} == {"val"}
    with pytest.raises(IndexError):
        env.task("val", sizes["val"])


def test_what_is_no_level_is_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = [
        ROOM.drawing.replace("@", " "),
        ROOM.drawing.replace(" ", "@"),
        ROOM.drawing.replace(".", " "),
        ROOM.drawing.replace(" ", "x", 1),
        ROOM.drawing[:-3],
        ROOM.drawing.replace("#\n", " \n"),
        board("_@_*_").drawing,  # solved
        board("$____", "@___.", "_____").drawing,  # a box in a corner
        "#",
    ]
    with caplog.at_level(logging.WARNING):
        levels = read_levels(level_file(tmp_path, ROOM.drawing, *broken, TWO.drawing, ROOM.drawing))
    assert levels == (ROOM, TWO)
    assert f"{len(broken)} of {len(broken) + 3} levels" in caplog.text
    with pytest.raises(EnvironmentConfigError, match=r"at_grpo\.environment\.levels=.*no level in it"):
        read_levels(level_file(tmp_path, *broken))


# ------------------------------------------------------------------ rewards


@pytest.mark.parametrize(
    ("task", "moves", "team", "local"),
    [
        (ROOM, None, 0, 0),
        (ROOM, "RRR", 1, 1),  # format .1, legal .1, clear of deadlocks .8
        (ROOM, "RRRR", 1, 1),
        (ROOM, "R", 0, 1),
        (ROOM, "U", 0, 0.2),  # the boxes stand where they stood
        (ROOM, "UDUDUD", 0, 0.2),
        (ROOM, "RURRDL", 0, 0.2),  # there and back again
        (ROOM, "L", 0, 0.1),
        (ROOM, "URD", 0, 0.2),  # to a wall without a target
        (ROOM, "RDLLL", 0, 0.9),  # into the wall after a fair push
        (TWO, "RR", 1 / 2, 1),
        (TWO, "RRDLLDRR", 1, 1),
        (TWO, "RRR", 0, 0.2),  # past the target into the corner
        (board("@*__", "_$._"), "R", 0, 1),  # off its target: not paid, and not taken away
    ],
)
def test_scores_by_hand(task: SokobanTask, moves: str | None, team: float, local: float) -> None:
    score = Sokoban(tool="moves").score_answer(State.initial(task), moves)
    assert score.team == pytest.approx(team)
    assert score.local == pytest.approx(local)


@pytest.mark.parametrize(
    ("task", "moves", "team", "local"),
    [
        (ROOM, "RRR", 1, 1),
        (ROOM, "R", 0, 0.2 + 0.8 / 3),
        (ROOM, "RR", 0, 0.2 + 0.8 * 2 / 3),
        (ROOM, "U", 0, 0.2),
        (ROOM, "L", 0, 0.2),
        (ROOM, "URD", 0, 0.2),
        (TWO, "RR", 1 / 2, 0.2 + 0.8 * 2 / 4),
    ],
)
def test_scores_of_printed_moves_by_hand(task: SokobanTask, moves: str, team: float, local: float) -> None:
    score = Sokoban().score_printed(State.initial(task), moves)
    assert score.team == pytest.approx(team)
    assert score.local == pytest.approx(local)


def test_progress_is_paid_once() -> None:
    env = Sokoban(tool="moves")
    state = State.initial(TWO)
    paid = []
    for moves in ("RR", "DRRUL", "DLLUR", "DRRUL", "DLLUR"):  # on the target, off it, on it again ...
        paid.append((env.score_answer(state, moves), env.score_printed(state, moves)))
        state = walk(state, moves).end
    assert [(round(score.team, 9), round(score.local, 9)) for score, _ in paid] == [(0.5, 1.0), *[(0.0, 0.2)] * 4]
    assert [(score.team, round(score.local, 9)) for _, score in paid] == [(0.5, 0.6), *[(0.0, 0.2)] * 4]
    assert env.score_answer(state, solve(SokobanTask(state.draw()))).mixed(1.0) == pytest.approx(2)


@pytest.mark.parametrize("answers", [["U", "D"], ["L"], ["URRDL"], ROUND_TRIP, ["RURRDL", "U", "D"], ["URD", "U"]])
def test_going_to_and_fro_never_earns_as_much_as_solving(answers: list[str]) -> None:
    """Trap 4: stepping back and forth paid more than solving."""
    env = Sokoban(tool="moves")
    idle = episode(env, ROOM, nothing, in_turn(*map(full, answers)))
    solved = episode(env, ROOM, nothing, oracle)
    assert len(idle.decisions) == 8
    assert sum(earned("planner", idle)) < sum(earned("planner", solved)) == pytest.approx(2)
    assert max(earned("planner", idle)[1:]) <= 0.2 + 1e-9  # only the first push was ever new
    assert not idle.outcome.success
    assert idle.outcome.team_reward == 0 < solved.outcome.team_reward == 1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text("UDLR", min_size=1, max_size=8), max_size=20), st.integers(0, 15))
def test_solving_is_worth_more_than_anything_else_at_every_decision(answers: list[str], index: int) -> None:
    env = Sokoban(boxes=2, tool="moves", seed=5)
    task = env.task("train", index)
    state, team, paid = State.initial(task), 0.0, []
    for moves in answers:
        score = env.score_answer(state, moves)
        after = walk(state, moves).end
        if after.solved:
            assert score.mixed(1.0) == pytest.approx(2)
            break
        assert score.mixed(1.0) <= 2 - 1 / 2 + 1e-9
        team += score.team
        if score.local > 0.5:
            paid.append(after.boxes)
        state = after
    assert team <= 1 / 2
    assert len(set(paid)) == len(paid)  # no arrangement of the boxes is paid for twice
    assert task.boxes not in paid


# ------------------------------------------------------------------ replies and prompts


def states_on_the_way() -> list[State]:
    start = State.initial(TWO)
    return [start, *(walk(start, moves).end for moves in ("D", "RR", "RRDRRUL", "RRR"))]


@pytest.mark.parametrize("options", [*STYLES, {"style": "full", "tool": "python"}])
def test_echoing_a_prompt_earns_nothing(options: dict[str, Any]) -> None:
    env = Sokoban(**options)
    for state in states_on_the_way():
        drafts = [Draft("no idea", None), Draft("", None), Draft("Moves: R\rMoves: R\n\nMoves: R", None, "Moves: R")]
        for moves in ("RRDLLDRR", "DLLDRR", "L", "U" * 3, "RRR"):
            code = f"Moves: R, R\n```python\nprint({list(moves)})\n```\nMoves: R"
            drafts.append(Draft(code, moves, f"Moves: D\n{list(moves)}", True))
        for prompt in [env.draft_prompt(state), *(env.plan_prompt(state, draft) for draft in drafts)]:
            contents = [message["content"] for message in prompt]
            for text in ("\n".join(contents), *contents, contents[-1].splitlines()[-1]):
                assert env.score_reply(state, text) == Score(0, 0)


@pytest.mark.parametrize("options", [*STYLES, {"style": "full", "tool": "python"}])
def test_a_team_of_parrots_earns_nothing(options: dict[str, Any]) -> None:
    env = Sokoban(max_turns=2, **options)
    record = episode(env, TWO, lambda prompt, k: prompt, lambda prompt, k: prompt)
    assert [decision.candidates[0].reward for decision in record.decisions] == [0] * 4
    assert record.outcome.team_reward == 0


GARBAGE = [
    *("", " \n", "Moves:", "Moves: ...", "Moves: r", "Moves: R then D", "Moves: \uff32", "Mov\u0435s: R", "\x00"),
    *("Moves: R\u2028D", "\U0001f600\ud800", "[__import__('os').getcwd()]", full("R" * 41), "R" * 41),
    *("R" * 10**6, "Moves: " + "R, " * 10**5, "Moves: R" + " " * 10**6 + "x", "[" * 10**6, "\u00e9\U0001f600" * 10**5),
]


@pytest.mark.parametrize("options", [*STYLES, {"style": "full", "tool": "python"}])
def test_garbage_earns_nothing(options: dict[str, Any]) -> None:
    env = Sokoban(max_turns=1, **options)
    state = State.initial(ROOM)
    for reply in GARBAGE:
        assert env.score_reply(state, reply) == Score(0, 0)
        env.parse_printed(reply)
    record = episode(env, ROOM, lambda prompt, k: GARBAGE[k] or " ", nothing, candidates=len(GARBAGE))
    assert {candidate.reward for candidate in record.decisions[0].candidates} == {0}


almost = st.text("UDLR, .", max_size=30)
replies = st.one_of(st.text(), almost, almost.map("Moves: {}".format), almost.map("so\nMoves: {}\n".format))


@settings(deadline=None, max_examples=80)
@given(replies, st.sampled_from(["full", "compact"]), st.sampled_from(states_on_the_way()))
def test_any_reply_gets_the_same_score_again_and_leaves_the_state_alone(reply: str, style: Any, state: State) -> None:
    env = Sokoban(style=style, tool="moves")
    before = copy.deepcopy(state)
    score = env.score_reply(state, reply)
    assert 0 <= score.team <= 1
    assert 0 <= score.local <= 1 + 1e-9
    assert (env.parse(reply) is None) == (score == Score())
    assert state == before
    assert env.score_reply(state, reply) == score
    printed = env.parse_printed(reply)
    if printed is not None:
        score = env.score_printed(state, printed)
        assert 0 <= score.team <= 1
        assert 0.2 <= score.local <= 1 + 1e-9


def test_the_planner_is_told_where_the_draft_leads() -> None:
    def told(moves: str | None, **options: Any) -> str:
        env = Sokoban(**options)
        return env.plan_prompt(State.initial(TWO), Draft("-", moves))[-1]["content"]

    prompt = told("RR", tool="moves")
    assert board_in(prompt) == TWO
    assert "R, R. They lead to this board:" in prompt
    assert board("__@*_", "_____", "_$_._").drawing.replace(" ", "-") in prompt
    assert "deadlock" not in prompt
    assert "They solve the board." in told("RRDLLDRR", tool="moves")
    assert "deadlock" in told("RRR", tool="moves")
    assert "the next move is blocked" in told("RU", tool="moves")
    assert "no valid moves" in told(None, tool="moves")
    compact = {"tool": "moves", "style": "compact"}
    leads = {moves: told(moves, **compact).splitlines()[-1] for moves in ("RR", "RRDLLDRR", "RRR", "RU", None)}
    assert leads == {
        "RR": "RR>131432",
        "RRDLLDRR": "RRDLLDRR>goal",
        "RRR": "RRR>141532x",
        "RU": "RU>121332#",
        None: ">none",
    }
    assert told("R", **compact).startswith("plan1112321434\n")


# ------------------------------------------------------------------ episodes


@pytest.mark.parametrize("options", STYLES)
def test_each_turn_starts_from_where_the_board_stands(options: dict[str, Any]) -> None:
    env = Sokoban(max_turns=4, **options)
    answer = "R" if options["style"] == "compact" else full("R")
    record = episode(env, ROOM, nothing, in_turn(answer))
    asked = [board_in(prompt_of(decision)).drawing.split("\n")[2] for decision in record.decisions]
    assert asked == [row for row in ("#@$  .#", "# @$ .#", "#  @$.#") for _ in range(2)]
    assert record.outcome.success
    assert record.outcome.metrics["turns"] == 3
    assert [decision.candidates[0].score.team for decision in of("planner", record)] == [0, 0, 1]


@pytest.mark.parametrize("style", ["full", "compact"])
def test_a_scripted_oracle_solves_every_board(style: Any) -> None:
    env = Sokoban(boxes=2, style=style, tool="moves")
    script = compact_oracle if style == "compact" else oracle
    for index in range(8):
        record = episode(env, env.task("val", index), nothing, script)
        assert record.outcome.success
        assert record.outcome.team_reward == 1
        assert [decision.candidates[0].reward for decision in record.decisions] == pytest.approx([0, 2])


@pytest.mark.parametrize(("answer", "share"), [("-", 0), (full("D"), 0), (full("RR"), 0.5), (full("RRR"), 0)])
def test_running_out_of_turns_is_failure(answer: str, share: float) -> None:
    """Trap 5: in the reference code a time-out of Sokoban was success."""
    record = episode(Sokoban(tool="moves", max_turns=1), TWO, nothing, in_turn(answer))
    assert not record.outcome.success
    assert record.outcome.team_reward == share
    record = episode(Sokoban(tool="moves", max_turns=3), TWO, nothing, in_turn(answer))
    assert not record.outcome.success
    assert record.outcome.metrics["turns"] == 3


def test_programs_of_the_tool_user_are_run_and_scored() -> None:
    def program(code: str) -> str:
        return f"Let me see.\nMoves: R\n```python\n{code}\n```\n"

    answers = {
        program("raise ValueError"): (0, 0.1),
        program("print('no idea')"): (0, 0.2),
        "no program": (0, 0),
        program("print(list('U'))"): (0, 0.2),
        program("print(list('R'))"): (0, 0.2 + 0.8 / 3),
        program("print(list('RRR'))"): (1, 1.0),
    }
    texts = list(answers)
    record = episode(Sokoban(max_turns=1), ROOM, lambda prompt, k: texts[k], oracle, candidates=len(texts))
    draft, plan = record.decisions
    teams, locals_ = zip(*answers.values(), strict=True)
    assert [candidate.score.team for candidate in draft.candidates] == pytest.approx(teams)
    assert [candidate.score.local for candidate in draft.candidates] == pytest.approx(locals_)
    assert draft.committed == len(texts) - 1
    assert "> print(list('RRR'))" in prompt_of(plan)
    assert "R, R, R. They solve the board." in prompt_of(plan)
    assert record.outcome.success


@pytest.mark.parametrize("options", STYLES)
def test_the_single_agent_is_asked_what_the_team_is_asked(options: dict[str, Any]) -> None:
    answer = "R" if options["style"] == "compact" else full("R")
    team, single = Sokoban(boxes=2, **options), make("sokoban_single", boxes=2, **options)
    record = episode(team, ROOM, in_turn(answer), in_turn(answer))
    alone = asyncio.run(play(single, ROOM, ScriptedTeam({"solo": in_turn(answer)})))
    assert [decision.prompt_ids for decision in alone.decisions] == [
        decision.prompt_ids for decision in record.decisions
    ]
    assert alone.outcome == record.outcome
    assert isinstance(single, SingleSokoban)
    assert single.agents == ("solo",)
    assert single.task("val", 3) == team.task("val", 3)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 4}, "size=4"),
        ({"size": "6"}, "size='6'"),
        ({"size": True}, "size=True"),
        ({"boxes": 0}, "boxes=0"),
        ({"boxes": 1.0}, "boxes=1.0"),
        ({"wall_density": 0.7}, "wall_density=0.7"),
        ({"wall_density": math.nan}, "wall_density=nan"),
        ({"wall_density": "high"}, "wall_density='high'"),
        ({"min_solution": 0}, "min_solution=0"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_moves": None}, "max_moves=None"),
        ({"tool": "bash"}, "tool='bash'"),
        ({"style": "terse"}, "style='terse'"),
        ({"style": "compact"}, "style=compact"),
        ({"seed": "one"}, "seed='one'"),
        ({"levels": 3}, "levels=3"),
        ({"levels": "/nowhere/at/all.txt"}, "levels='/nowhere/at/all.txt'"),
        ({"levels": os.curdir}, "levels='.'"),
        ({"levels": sys.executable}, "levels='"),
        *(({"levels": "any", name: 6}, f"{name}=6") for name in ("size", "boxes", "min_solution", "seed")),
        ({"levels": "any", "wall_density": 0.1}, "wall_density=0.1"),
    ],
)
def test_bad_options_are_refused_by_name_and_in_one_line(options: dict[str, Any], named: str) -> None:
    for name in ("sokoban", "sokoban_single"):
        with pytest.raises(EnvironmentConfigError, match=re.escape(f"at_grpo.environment.{named}")) as caught:
            make(name, **options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"size": 5, "boxes": 9}, {"size": 5, "min_solution": 60}])
def test_boards_that_there_are_none_of_are_refused_in_time(options: dict[str, Any]) -> None:
    env = make("sokoban", **options)
    with pytest.raises(EnvironmentConfigError, match=r"at_grpo\.environment\.size=5.*hardly any board"):
        env.task("train", 0)
