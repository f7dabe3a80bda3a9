"""What all drafting games have in common: replies that must earn nothing, scores without side effects, an oracle."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import plan_path_players, sokoban_players, sudoku_players
from fakes.plan_path_players import WALLED
from fakes.scripted_episodes import Script, episode
from fakes.sokoban_players import TWO
from fakes.sudoku_players import CHANGED, CLASH, RIGHT, SOLVED, STANDING, WRONG, entries, on_givens, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo import Score
from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.common.replies import extract_python
from verl_atgrpo.environments.plan_path import PlanPath, grid
from verl_atgrpo.environments.sokoban import Sokoban, board
from verl_atgrpo.environments.sudoku import Sudoku

moves = st.text("UDLR, .", max_size=30)
cells = st.text(".01234 \n", max_size=40)


@dataclass(frozen=True)
class Game:
    """A game, states on the way of one task, and answers from the solution to illegal ones."""

    environment: Callable[..., Any]
    tool: str
    states: Sequence[Any]
    answers: Sequence[str]
    full: Callable[[str], str]
    printed: Callable[[str], str]
    oracle: Callable[[str], Script]
    replies: st.SearchStrategy[str]
    styles: Sequence[str] = ("full", "compact")

    def make(self, style: str, python: bool = False, **options: Any) -> Any:
        more = {"style": style} if "compact" in self.styles else {}
        return self.environment(**more, tool="python" if python else self.tool, **options)


def states(module: Any, task: Any, *ways: str) -> list[Any]:
    start = module.State.initial(task)
    return [start, *(module.walk(start, way).end for way in ways)]


GAMES = {
    "plan_path": Game(
        lambda **options: PlanPath(size=6, **options),
        "moves",
        states(grid, WALLED, "DD", "DDDRR", "DDDRRUUL"),
        ("DDDRRUUU", "DRRUUU", "D", "U" * 3, "L", "DRR"),
        plan_path_players.full,
        lambda answer: str(list(answer)),
        plan_path_players.ORACLES.__getitem__,
        st.one_of(st.text(), moves, moves.map("Moves: {}".format), moves.map("so\nMoves: {}\n".format)),
    ),
    "sokoban": Game(
        lambda **options: Sokoban(boxes=2, **options),
        "moves",
        states(board, TWO, "D", "RR", "RRDRRUL", "RRR"),
        ("RRDLLDRR", "DLLDRR", "L", "U" * 3, "RRR"),
        sokoban_players.full,
        lambda answer: str(list(answer)),
        {"full": sokoban_players.oracle}.__getitem__,
        st.one_of(st.text(), moves, moves.map("Moves: {}".format), moves.map("so\nMoves: {}\n".format)),
        styles=("full",),
    ),
    "sudoku": Game(
        Sudoku,
        "grid",
        sudoku_players.STATES,
        (SOLVED, RIGHT, WRONG, CLASH, CHANGED, STANDING),
        sudoku_players.full,
        rows,
        lambda style: sudoku_players.oracle({"style": style}),
        st.one_of(
            st.text(),
            cells,
            cells.map("Grid:\n{}".format),
            (entries | on_givens).map(sudoku_players.full),
            on_givens.map(rows),
        ),
    ),
}
each_game = pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)
each_style = pytest.mark.parametrize(
    ("game", "style"),
    [pytest.param(game, style, id=f"{name}-{style}") for name, game in GAMES.items() for style in game.styles],
)


@pytest.mark.parametrize(
    ("game", "style", "python"),
    [
        pytest.param(game, style, python, id=f"{name}-{style}-{python}")
        for name, game in GAMES.items()
        for style in game.styles
        for python in (False, True)
        if (style, python) != ("compact", True)
    ],
)
def test_echoing_a_prompt_earns_nothing(game: Game, style: str, python: bool) -> None:
    """Some example answers in the prompts of the reference code are valid answers."""
    env = game.make(style, python)
    drafts = [Draft("no idea", None), Draft("", None), Draft("Moves: R\rMoves: R\n\nMoves: R", None, "Moves: R")]
    for answer in game.answers:
        said, printed = game.full(answer), game.printed(answer)
        drafts.append(Draft(f"{said}\n```python\nprint({printed!r})\n```\n{said}", answer, f"{said}\n{printed}", True))
    for state in game.states:
        assert extract_python(env.draft_prompt(state)[-1]["content"]) is None
        for prompt in [env.draft_prompt(state), *(env.plan_prompt(state, draft) for draft in drafts)]:
            contents = [message["content"] for message in prompt]
            for text in ("\n".join(contents), *contents, contents[-1].splitlines()[-1]):
                assert env.score_reply(state, text) == Score()


@each_game
def test_what_a_program_printed_ends_before_the_drafts_effect(game: Game) -> None:
    env = game.make("full", True)
    shown = env.plan_prompt(game.states[0], Draft("print()", None, "", True))[-1]["content"].splitlines()
    last = shown.index("> (nothing)")
    assert shown[last - 1] == "> It printed:" and shown[last + 1].startswith("A tool user drafted no valid")


@each_game
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_reply_has_one_finite_score_and_leaves_the_state_unchanged(game: Game, data: st.DataObject) -> None:
    reply, state = data.draw(game.replies), data.draw(st.sampled_from(game.states))
    env = game.make(data.draw(st.sampled_from(game.styles)))
    before = copy.deepcopy(state)
    score = env.score_reply(state, reply)
    assert math.isfinite(score.mixed(1.0))
    assert 0 <= score.team <= 1
    assert 0 <= score.local <= 1 + 1e-9
    assert (env.parse(reply) is None) == (score == Score())
    assert env.score_reply(state, reply) == score
    for answer in (env.parse(reply), env.parse_printed(reply)):
        if answer is not None and game.tool == "moves":
            assert set(answer) <= set("UDLR") and 1 <= len(answer) <= env.max_moves
        elif answer is not None:
            assert len(answer) == 16 and set(answer) <= set(".1234")
    if (printed := env.parse_printed(reply)) is not None:
        score = env.score_printed(state, printed)
        assert 0 <= score.team <= 1 and 0.2 <= score.local <= 1 + 1e-9
    assert state == before


@each_game
def test_the_order_of_scoring_does_not_matter(game: Game) -> None:
    env, answers = game.make("full"), game.answers
    for state in game.states:
        forward = [env.score_answer(state, answer) for answer in answers]
        assert [env.score_answer(state, answer) for answer in reversed(answers)] == forward[::-1]


@each_style
def test_a_scripted_oracle_solves_every_task(game: Game, style: str) -> None:
    env = game.make(style)
    for index in range(8):
        record = episode(env, env.task("val", index), lambda prompt, k: "-", game.oracle(style))
        assert record.outcome.success and record.outcome.team_reward == 1
        assert set(record.outcome.metrics.values()) == {1}
        assert [decision.candidates[0].reward for decision in record.decisions] == pytest.approx([0, 2])
