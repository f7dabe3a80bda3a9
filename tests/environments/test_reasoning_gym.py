"""reasoning-gym: tasks, splits, scores of answers, and replies that are not passed to a scorer."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
from collections.abc import Mapping
from typing import Any, cast

import pytest

pytest.importorskip("reasoning_gym")

from fakes.scripted_episodes import here

from verl_atgrpo import EnvironmentConfigError, ScriptedTeam, check_environment, make, play
from verl_atgrpo.environments.common import limited
from verl_atgrpo.environments.common.replies import repeats
from verl_atgrpo.environments.ports import reasoning_gym as port
from verl_atgrpo.environments.ports.reasoning_gym import ReasoningGym
from verl_atgrpo.play.testing import Script

SUMS = {"dataset": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "max_digits": 2}}
MIXED = {
    "dataset": "composite",
    "options": {
        "datasets": [
            {"name": "leg_counting"},
            {"name": "chain_sum", "weight": 2.0, "config": {"min_terms": 2, "max_terms": 2}},
        ]
    },
}


def written(answer: str, style: str) -> str:
    return answer if style == "compact" else f"I think so.\n<answer>{answer}</answer>\n"


def gold(style: str) -> Any:
    def scripts(task: Any) -> Mapping[str, Script]:
        answer = written(task.entry["answer"], style)
        return dict.fromkeys(("solver", "checker", "solo"), lambda prompt, k: answer)

    return scripts


@pytest.mark.parametrize(
    ("name", "style"),
    [
        pytest.param("reasoning_gym", "full", marks=pytest.mark.slow),
        (here("reasoning_gym"), "compact"),
        (here("reasoning_gym_single"), "full"),
        (here("reasoning_gym_single"), "compact"),
    ],
)
def test_sums_keep_the_contract(name: Any, style: str) -> None:
    check_environment(name, {**SUMS, "style": style}, gold=gold(style), tasks=10, episodes=1, bounds=(0, 1))


def test_a_level_is_that_of_the_data_sets_own_curriculum() -> None:
    def terms(**given: Any) -> set[int]:
        sums = make("reasoning_gym", dataset="chain_sum", **given)
        return {sums.task("train", index).entry["metadata"]["num_terms"] for index in range(30)}

    assert terms(level=0) == {2} and terms(level=2) == {2, 3, 4}
    assert terms(level=2, options={"min_terms": 4}) == {4}, "what is said of an option comes before"
    levels = make(
        "curriculum", of={"name": "reasoning_gym", "dataset": "chain_sum"}, levels=[{"level": 0}, {"level": 1}]
    )
    assert {levels.task("train", 2 * index + 1).task.entry["metadata"]["num_terms"] for index in range(30)} == {2, 3}
    for options, message in (
        ({"dataset": "chain", "level": 1}, r"dataset='chain': reasoning-gym has no data set 'chain'"),
        (
            {"dataset": "chain_sum", "level": 11},
            r"^at_grpo\.environment\.level=11: the curriculum of 'chain_sum' ends",
        ),
        (
            {**MIXED, "level": 0},
            r"^at_grpo\.environment\.level=0: reasoning-gym has no curriculum of 'composite'; use",
        ),
    ):
        with pytest.raises(EnvironmentConfigError, match=message):
            make("reasoning_gym", **options)


@pytest.mark.parametrize("dataset", ["time_intervals", "word_sorting", "aiw"])
def test_a_level_of_options_that_are_no_json_can_be_scored(dataset: str) -> None:
    environment = make("reasoning_gym", dataset=dataset, level=1)
    task = environment.task("train", 0)
    assert asyncio.run(environment.grade(task, task.entry["answer"])) == 1.0


@pytest.mark.parametrize("dataset", ["rotate_matrix", "prime_factorization", "syllogism"])
def test_data_sets_with_partial_scores_or_raising_scorers_keep_it_too(dataset: str) -> None:
    check_environment(
        here("reasoning_gym"), {"dataset": dataset}, gold=gold("full"), tasks=5, episodes=1, bounds=(0, 1)
    )


@pytest.mark.slow
def test_all_kinds_of_a_data_sets_questions_are_drawn() -> None:
    env = make("reasoning_gym", dataset="acre")
    answers = [env.task("train", index).entry["answer"] for index in range(60)]
    # 23% of 300 in one of their data sets; 42% if only one kind is drawn, as from those of one question.
    assert 0 < answers.count("undetermined") < 0.3 * len(answers)


@pytest.mark.slow
def test_a_composite_keeps_it_and_scores_each_task_by_its_own_data_set() -> None:
    check_environment(here("reasoning_gym"), MIXED, gold=gold("full"), tasks=6, episodes=1, bounds=(0, 1))
    env = make("reasoning_gym", **MIXED)
    tasks = [env.task("train", index) for index in range(12)]
    assert {task.entry["metadata"]["source_dataset"] for task in tasks} == {"leg_counting", "chain_sum"}


def test_splits_share_no_question_and_global_generators_are_restored() -> None:
    env = make("reasoning_gym", **SUMS)
    before = random.getstate()
    train, val = ({env.fingerprint(env.task(split, index)) for index in range(200)} for split in ("train", "val"))
    assert random.getstate() == before
    assert len(train) > 100 and len(val) > 50 and not train & val


@pytest.mark.parametrize("dataset", ["chain_sum", "knights_knaves", "rotate_matrix"])
def test_repeating_the_question_earns_no_more_than_the_format(dataset: str) -> None:
    env = make("reasoning_gym", dataset=dataset, style="compact")
    task = env.task("train", 0)
    for reply in (task.question, task.question.upper(), f"It says:\n{task.question}\n{task.entry['answer']}"):
        assert asyncio.run(env.grade(task, env.parse(reply))) == 0


@pytest.mark.parametrize(
    "dataset",
    ["knights_knaves", "course_schedule", "spell_backward", "rotate_matrix", "word_sorting", "syllogism"],
)
def test_repeating_half_of_a_question_earns_nothing(dataset: str) -> None:
    """Parts of it earned up to .26 (knights_knaves)."""
    env = cast(ReasoningGym, make("reasoning_gym", dataset=dataset))
    for index in range(3):
        task = env.task("train", index)
        words = task.question.split()
        half = len(words) // 2 + 1 if len(words) >= 12 else len(words) - 1
        for answer in (
            task.question,
            task.question[1:],
            task.question.upper(),
            " ".join(words[:half]),
            " ".join(words[-half:]),
            "\n".join(words[1:]),
            f"The answer: {task.question}",
        ):
            assert asyncio.run(env.grade(task, answer)) == 0


def test_a_right_answer_that_repeats_half_of_its_question_is_right() -> None:
    """A matrix that is not rotated, for instance."""
    env = cast(ReasoningGym, make("reasoning_gym", dataset="rotate_matrix"))
    tasks = [env.task("train", index) for index in range(20)]
    assert any(repeats(task.entry["answer"], task.question) for task in tasks)
    assert {asyncio.run(env.grade(task, task.entry["answer"])) for task in tasks} == {1.0}


@pytest.mark.parametrize(
    ("answer", "question", "repeated"),
    [
        ("1 2", "1 2", True),
        ("so 1  2 it is", "1 2", True),
        ("11 2", "1 2", False),
        ("2 1", "1 2", False),
        ("b c d e", "a b c d e", True),
        ("b c d", "a b c d e", False),
        ("d e f g h i j", "a b c d e f g h i j k l m n", True),
        (" ".join(map(str, range(50))), " ".join(map(str, range(100))), True),
        (" ".join(map(str, range(50, 100))), " ".join(map(str, range(100))), True),
        (" ".join(map(str, range(30, 80))), " ".join(map(str, range(100))), True),
        (" ".join(map(str, range(24))), " ".join(map(str, range(100))), False),
        (" ".join(map(str, range(100, 0, -1))), " ".join(map(str, range(100))), False),
        ("", "1 2", False),
    ],
)
def test_what_repeats_a_question(answer: str, question: str, repeated: bool) -> None:
    assert repeats(answer, question) is repeated


def test_an_answer_counts_only_in_the_agreed_format() -> None:
    env = make("reasoning_gym", **SUMS)
    assert env.parse("3 or <answer>4</answer>, so\n<answer> 5\n6 </answer>\n") == "5\n6"
    for reply in ("5", "<answer>5", "5</answer>", "<answer>5</answer> I think", "<answer></answer>", "<ANSWER>5"):
        assert env.parse(reply) is None
    assert env.parse(f"<answer>{'9' * 10_001}</answer>") is None


def test_dollars_around_an_answer_cost_nothing() -> None:
    sums = make("reasoning_gym", **SUMS)
    task = sums.task("train", 0)
    right = task.entry["answer"]
    written = (right, f"${right}$", rf"\({right}\)", rf"$\text{{{right}}}$")
    assert [asyncio.run(sums.grade(task, one)) for one in written] == [1, 1, 1, 1]
    fractions = make("reasoning_gym", dataset="fraction_simplification", options={"styles": ["latex_inline"]})
    task = fractions.task("train", 0)
    assert task.entry["answer"].startswith("$") and asyncio.run(fractions.grade(task, task.entry["answer"])) == 1


@pytest.mark.parametrize(
    "dataset",
    [
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ],
)
def test_data_sets_whose_scorers_evaluate_replies_are_refused(dataset: str) -> None:
    """All of 0.1.25 that call eval, or sympy's parse_expr, which calls it."""
    for options in ({"dataset": dataset}, {"dataset": "composite", "options": {"datasets": [{"name": dataset}]}}):
        with pytest.raises(EnvironmentConfigError, match=f"the scorer of '{dataset}' evaluates replies"):
            make("reasoning_gym", **options)


