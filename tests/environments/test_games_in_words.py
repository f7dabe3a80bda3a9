"""Walks and number search, told in words: answers, scores by hand, ends of episodes, and what the check demands."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from fakes.scripted_episodes import prompt_of, scripted

from verl_atgrpo import EnvironmentConfigError, Score, check_environment, make
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.common.splits import part_of
from verl_atgrpo.environments.common.words import read_number, read_word
from verl_atgrpo.environments.number_search import Search
from verl_atgrpo.environments.plan_path.grid import PlanPathTask, State
from verl_atgrpo.environments.walk import DIRECTIONS, exact_steps, where_goal_lies
from verl_atgrpo.play import contamination
from verl_atgrpo.play.testing import Script
from verl_atgrpo.play.types import EpisodeRecord

WAYS = tuple(DIRECTIONS)
NAMES = [f"{name}{kind}" for name in ("walk", "walk_walls", "number_search") for kind in ("", "_single")]


def episode(env: Any, task: Any, **scripts: str | Script) -> EpisodeRecord:
    def script(reply: str | Script) -> Script:
        return (lambda prompt, k: reply) if isinstance(reply, str) else reply

    return scripted(env, task, {agent: script(reply) for agent, reply in scripts.items()})


def scores(record: EpisodeRecord) -> list[tuple[str, float]]:
    return [(decision.agent, decision.candidates[0].score.local) for decision in record.decisions]


# ------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("reply", "word", "alone"),
    [
        ("left", "left", True),
        (" Left.\n", "left", True),
        ("**LEFT**", "left", True),
        ("I go left", "left", False),
        ("left, left!", "left", False),
        ("<think>up or down?</think>left", "left", True),
        ("left or right", None, False),
        ("leftwards", None, False),
        ("", None, False),
        ("\u0142eft", None, False),
    ],
)
def test_a_word_is_the_only_one_of_the_choices(reply: str, word: str | None, alone: bool) -> None:
    said = read_word(reply, WAYS)
    assert (said and said.value) == word
    assert said is None or said.alone is alone


@pytest.mark.parametrize(
    ("reply", "number", "alone"),
    [
        ("3", 3, True),
        (" 3.\n", 3, True),
        ("`12`", 12, True),
        ("3 steps", 3, False),
        ("It is 3, so 3.", 3, False),
        ("_7_", 7, True),
        ("\u7b54\u6848\u662f7", 7, False),
        *(
            (reply, None, False)
            for reply in (
                "",
                "three",
                "3 or 4",
                "-3",
                "3.5",
                "1,000",
                "1/2",
                "2^3",
                "9" * 5,
                "\u0663",
                "31m",
                "x3 = 7",
            )
        ),
    ],
)
def test_a_number_is_the_only_one(reply: str, number: int | None, alone: bool) -> None:
    said = read_number(reply)
    assert (said and said.value) == number
    assert said is None or said.alone is alone


def test_further_words_cost_a_little_and_never_more_than_the_score() -> None:
    exact, wordy = read_word("up", WAYS), read_word("I say up", WAYS)
    assert exact is not None and wordy is not None
    assert exact.worth(1.0) == Score(local=1.0) and wordy.worth(1.0) == Score(local=0.95)
    assert exact.worth(0.02) == Score(local=0.02) and wordy.worth(0.02) == Score()


# ------------------------------------------------------------------ walks


def field(start: tuple[int, int], goal: tuple[int, int], *walls: tuple[int, int], size: int = 6) -> PlanPathTask:
    return PlanPathTask(size, frozenset(walls), start, goal)


@pytest.mark.parametrize(
    ("start", "goal", "told"),
    [
        ((0, 3), (2, 0), "Your goal is 2 rows down and 3 columns to the left."),
        ((4, 1), (3, 2), "Your goal is 1 row up and 1 column to the right."),
        ((4, 1), (4, 5), "Your goal is 4 columns to the right."),
    ],
)
def test_a_prompt_tells_where_the_goal_lies(start: tuple[int, int], goal: tuple[int, int], told: str) -> None:
    text = where_goal_lies(State.initial(field(start, goal)))
    assert text == told


def test_a_walk_by_hand() -> None:
    task = field((0, 3), (2, 0))
    ways, paces = iter(["down", "up", "left"]), iter(["2", "1", "3"])
    record = episode(
        make("walk"), task, navigator=lambda prompt, k: next(ways), pacer=lambda prompt, k: f"{next(paces)} steps"
    )
    # Down 2 is exact; up leads away, so that 0 steps would be right; left 3 is right, from one row above.
    assert scores(record) == [
        ("navigator", 1.0),
        ("pacer", 0.95),
        ("navigator", 0.05),
        ("pacer", pytest.approx(0.35 * 5 / 6 - 0.05)),
        ("navigator", 1.0),
        ("pacer", 0.95),
    ]
    assert not record.outcome.success
    assert record.outcome.team_reward == pytest.approx(4 / 5)
    assert record.outcome.metrics == {"turns": 3, "crashed": 0}


def test_the_walker_stops_at_the_border_and_not_at_the_goal() -> None:
    beyond = episode(make("walk", max_turns=1), field((0, 0), (0, 3)), navigator="right", pacer="5")
    assert not beyond.outcome.success
    there = episode(make("walk", max_turns=1), field((0, 0), (0, 5)), navigator="right", pacer="9")
    assert there.outcome.success  # at the border
    assert scores(there) == [("navigator", 1.0), ("pacer", pytest.approx(0.35 * 2 / 6))]


def test_a_turn_without_an_answer_is_lost() -> None:
    task = field((0, 0), (0, 3))
    assert scores(episode(make("walk"), task, navigator="?", pacer="3")) == [("navigator", 0.0)] * 3
    record = episode(make("walk", max_turns=1), task, navigator="right", pacer="?")
    assert scores(record) == [("navigator", 1.0), ("pacer", 0.0)] and record.outcome.team_reward == 0


def test_a_single_walker_earns_half_for_each_part() -> None:
    task = field((0, 3), (2, 0))
    for reply, score in (
        ("down 2", 1.0),
        ("Down, 2.", 1.0),
        ("I go down 2 steps", 0.95),
        ("down 3", 0.5 + 0.5 * 0.35 * 5 / 6),
        ("up 0", 0.025),  # a number of steps in a wrong direction counts for nothing
        ("down", 0.0),
        ("down 2 left 3", 0.0),
        ("down,I,think,as,it,is,two,rows 2", 0.95),  # glued by commas these are no fewer words
    ):
        record = episode(make("walk_single", max_turns=1), task, solo=reply)
        assert scores(record) == [("solo", pytest.approx(score))], reply


WALLED = field((1, 1), (1, 4), (1, 2), (0, 1), size=5)
"""The walker has walls above and to the right of it; the way to the goal is around them, below."""


def test_a_walk_among_walls_by_hand() -> None:
    env = make("walk_walls")
    record = episode(env, WALLED, navigator="down", checker="free")
    first = prompt_of(record.decisions[0])
    assert first == (
        "Which free way leads to the goal: up, down, left or right? Answer with one word. You are at row 2, column 2. "
        "The goal is at row 2, column 5. Walls: up, right. Free: down, left. The goal is right."
    )
    ways = "up: wall, left: free, right: wall, down: free"
    assert prompt_of(record.decisions[1]) == f"What is down? Answer with one word. {ways}."
    assert scores(record)[:2] == [("navigator", 1.0), ("checker", 1.0)]
    assert scores(episode(env, WALLED, navigator="left", checker="wall"))[:2] == [
        ("navigator", 0.3),
        ("checker", 0.05),
    ]
    assert scores(episode(env, WALLED, navigator="up", checker="wall"))[:2] == [("navigator", 0.05), ("checker", 1.0)]


def test_a_crash_ends_the_episode_and_a_warning_costs_the_turn() -> None:
    env = make("walk_walls")
    crashed = episode(env, WALLED, navigator="right", checker="free")
    assert scores(crashed) == [("navigator", 0.05), ("checker", 0.05)]
    assert crashed.outcome.metrics == {"turns": 1, "crashed": 1} and not crashed.outcome.success
    for verdict in ("wall", "?"):
        stopped = episode(env, WALLED, navigator="right", checker=verdict)
        assert stopped.outcome.metrics == {"turns": 8, "crashed": 0}
    single = episode(make("walk_walls_single"), WALLED, solo="right")
    assert single.outcome.metrics == {"turns": 1, "crashed": 1}


def test_a_refused_direction_is_told_until_the_next_step() -> None:
    steps = iter(["right", "up", "left", "?", "?"])
    verdicts = {"right": "wall", "up": "wall", "left": "free"}
    env = make("walk_walls", max_turns=5)
    record = episode(
        env,
        field((1, 1), (0, 4), (1, 2), (2, 1), size=5),
        navigator=lambda prompt, k: next(steps),
        checker=lambda prompt, k: next(said for way, said in verdicts.items() if f"What is {way}?" in prompt),
    )
    prompts = [prompt_of(one) for one in record.decisions if one.agent == "navigator"]
    assert [prompt.rpartition("Free: ")[2] for prompt in prompts] == [
        "up, left. The goal is right and up.",
        "up, left. You cannot go right. The goal is up.",
        "up, left. You cannot go up or right. The way around is left.",
        *["up, down. The goal is right and up."] * 2,
    ]
    silent = episode(env, WALLED, navigator="right", checker="?")
    assert len({prompt_of(one) for one in silent.decisions if one.agent == "navigator"}) == 1, "no verdict, no refusal"


def test_in_training_the_checker_is_also_asked_about_walls() -> None:
    """A checker that always says "free" cannot live on the navigator's best answers, which are hardly ever walls."""

    def practice(split: str, verdict: str, **options: Any) -> tuple[list[EpisodeRecord], list[str]]:
        env: Any = make("walk_walls", **options)
        plays = [episode(env, env.task(split, n), navigator="up", checker=verdict) for n in range(40)]
        asked = [prompt_of(one) for play in plays for one in play.decisions if one.agent == "checker"]
        return plays, [prompt for prompt in asked if "What is up?" not in prompt]

    def ends(plays: list[EpisodeRecord]) -> list[Any]:
        return [play.outcome for play in plays]

    plays, prompts = practice("train", "wall")
    turns = sum(play.outcome.metrics["turns"] for play in plays)
    assert 0.5 < len(prompts) / turns < 0.8, "other ways than the navigator's; some cells have no wall around"
    assert 0 < len(practice("train", "wall", wall_questions=0.25)[1]) < len(prompts) / 2
    assert all(re.search(r"What is (\w+)\?.* \1: wall\.$", prompt) for prompt in prompts)
    without, none = practice("train", "wall", wall_questions=0.0)
    assert not none and not practice("val", "wall")[1]
    assert ends(plays) == ends(without)
    assert ends(practice("train", "free")[0]) == ends(practice("train", "free", wall_questions=0.0)[0])
    with pytest.raises(EnvironmentConfigError, match="wall_questions is not an option"):
        make("walk_walls_single", wall_questions=0.5)


