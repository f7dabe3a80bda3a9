"""Demonstrations for the tiny models: correct answers, on training tasks, within the recipe's limits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_atgrpo.environments.common.replies import extract_python

pytest.importorskip("math_verify")

from verl_atgrpo import Score, Split, check_environment
from verl_atgrpo.environments.code import environment as coding
from verl_atgrpo.environments.code.programs import Call, Problem, Verdict
from verl_atgrpo.environments.math.answers import parse_answer
from verl_atgrpo.environments.math.team import Attempt, MathTask
from verl_atgrpo.environments.plan_path.grid import PlanPathTask, State, walk
from verl_atgrpo.environments.sokoban.board import SokobanTask, moved
from verl_atgrpo.environments.sokoban.levels import solve
from verl_atgrpo.environments.sudoku.grid import EMPTY, SudokuTask
from verl_atgrpo.play.testing import Script
from verl_atgrpo.tiny_models.demonstrations import DEMONSTRATORS, arithmetic, small_programs, sokoban
from verl_atgrpo.tiny_models.demonstrations.demonstrator import END, SPLITS, Demonstration, write
from verl_atgrpo.tiny_models.demonstrations.plan_path import path
from verl_atgrpo.tiny_models.demonstrations.sudoku import fill

NAMES = sorted(DEMONSTRATORS)
GAMES = ("plan_path", "sokoban", "sudoku")

# P.G
# .#.
CORNER = PlanPathTask(3, frozenset({(1, 1), (2, 0), (2, 1), (2, 2)}), (0, 0), (0, 2))


def shown(name: str, folder: Path, noise: float, count: int = 60) -> Iterator[Demonstration]:
    env = DEMONSTRATORS[name].make_environment(folder)
    rng = random.Random(0)
    return (DEMONSTRATORS[name].demonstrate(env, rng, noise) for _ in range(count))


# ------------------------------------------------------------------ all of them


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_is_the_recipes(name: str, compose: Any) -> None:
    section = compose(f"{name}_cpu").at_grpo.environment
    options = DEMONSTRATORS[name].options_in(Path(f"runs/models/{name}_tiny"))
    assert {"name": name, **options} == section


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_fit_the_recipe_and_the_tokenizer(name: str, compose: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from verl_atgrpo.tiny_models.tiny import build_tokenizer

    demonstrator, tokenizer = DEMONSTRATORS[name], build_tokenizer(DEMONSTRATORS[name].words)
    data = compose(f"{name}_cpu").data
    assert demonstrator.response_length <= data.max_response_length
    for one in shown(name, tmp_path, 0.5):
        prompt = tokenizer.apply_chat_template([dict(message) for message in one.prompt], add_generation_prompt=True)
        assert len(prompt["input_ids"]) <= data.max_prompt_length
        assert len(one.answer) + 1 <= demonstrator.response_length
        answer = tokenizer("".join(one.answer), add_special_tokens=False)["input_ids"]
        assert answer == tokenizer.convert_tokens_to_ids(list(one.answer))
        assert tokenizer.unk_token_id not in [*prompt["input_ids"], *answer]


def test_a_model_that_knows_nothing_plays_with_tools(tmp_path: Path) -> None:
    """As `make-model` does to measure what it has made."""
    pytest.importorskip("transformers")
    pytest.importorskip("verl")
    from verl_atgrpo.tiny_models.tiny import LocalPolicy, build_model, build_tokenizer, evaluate

    demonstrator = DEMONSTRATORS["search"]
    tokenizer = build_tokenizer(demonstrator.words)
    policy = LocalPolicy(build_model(tokenizer, 0), tokenizer, demonstrator.response_length)
    assert len(evaluate(demonstrator.make_environment(tmp_path), policy, 2)) == 2


@pytest.mark.parametrize("noise", [0.0, 0.6])
@pytest.mark.parametrize("name", NAMES)
def test_every_token_has_the_distribution_it_is_sampled_from(name: str, noise: float, tmp_path: Path) -> None:
    for one in shown(name, tmp_path, noise):
        for token, choice in itertools.zip_longest([*one.answer, END], one.choices, fillvalue=None):
            assert choice is not None
            assert choice[token] > 0
            assert sum(choice.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
def test_no_validation_task_is_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = DEMONSTRATORS[name].make_environment(tmp_path)
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


def test_boxes_are_pushed_to_targets_in_the_fewest_moves() -> None:
    env = DEMONSTRATORS["sokoban"].make_environment(Path())
    for index in range(30):
        task: SokobanTask = env.task("train", index)
        left, stand = sokoban.distances(task), (task.player, task.boxes)
        moves, _ = sokoban.solve_from(task, stand, left, 0.0, 99, random.Random(index))
        assert len(moves) == left[stand] == len(solve(task) or "")
        for move in moves:
            stand = moved(task, *stand, move)
        assert stand[1] == task.targets


# #####
# #@$.#   Down and right of the player the box cannot reach the target: no move is good there.
def test_answers_are_empty_in_deadlocks() -> None:
    task = SokobanTask("#####\n#@$.#\n#   #\n#####")
    left = sokoban.distances(task)
    corner = (task.player + 1, frozenset({task.player + task.stride}))
    assert left[task.player, task.boxes] == 1
    assert corner not in left
    assert sokoban.solve_from(task, corner, left, 0.0, 8, random.Random(0)) == ("", [{END: 1.0}])


# ------------------------------------------------------------------ grids


def test_a_grid_keeps_its_givens_whatever_the_mistakes() -> None:
    task: SudokuTask = DEMONSTRATORS["sudoku"].make_environment(Path()).task("train", 0)
    rows = ["".join(row) for row in zip(*[iter(task.solution)] * 4, strict=True)]
    assert "".join(fill(task, 0.0, random.Random(0))[0]) == "\n".join(rows)
    answer, choices = fill(task, 0.8, random.Random(0))
    assert task.keeps_givens("".join(answer).replace("\n", ""))
    hole = task.givens.index(EMPTY)
    wanted = dict.fromkeys("1234", 0.2) | {task.solution[hole]: 0.4}
    assert choices[hole + hole // 4] == pytest.approx(wanted)  # a line break after every four


@pytest.mark.parametrize("name", GAMES)
def test_right_answers_solve_the_game(name: str) -> None:
    env: Any = DEMONSTRATORS[name].make_environment(Path())
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
    if name == "sokoban":
        left = sokoban.distances(state.task)
        return sokoban.solve_from(state.task, (state.player, state.boxes), left, 0.0, 8, rng)[0]
    return "".join(fill(state.task, 0.0, rng)[0])


# ------------------------------------------------------------------ sums and functions


def scripts(task: Any) -> dict[str, Script]:
    """Returns scripts that answer a sum or a function without mistakes, by the first word of the prompt."""
    rng = random.Random(0)
    if isinstance(task, MathTask):
        answers = {"tool": arithmetic.program(task, 0.0), "reason": arithmetic.boxed(task, 0.0)}
    else:
        answers = {"code": small_programs.program(task, 0.0), "test": small_programs.test(task, 5, 0.0)}
    texts = {role: "".join(write(choices, rng)[0]) for role, choices in answers.items()}
    agents = ("tool_user", "reasoner", "coder", "tester")
    return dict.fromkeys(agents, lambda prompt, k: texts[prompt.partition("\n")[0]])


@pytest.mark.parametrize("name", ["math", pytest.param("code", marks=pytest.mark.slow)])
def test_right_answers_are_gold(name: str, tmp_path: Path) -> None:
    DEMONSTRATORS[name].make_environment(tmp_path)
    options = {**DEMONSTRATORS[name].options_in(tmp_path), "max_turns": 1}
    check_environment(name, options, gold=scripts, tasks=2, episodes=1, bounds=(0, 1))


def test_compact_prompts_show_the_start_of_the_last_answers(tmp_path: Path) -> None:
    task, problem = MathTask("17+8=?", "25"), Problem("add 2, add 3", (Call((1,), 6),), "f")
    math: Any = DEMONSTRATORS["math"].make_environment(tmp_path / "math")
    code: Any = DEMONSTRATORS["code"].make_environment(tmp_path / "code")
    turns = [(Attempt("", "1"), Attempt("", "2")), (Attempt("", None), Attempt("", "1234567890"))]
    state = coding.State(problem, "def f", Call((4, "x" * 9), -9), Verdict(True, False, (False,), ("Error: no f",)))
    asked = [
        math.tool_prompt(task, []),
        math.reasoner_prompt(task, turns),
        code.coder_prompt(coding.State(problem, "def f")),
        code.coder_prompt(coding.State(problem, None, Call((4,), -9))),
        code.tester_prompt(state),
    ]
    assert [prompt[0]["content"] for prompt in asked] == [
        "tool\n17+8=?",
        "reason\n17+8=?\nnone|12345678",
        "code\nadd 2, add 3",
        "code\nadd 2, add 3\n4|-9|none",
        "test\nadd 2, add 3\n4, 'xxxx|-9|Error: n",
    ]


@pytest.mark.parametrize("name", ["math", "code"])
def test_data_sets_share_no_problem(name: str, tmp_path: Path) -> None:
    from verl_atgrpo.play.contamination import report

    env = DEMONSTRATORS[name].make_environment(tmp_path)
    said, found = report(env, env.num_tasks("train"), env.num_tasks("val"))
    assert not found, said


def test_sums_in_either_order_belong_to_one_split() -> None:
    pairs = {
        split: {frozenset(row["question"][:-2].split("+")) for row in arithmetic.sums(split)}
        for split in ("train", "val")
    }
    assert not pairs["train"] & pairs["val"]
    assert len(pairs["train"]) == 2000


def test_equal_functions_belong_to_one_split() -> None:
    train, val = ({row["input_output"] for row in small_programs.functions(split)} for split in SPLITS)
    assert not train & val


def test_right_sums_by_hand() -> None:
    task = MathTask("17+8=?", "25")
    rng = random.Random(0)
    program, _ = write(arithmetic.program(task, 0.0), rng)
    words, _ = write(arithmetic.boxed(task, 0.0), rng)
    assert extract_python("".join(program)) == "print(17+8)\n"
    assert parse_answer("".join(words)) == "25"
    unsure = arithmetic.boxed(task, 0.5)[2]
    assert unsure == pytest.approx(dict.fromkeys("013456789", 0.05) | {"2": 0.55})


def test_functions_by_hand() -> None:
    assert small_programs.expression("add 2, multiply 3") == "(x+2)*3"
    assert small_programs.value("add 2, multiply 3", 4) == 18
    assert small_programs.value("multiply 3, subtract 9", 1) == -6