@pytest.fixture
def careless() -> ReasoningGym:
    """An environment whose scorer does what a reply names."""
    import fakes.one_question  # noqa: F401

    return cast(ReasoningGym, make("reasoning_gym", dataset="one_question", style="compact"))


def graded(env: Any, answer: str) -> tuple[float, bool]:
    """The score of an answer, and whether it cost the scorer's process."""
    task = env._draw(0)
    assert asyncio.run(env.grade(task, "7")) == 1
    process = port._SCORER.process
    score = asyncio.run(env.grade(task, answer))
    lost = port._SCORER.process is not process
    assert asyncio.run(env.grade(task, "7")) == 1, "the next answer is scored"
    return score, lost


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        pytest.param("count:", True, marks=pytest.mark.slow),  # time
        pytest.param("copies:" + "9" * 1000, True, marks=pytest.mark.slow),  # memory
        ("deep:", False),  # recursion
        ("evaluate:7", False),
        ("evaluate:__import__('os').abort()", False),
        ("execute:raise SystemExit", False),
        ("evaluate:9**9**9", False),
        ("evaluate:" + "(" * 150 + "1" + ")" * 150, False),
    ],
)
def test_what_an_answer_costs_is_its_own_score(careless: ReasoningGym, answer: str, lost: bool) -> None:
    assert graded(careless, answer) == (0.0, lost)