def test_an_episode_of_training_ends_where_it_was_before() -> None:
    env: Any = make("walk_walls")
    for split, turns in (("train", {2.0}), ("val", {8.0})):  # the second question tells what was refused
        stuck = [episode(env, env.task(split, n), navigator="left", checker="wall") for n in range(10)]
        assert {play.outcome.metrics["turns"] for play in stuck} == turns
    steps = ["down", "up", "down", "up", "down", "up", "down", "up"]
    fields = (env.task("train", n) for n in range(400))
    task = next(one for one in fields if one.free((one.start[0] + 1, one.start[1])) and one.goal[1] != one.start[1])
    ways = iter(steps)
    record = episode(env, task, navigator=lambda prompt, k: next(ways), checker="free")
    assert record.outcome.metrics == {"turns": 3, "crashed": 0}, "down; up, where nobody came from before; down again"


def test_every_walk_among_walls_can_be_done_and_is_not_too_short() -> None:
    env: Any = make("walk_walls")
    for split in ("train", "val"):
        distances = [task.distance[task.start] for task in (env.task(split, index) for index in range(200))]
        assert min(distances) == 3 and max(distances) == 6


def test_the_way_back_is_no_free_way_but_in_a_dead_end() -> None:
    steps, env = iter(["down", "left"]), make("walk_walls", max_turns=5)
    record = episode(env, WALLED, navigator=lambda prompt, k: next(steps, "?"), checker="free")
    prompts = {agent: [prompt_of(one) for one in record.decisions if one.agent == agent] for agent in env.agents}
    told = [re.findall(r"Walls: .*? Free: (.*?)\. The goal", prompt) for prompt in prompts["navigator"][:3]]
    assert told == [["down, left"], ["down, left, right"], ["up, down"]]
    ways = "up: free, down: free, right: free, left: free"
    assert prompts["checker"][1] == f"What is left? Answer with one word. {ways}."
    dead_end = field((1, 1), (1, 4), (1, 2), (0, 1), (2, 0), (0, 0), size=5)
    record = episode(make("walk_walls"), dead_end, navigator="left", checker="free")
    assert "Walls: up, down, left. Free: right. The goal is" in prompt_of(record.decisions[2])


