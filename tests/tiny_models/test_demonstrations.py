"""Demonstrations for the tiny models: correct answers, on training tasks, within the recipe's limits."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from verl_atgrpo import Score, Split
from verl_atgrpo.environments.plan_path.grid import PlanPathTask, State, walk
from verl_atgrpo.environments.sudoku.grid import EMPTY, SudokuTask
from verl_atgrpo.lab.tiny_models.demonstrations import DEMONSTRATORS, END, Demonstration, fill, path
from verl_atgrpo.play.registry import make

NAMES = sorted(DEMONSTRATORS)

# P.G
# .#.
CORNER = PlanPathTask(3, frozenset({(1, 1), (2, 0), (2, 1), (2, 2)}), (0, 0), (0, 2))


def shown(name: str, noise: float, count: int = 60) -> Iterator[Demonstration]:
    env = DEMONSTRATORS[name].make_environment()
    rng = random.Random(0)
    return (DEMONSTRATORS[name].demonstrate(env, rng, noise) for _ in range(count))


# ------------------------------------------------------------------ all of them


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_is_the_recipes(name: str, compose: Any) -> None:
    options = {key: value for key, value in DEMONSTRATORS[name].options.items() if key != "depth"}  # not in prompts
    assert {"name": name, **options} == compose(f"{name}_cpu").at_grpo.environment


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_fit_the_recipe_and_the_tokenizer(name: str, compose: Any) -> None:
    pytest.importorskip("transformers")
    from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer

    demonstrator, tokenizer = DEMONSTRATORS[name], build_tokenizer(DEMONSTRATORS[name].words)
    data = compose(f"{name}_cpu").data
    assert demonstrator.response_length <= data.max_response_length
    for one in shown(name, 0.5):
        prompt = tokenizer.apply_chat_template([dict(message) for message in one.prompt], add_generation_prompt=True)
        assert len(prompt["input_ids"]) <= data.max_prompt_length
        assert len(one.answer) + 1 <= demonstrator.response_length
        answer = tokenizer("".join(one.answer), add_special_tokens=False)["input_ids"]
        assert answer == tokenizer.convert_tokens_to_ids(list(one.answer))
        assert tokenizer.unk_token_id not in [*prompt["input_ids"], *answer]


def test_a_model_that_knows_nothing_plays_with_tools() -> None:
    """As `make-model` does to measure what it has made."""
    pytest.importorskip("transformers")
    pytest.importorskip("verl")
    from verl_atgrpo.lab.tiny_models.tiny import LocalPolicy, build_model, build_tokenizer, evaluate

    tokenizer = build_tokenizer(())
    policy = LocalPolicy(build_model(tokenizer, 0), tokenizer, 10)
    assert len(evaluate(make("search_single", people=4, cities=4), policy, 2)) == 2


@pytest.mark.parametrize("noise", [0.0, 0.6])
@pytest.mark.parametrize("name", NAMES)
def test_every_token_has_the_distribution_it_is_sampled_from(name: str, noise: float) -> None:
    for one in shown(name, noise):
        for token, choice in itertools.zip_longest([*one.answer, END], one.choices, fillvalue=None):
            assert choice is not None
            assert choice[token] > 0
            assert sum(choice.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
def test_no_validation_task_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = DEMONSTRATORS[name].make_environment()
    seen: set[Split] = set()
    original = env.task

    def task(split: Split, index: int) -> Any:
        seen.add(split)
        return original(split, index)

    monkeypatch.setattr(env, "task", task)
    for seed in range(20):
        DEMONSTRATORS[name].demonstrate(env, random.Random(seed), 0.0)
    assert seen == {"train"}


# ------------------------------------------------------------------ moves


def test_a_demonstration_without_mistakes_takes_a_shortest_path() -> None:
    moves, choices = path(CORNER, (1, 0), 0.0, 8, random.Random(0))
    assert moves == "URR"
    assert choices == [
        {"U": 1.0, "D": 0.0, "L": 0.0, "R": 0.0},
        {"U": 0.0, "D": 0.0, "L": 0.0, "R": 1.0},
        {"U": 0.0, "D": 0.0, "L": 0.0, "R": 1.0},
        {END: 1.0},
    ]


def test_equally_good_moves_are_equally_likely() -> None:
    open_field = PlanPathTask(3, frozenset(), (0, 0), (1, 1))
    _, choices = path(open_field, (0, 0), 0.0, 8, random.Random(0))
    assert choices[0] == {"U": 0.0, "D": 0.5, "L": 0.0, "R": 0.5}


def test_the_chance_of_a_mistake_by_hand() -> None:
    _, choices = path(CORNER, (1, 0), 0.6, 8, random.Random(0))
    assert choices[0] == pytest.approx({"U": 0.15 + 0.4, "D": 0.15, "L": 0.15, "R": 0.15})


def test_after_a_mistake_the_demonstrator_continues_from_the_new_position() -> None:
    field = PlanPathTask(4, frozenset(), (0, 0), (3, 3))
    for seed in range(50):
        moves, choices = path(field, (0, 0), 0.7, 20, random.Random(seed))
        position = (0, 0)
        for move, choice in zip(moves, choices, strict=False):
            best = max(choice.values())
            assert {name for name, chance in choice.items() if chance == best} == {
                name for name, open_ in (("D", position[0] < 3), ("R", position[1] < 3)) if open_
            }
            position = walk(State(field, position, 99), move).end.position


def test_a_good_draft_is_followed() -> None:
    field = PlanPathTask(3, frozenset(), (0, 0), (2, 2))
    for seed in range(20):
        assert path(field, (0, 0), 0.0, 8, random.Random(seed), draft="DRDR")[0] == "DRDR"


def test_answers_keep_within_the_limit() -> None:
    field = PlanPathTask(5, frozenset(), (0, 0), (4, 4))
    moves, choices = path(field, (0, 0), 0.0, 3, random.Random(0))
    assert len(moves) == 3
    assert choices[-1] == {END: 1.0}


# ------------------------------------------------------------------ games


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four"])
def test_the_best_moves_are_shown_and_other_legal_ones_by_mistake(name: str) -> None:
    one = DEMONSTRATORS[name]
    env = one.make_environment()
    for seed in range(30):
        sure, unsure = (one.demonstrate(env, random.Random(seed), noise) for noise in (0, 0.6))
        assert sure.prompt == unsure.prompt
        best = {move for move, chance in sure.choices[0].items() if chance}
        rows = str(sure.prompt[0]["content"]).splitlines()[:-1]
        legal = {str(move + 1) for move in env.rules.moves(re.sub(r"\d", EMPTY, "".join(rows)))}
        assert set(sure.choices[0]) == set(unsure.choices[0]) == legal
        for move, chance in unsure.choices[0].items():
            assert chance == pytest.approx(0.6 / len(legal) + (0.4 / len(best) if move in best else 0))


def test_connect_four_is_shown_what_wins_at_once_and_no_plan() -> None:
    one, won = DEMONSTRATORS["connect_four"], 0
    env = one.make_environment()
    for seed in range(60):
        shown = one.demonstrate(env, random.Random(seed), 0)
        board = "".join(str(shown.prompt[0]["content"]).splitlines()[:-1])
        moves = env.rules.moves(board)
        wins = {str(move + 1) for move in moves if env.rules.winner(env.rules.play(board, move))}
        won += bool(wins)
        assert {move for move, chance in shown.choices[0].items() if chance} == (
            wins or {str(move + 1) for move in moves}
        )
    assert 5 < won < 55


# ------------------------------------------------------------------ grids


def test_a_grid_keeps_its_givens_whatever_the_mistakes() -> None:
    task: SudokuTask = DEMONSTRATORS["sudoku"].make_environment().task("train", 0)
    rows = ["".join(row) for row in zip(*[iter(task.solution)] * 4, strict=True)]
    assert "".join(fill(task, 0.0, random.Random(0))[0]) == "\n".join(rows)
    answer, choices = fill(task, 0.8, random.Random(0))
    assert task.keeps_givens("".join(answer).replace("\n", ""))
    hole = task.givens.index(EMPTY)
    wanted = dict.fromkeys("1234", 0.2) | {task.solution[hole]: 0.4}
    assert choices[hole + hole // 4] == pytest.approx(wanted)  # a line break after every four


@pytest.mark.parametrize("name", ["plan_path", "sudoku"])
def test_right_answers_solve_the_game(name: str) -> None:
    env: Any = DEMONSTRATORS[name].make_environment()
    for index in range(20):
        state = env.initial(env.task("train", index))
        for _ in range(3):  # moves beyond the limit of one answer
            if not state.solved:
                answer = env.parse(right(name, state))
                score, state = env.score_answer(state, answer), env.apply(state, answer)
                assert not state.solved or score == Score(team=1, local=1)
        assert state.solved


def right(name: str, state: Any) -> str:
    """Returns the answer without mistakes in a state."""
    rng = random.Random(0)
    if name == "plan_path":
        return path(state.task, state.position, 0.0, 8, rng)[0]
    return "".join(fill(state.task, 0.0, rng)[0])