@pytest.mark.slow
def test_a_scorer_that_waits_is_given_up(careless: ReasoningGym, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = asyncio.run(careless.grade(careless._draw(0), "7"))
    monkeypatch.setattr(limited, "WALL_SECONDS", 0.1)
    assert ready == 1 and asyncio.run(careless.grade(careless._draw(0), "wait:")) == 0
    assert port._SCORER.process is None


@pytest.mark.parametrize("answer", ["lines:", "later:"])
def test_a_scorer_may_print_and_import(careless: ReasoningGym, answer: str) -> None:
    assert graded(careless, answer) == (0.5, False)


@pytest.mark.slow
def test_the_event_loop_goes_on_while_an_answer_is_scored(careless: ReasoningGym) -> None:
    async def turns() -> int:
        task, count = careless._draw(0), 0
        await careless.grade(task, "7")
        scored = asyncio.ensure_future(careless.grade(task, "count:"))
        while not scored.done():
            await asyncio.sleep(0)
            count += 1
        return count

    assert asyncio.run(turns()) > 100


HOSTILE = (
    "1e999,999,999",
    "1e999999999",
    "9" * 10_000,
    "-" + "1" * 9_999,
    "9**9**9**9",
    "(" * 5_000 + ")" * 5_000,
    "[" * 10_000,
    "1/" * 5_000,
    "0." + "3" * 9_990,
    "10^" * 3_000 + "9",
    " " * 9_999 + "x",
    "a" * 9_999 + "!",
    "0x" + "f" * 9_990,
    "1_" * 4_999 + "1",
    "NaN,Inf," * 1_000,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", ["coin_flip", "decimal_arithmetic", "complex_arithmetic", "fraction_simplification"]
)
def test_no_number_takes_more_than_the_limits(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scorers that read numbers; two of them also pay a constant, for which they are refused."""
    monkeypatch.setattr(ReasoningGym, "_check_constants", lambda self: None)
    env = make("reasoning_gym", dataset=dataset, style="compact")
    task = env.task("train", 0)
    for answer in HOSTILE:
        assert asyncio.run(env.grade(task, answer)) < 1


def test_the_team_sees_its_earlier_answers_and_never_the_correct_one() -> None:
    env = make("reasoning_gym", **SUMS, max_turns=3)
    task = next(task for index in range(50) if len((task := env.task("train", index)).entry["answer"]) == 3)
    prompts: list[str] = []

    def script(prompt: str, k: int) -> str:
        prompts.append(prompt)
        return "<answer>7</answer>" if "drafted" in prompt else "<answer>8</answer>"

    record = asyncio.run(play(env, task, ScriptedTeam({"solver": script, "checker": script})))
    assert not record.outcome.success and record.outcome.metrics == {"turns": 3.0}
    assert len(prompts) == 6 and "something else:\n> 7\n" in prompts[-1] and "> <answer>8</answer>" in prompts[-1]
    asked = task.question
    assert not any(task.entry["answer"] in prompt.replace(asked, "") for prompt in prompts)


def test_no_verdict_lets_a_team_try_both_answers_of_a_question() -> None:
    env = make("reasoning_gym", dataset="syllogism", max_turns=2)

    def script(prompt: str, k: int) -> str:
        return (
            "<answer>No</answer>" if "something else" in prompt or "were wrong" in prompt else "<answer>Yes</answer>"
        )

    tasks = [env.task("val", index) for index in range(20)]
    records = [asyncio.run(play(env, task, ScriptedTeam({"solver": script, "checker": script}))) for task in tasks]
    assert [record.outcome.success for record in records] == [task.entry["answer"] == "Yes" for task in tasks]


def test_a_draft_is_scored_like_an_answer_and_the_checker_decides() -> None:
    env = make("reasoning_gym", **SUMS, max_turns=1)
    task = env.task("val", 0)
    right, wrong = written(task.entry["answer"], "full"), written("none", "full")
    record = asyncio.run(play(env, task, ScriptedTeam({"solver": lambda p, k: right, "checker": lambda p, k: wrong})))
    assert [decision.candidates[0].reward for decision in record.decisions] == [1.1, 0.1]
    assert not record.outcome.success


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "dataset='': reasoning-gym has no data set"),
        ({"dataset": "chain_summ"}, "no data set 'chain_summ'"),
        ({"dataset": "chain_sum", "max_turns": 0}, "max_turns=0"),
        ({"dataset": "chain_sum", "style": "short"}, "style='short'.*compact"),
        ({"dataset": "chain_sum", "options": [1]}, "options=.*: a section"),
        ({"dataset": "chain_sum", "options": {"terms": 2}}, "cannot be made, TypeError.*terms"),
        ({"dataset": "chain_sum", "options": {"min_terms": 0}}, "cannot be made, AssertionError"),
        ({"dataset": "chain_sum", "options": {"seed": 3}}, "options.seed=3"),
        ({"dataset": "composite"}, "options.datasets is a list"),
        ({"dataset": "composite", "options": {"datasets": [{"name": "composite"}]}}, "no data set 'composite'"),
        ({"dataset": "simple_integration"}, "evaluates replies"),
        ({"dataset": "codeio"}, "'codeio' runs its programs in this process"),
        ({"dataset": "composite", "options": {"datasets": [{"name": "codeio"}]}}, "'codeio' runs its programs"),
        pytest.param(
            {"dataset": "ransom_note"},
            "another question of 'ransom_note' .*PYTHONHASHSEED=0 for all",
            marks=pytest.mark.skipif(os.environ.get("PYTHONHASHSEED") == "0", reason="then it is allowed"),
        ),
        ({"dataset": "game_of_life_halting"}, "gives 1 for a wrong answer"),
        (
            {"dataset": "complex_arithmetic"},
            "gives 1 on average for the answer 'nan' to every question, and at most 0.13",
        ),
        ({"dataset": "coin_flip"}, "gives 0.75 on average for the answer '0' to every question"),
    ],
)
def test_refused_with_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message) as caught:
        make("reasoning_gym", **options)
    assert str(caught.value).startswith("at_grpo.environment.") and "\n" not in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, extra in (("pettingzoo", "pettingzoo"), ("textarena", "textarena"), ("reasoning_gym", "reasoning-gym")):
        with pytest.raises(EnvironmentConfigError, match=rf"pip install 'verl-atgrpo\[{extra}\]'"):
            make(name)


def test_a_data_set_with_one_question_has_no_validation(careless: ReasoningGym) -> None:
    with pytest.raises(EnvironmentConfigError, match="hardly any question is for the split"):
        for split in ("train", "val"):
            careless.task(split, 0)