def test_most_fields_can_be_solved_by_what_is_told() -> None:
    """A good reply to what a prompt tells: the first direction of the goal that is free, or a free way."""
    env: Any = make("walk_walls")

    def script(prompt: str, k: int) -> str:
        (free,) = re.findall(r"Free: (.*?)\. The goal is", prompt)
        (goal,) = re.findall(r"The goal is ([a-z ]+)\.", prompt)
        here, there = (tuple(map(int, cell)) for cell in re.findall(r"row (\d), column (\d)", prompt))
        steps = {"up": here[0] - there[0], "left": here[1] - there[1]}
        steps |= {"down": -steps["up"], "right": -steps["left"]}
        told = [steps[way] for way in goal.split(" and ")]
        assert sorted(told, reverse=True) == told == sorted((n for n in steps.values() if n > 0), reverse=True)
        return next((way for way in goal.split(" and ") if way in free), free.split(", ")[0])

    plays = [episode(env, env.task("val", n), navigator=script, checker="free") for n in range(200)]
    assert sum(play.outcome.success for play in plays) >= 200 * 0.95


# ------------------------------------------------------------------ number search


def numbers_left(prompt: str) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", prompt.rpartition("Numbers:")[2])]


def test_the_guesser_is_given_what_is_left_and_all_numbers_have_two_digits() -> None:
    env: Any = make("number_search")
    tasks = [env.task(split, number) for split in ("train", "val") for number in range(300)]
    assert {task.low for task in tasks} == set(range(10, 40)) and all(task.high == task.low + 14 for task in tasks)
    record = episode(env, Search(13, 10, 24), guesser="17", judge="17")
    asked = [prompt_of(one) for one in record.decisions if one.agent == "guesser"]
    question = "Which number is in the middle? Answer with the number only. Numbers:"
    assert [prompt.rpartition(question)[2] for prompt in asked[:2]] == [
        " 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24.",
        " 10, 11, 12, 13, 14, 15, 16.",
    ]
    many = episode(make("number_search", numbers=41, max_turns=6), Search(13, 10, 50), guesser="?", judge="?")
    assert prompt_of(many.decisions[0]) == f"{question} 10 to 50."


@pytest.mark.parametrize(
    ("low", "high", "earned"),
    [
        (1, 15, {8: 1.0, 7: 0.1 + 0.9 * 6 / 7, 9: 0.1 + 0.9 * 6 / 7, 1: 0.1, 15: 0.1, 16: 0.05, 0: 0.05}),
        (4, 7, {5: 1.0, 6: 1.0, 4: 0.1, 7: 0.1}),
        (4, 5, {4: 1.0, 5: 1.0}),
        (9, 9, {9: 1.0, 8: 0.05}),
    ],
)
def test_a_guess_is_worth_what_it_leaves_at_worst(low: int, high: int, earned: dict[int, float]) -> None:
    env: Any = make("number_search")
    for secret in (low, high):
        for guess, score in earned.items():
            assert env.score_guess(Search(secret, low, high), str(guess)).local == pytest.approx(score), guess
    assert env.score_guess(Search(low, low, high), "the middle") == Score()


def test_a_search_by_hand() -> None:
    env = make("number_search")
    guesses, verdicts = iter(["8", "12", "10"]), iter(["10", "12"])
    asked: list[str] = []

    def judge(prompt: str, k: int) -> str:
        asked.append(prompt)
        return next(verdicts)

    record = episode(env, Search(10, 1, 15), guesser=lambda prompt, k: next(guesses), judge=judge)
    assert record.outcome.success and record.outcome.metrics == {"turns": 3, "misled": 0}
    assert [prompt.splitlines()[-1] for prompt in asked] == [
        "Which number is larger, 8 or 10? Answer with the number only.",
        "Which number is larger, 12 or 10? Answer with the number only.",
    ]
    assert scores(record)[1] == scores(record)[3] == ("judge", 1.0)
    last = prompt_of(record.decisions[-1])
    assert last.endswith(" Numbers: 9, 10, 11.")


def test_a_wrong_verdict_ends_the_search_and_none_costs_the_turn() -> None:
    env = make("number_search")
    misled = episode(env, Search(10, 1, 15), guesser="8", judge="8")
    assert scores(misled)[1:] == [("judge", 0.05)]
    assert misled.outcome.metrics == {"turns": 1, "misled": 1} and not misled.outcome.success
    for verdict in ("perhaps", "9", "8 or 10"):
        silent = episode(env, Search(10, 1, 15), guesser="8", judge=verdict)
        assert silent.outcome.metrics == {"turns": 4, "misled": 0}
        assert scores(silent)[1] == ("judge", 0.0)
    outside = episode(env, Search(10, 1, 15), guesser="99", judge="99")
    assert {agent for agent, _ in scores(outside)} == {"guesser"}


def test_halving_finds_every_number() -> None:
    single: Any = make("number_search_single")

    def halving(prompt: str, k: int) -> str:
        left = numbers_left(prompt)
        return str(left[(len(left) - 1) // 2])

    for secret in range(1, 16):
        assert episode(single, Search(secret, 1, 15), solo=halving).outcome.success
    with pytest.raises(EnvironmentConfigError, match=r"max_turns=3: so many guesses find one of at most 7 numbers"):
        make("number_search", max_turns=3)


# ------------------------------------------------------------------ the contract


def gold(env: Any) -> Callable[[Any], Mapping[str, Script]]:
    """Task -> scripts that read the prompt and play well."""

    def direction(task: PlanPathTask, prompt: str) -> str:
        row, column = (int(number) - 1 for number in re.findall(r"You are at row (\d+), column (\d+)", prompt)[-1])
        nearer = (
            name
            for name, letter in DIRECTIONS.items()
            if task.distance.get((row + MOVES[letter][0], column + MOVES[letter][1]), 999) < task.distance[row, column]
        )
        return next(nearer)

    def walker(task: PlanPathTask) -> Script:
        def script(prompt: str, k: int) -> str:
            if "What is" in prompt:
                return re.findall(r": (\w+)\.", prompt)[-1]
            row, column = (int(number) - 1 for number in re.findall(r"You are at row (\d+), column (\d+)", prompt)[-1])
            state = State(task, (row, column), 0)
            if "How many steps" in prompt:
                return str(exact_steps(state, re.findall(r"You go (\w+)", prompt)[-1]))
            way = direction(task, prompt)
            return f"{way} {exact_steps(state, way)}" if "one number" in prompt else way

        return script

    def searcher(prompt: str, k: int) -> str:
        if "larger" in prompt:
            return str(max(map(int, re.findall(r"larger, (\d+) or (\d+)", prompt)[-1])))
        left = numbers_left(prompt)
        return str(left[(len(left) - 1) // 2])

    def scripts(task: Any) -> Mapping[str, Script]:
        return dict.fromkeys(env.agents, walker(task) if isinstance(task, PlanPathTask) else searcher)

    return scripts


def legal(env: Any) -> Callable[[Any], Mapping[str, Script]]:
    def scripts(task: Any) -> Mapping[str, Script]:
        def script(prompt: str, k: int) -> str:
            rng = random.Random(f"{prompt} {k}")
            if "What is" in prompt:
                return rng.choice(("wall", "free"))
            if "larger" in prompt:
                return rng.choice(re.findall(r"larger, (\d+) or (\d+)", prompt)[-1])
            if "How many steps" in prompt:
                return str(rng.randint(0, 5))
            if "in the middle" in prompt:
                return str(rng.choice(numbers_left(prompt)))
            return rng.choice(WAYS) + (f" {rng.randint(0, 5)}" if "one number" in prompt else "")

        return dict.fromkeys(env.agents, script)

    return scripts


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("walls" in name)) for name in NAMES])
def test_games_in_words_keep_the_contract(name: str) -> None:
    env = make(name)
    check_environment(
        name, gold=gold(env), legal=legal(env), plays=300, tasks=10, episodes=2, bounds=(0, 1), floor=0.1
    )


def test_a_mixture_keeps_the_contract() -> None:
    options = {"parts": {"walk": {"weight": 2}, "search": {"name": "number_search"}}}
    mixture = make("mixture", **options)

    def of_parts(scripts: Any) -> Any:
        own = {name: scripts(part.environment) for name, part in mixture.parts.items()}

        def of_task(task: Any) -> dict[str, Script]:
            played = {f"{task.part}.{agent}": script for agent, script in own[task.part](task.task).items()}
            return {**dict.fromkeys(mixture.agents, lambda prompt, k: ""), **played}

        return of_task

    check_environment(
        "mixture", options, gold=of_parts(gold), legal=of_parts(legal), plays=100, tasks=10, bounds=(0, 1), floor=0.1
    )


def test_a_curriculum_keeps_the_contract() -> None:
    options = {"of": {"name": "walk"}, "levels": [{"size": 4}, {"size": 6}]}
    curriculum = make("curriculum", **options)

    def of_levels(scripts: Any) -> Any:
        own = [scripts(level) for level in curriculum.levels]
        return lambda task: own[task.level](task.task)

    scripts = {"gold": of_levels(gold), "legal": of_levels(legal)}
    check_environment("curriculum", options, **scripts, plays=100, tasks=10, bounds=(0, 1), floor=0.1)


@pytest.mark.parametrize("name", ["walk", "walk_walls"])
def test_sizes_that_share_goals_between_splits_are_found(name: str) -> None:
    """No prompt tells the size, so a task of one size may be a validation task of another."""
    leaks = make("curriculum", of={"name": name}, levels=[{"size": 4}, {"size": 5}])
    assert list(contamination.overlaps(leaks, 200, 200))
    assert not list(contamination.overlaps(make(name), 200, 200))


@pytest.mark.parametrize("name", ["walk", "walk_walls", "number_search"])
def test_a_single_agent_has_its_teams_tasks(name: str) -> None:
    team, single = make(name), make(f"{name}_single")
    assert single.agents == ("solo",)
    assert all(single.task("val", index) == team.task("val", index) for index in range(20))


def test_few_values_are_split_in_fixed_parts() -> None:
    for count in (2, 7, 8, 36):
        train, val = part_of(range(count), "train"), part_of(range(count), "val")
        assert sorted(train + val) == list(range(count))
        assert len(val) == max(1, count // 8)
        assert val == part_of(range(count), "val")
