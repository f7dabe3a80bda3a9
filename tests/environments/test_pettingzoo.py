"""PettingZoo: replays, illegal replies, rewards, splits, invalid options."""

from __future__ import annotations

import copy
import itertools
import random
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("pettingzoo")

EXAMPLE = Path(__file__).parents[2] / "examples" / "pettingzoo"
sys.path.append(str(EXAMPLE))

import meeting
from fakes.scripted_episodes import here, prompt_of, scripted
from gymnasium.spaces import Box, Text

from verl_atgrpo import EnvironmentConfigError, Score, check_environment, make
from verl_atgrpo.environments.ports.pettingzoo import PettingZooGame
from verl_atgrpo.play.testing import EnvironmentContractError, Script

WALKERS = {"env": "meeting:env", "actions": ["up", "down"], "task_key": "meeting:street"}
THIS = __name__


def walkers(script: Script) -> Mapping[str, Script]:
    return {"north": script, "south": script}


def towards(prompt: str) -> str:
    mine, theirs = map(int, re.findall(r"\d+", prompt)[1:3])
    return "up" if theirs > mine else "down"


# ------------------------------------------------------------------ PettingZoo


@pytest.mark.parametrize("style", ["full", "compact"])
def test_the_example_keeps_the_contract(style: str) -> None:
    def said(action: str) -> str:
        return action if style == "compact" else f"I look around.\nAction: {action}"

    def to_and_fro(task: Any) -> Mapping[str, Script]:
        steps = itertools.cycle(["up", "down"])
        asked: dict[str, str] = {}
        return walkers(lambda prompt, k: said(asked.setdefault(prompt, next(steps))))

    check_environment(
        "pettingzoo" if style == "full" else here("pettingzoo"),
        {**WALKERS, "style": style},
        gold=lambda task: walkers(lambda prompt, k: said(towards(prompt))),
        exploits=[to_and_fro],
        tasks=10,
        episodes=2,
    )


def test_rewards_of_a_step_are_the_teams_mean_and_the_agents_own() -> None:
    env = make("pettingzoo", env=f"{THIS}:uneven", actions=["up", "down"], style="compact", success_return=0.5)
    record = scripted(env, env.task("train", 0), walkers(lambda prompt, k: towards(prompt)))
    way = len(record.decisions)  # every step is one house closer, and only the walker itself is rewarded
    for decision in record.decisions:
        score = decision.candidates[0].score
        assert score.local == pytest.approx(1 / way) and score.team == pytest.approx(1 / way / 2)
    assert record.outcome.success and record.outcome.team_reward == pytest.approx(0.5)
    returns = [record.outcome.metrics[f"return_{agent}"] for agent in ("north", "south")]
    assert sum(returns) == pytest.approx(1)


def test_opponents_earn_their_own_reward_alone() -> None:
    env = make("pettingzoo", env=f"{THIS}:uneven", actions=["up", "down"], style="compact", team=["north"])
    record = scripted(env, env.task("train", 0), walkers(lambda prompt, k: towards(prompt)))
    for decision in record.decisions:
        score = decision.candidates[0].score
        assert score.team == (score.local if decision.agent == "north" else 0)
    assert record.outcome.team_reward == record.outcome.metrics["return_north"]


def test_each_player_may_be_in_training_in_turn() -> None:
    env = make("pettingzoo", env=f"{THIS}:uneven", actions=["up", "down"], style="compact", team="turns")
    sides = set()
    for index in range(6):
        task = env.task("train", index)
        (opponent,) = env.opponents(task)
        (side,) = {"north", "south"} - {opponent}
        record = scripted(env, task, walkers(lambda prompt, k: "up"))
        assert record.outcome.team_reward == record.outcome.metrics[f"return_{side}"]
        for decision in record.decisions:
            score = decision.candidates[0].score
            assert score.team == (score.local if decision.agent == side else 0)
        sides.add(side)
    assert sides == {"north", "south"}
    assert make("pettingzoo", env=f"{THIS}:uneven", actions=["up", "down"], style="compact").opponents(0) == ()


@pytest.mark.parametrize("on_illegal", ["end", "again"])
def test_an_opponent_that_answers_illegally_has_lost(on_illegal: str) -> None:
    env = make(
        "pettingzoo",
        env=f"{THIS}:uneven",
        actions=["up", "down"],
        style="compact",
        team="turns",
        max_steps=4,
        on_illegal=on_illegal,
    )
    for index in range(4):
        task = env.task("train", index)
        (opponent,) = env.opponents(task)
        (side,) = {"north", "south"} - {opponent}
        record = scripted(env, task, {side: lambda prompt, k: "up", opponent: lambda prompt, k: "sideways"})
        found = record.outcome.metrics
        before = sum(one.candidates[0].score.local for one in record.decisions if one.agent == side)
        assert found[f"return_{opponent}"] < 0
        if on_illegal == "end":
            assert record.outcome.success and found[f"return_{side}"] == pytest.approx(before + 1)
        else:
            assert not record.outcome.success and found[f"return_{side}"] == pytest.approx(before)


def test_a_game_that_is_cut_off_after_an_illegal_reply_is_not_over() -> None:
    game = {"env": f"{THIS}:uneven", "actions": ["up", "down"], "style": "compact", "team": "turns"}
    env = make("pettingzoo", **game, max_steps=2, on_illegal="again", success_return=-9.0)
    nonsense = dict.fromkeys(("north", "south"), lambda prompt, k: "sideways")
    for index in range(4):
        assert not scripted(env, env.task("train", index), nonsense).outcome.success


def test_an_illegal_reply_earns_the_least_and_ends_the_episode_or_repeats_the_prompt() -> None:
    replies = ["sideways", "Action: up", "up", "UP", " "]
    team = walkers(lambda prompt, k: replies[k % 5])
    env = make("pettingzoo", **WALKERS, style="compact", max_steps=1)
    (decision,) = scripted(env, env.task("train", 0), team, candidates=5).decisions
    scores = [candidate.score for candidate in decision.candidates]
    assert [score == Score(-1, -1) for score in scores] == [True, True, False, False, True]
    assert scores[2] == scores[3]

    lost = walkers(lambda prompt, k: "sideways")
    outcome = scripted(env, env.task("train", 0), lost).outcome
    assert outcome.metrics == {"steps": 1, "illegal": 1, "return_north": -1, "return_south": 0}
    assert outcome.team_reward == -0.5 and not outcome.success

    env = make("pettingzoo", **WALKERS, style="compact", max_steps=3, on_illegal="again", illegal_reward=-0.25)
    record = scripted(env, env.task("train", 0), lost)
    assert [decision.agent for decision in record.decisions] == ["north"] * 3
    first, second = (prompt_of(decision) for decision in record.decisions[:2])
    assert second == "Your last reply was not a legal action. Give a legal one.\n" + first
    assert record.decisions[2].candidates[0].score == Score(-0.25, -0.25)


@pytest.mark.parametrize(
    ("reply", "legal"),
    [
        *(
            ("**Action: up**", True),
            ("**Action:** up", True),
            ("Action: `up`.", True),
            ("Action: <up>", True),
            ("Action: UP.", True),
            ("action: [up]", True),
            ('Action: "up"', True),
            ("```\nAction: up\n```", True),
        ),
        *(
            ("Go! Action: up", False),
            ("**up**", False),
            ("**", False),
            ("Action: up up", False),
            ("reaction: up", False),
        ),
    ],
)
def test_an_action_may_be_marked_up(reply: str, legal: bool) -> None:
    env = make("pettingzoo", **WALKERS, max_steps=1)
    (decision,) = scripted(env, env.task("train", 0), walkers(lambda prompt, k: reply)).decisions
    assert (decision.candidates[0].score != Score(-1, -1)) == legal


def test_truncation_is_not_success() -> None:
    env = make("pettingzoo", **WALKERS, style="compact", max_steps=1, success_return=0.1)
    record = scripted(env, env.task("train", 0), walkers(lambda prompt, k: towards(prompt)))
    assert record.outcome.team_reward > 0.1 and not record.outcome.success


def test_only_unmasked_actions_are_listed_and_accepted() -> None:
    env = make("pettingzoo", env=f"{THIS}:masked", actions=["up", "down"])
    team = walkers(lambda prompt, k: ["Action: up", "Action: down"][k % 2])
    (decision, *_) = scripted(env, env.task("train", 0), team, candidates=2).decisions
    assert "\nLegal actions: down\n" in prompt_of(decision)
    assert [candidate.score == Score(-1, -1) for candidate in decision.candidates] == [True, False]


def test_text_actions_have_to_be_in_their_space() -> None:
    env = make("pettingzoo", env=f"{THIS}:texts", style="compact", max_steps=1)
    team = walkers(lambda prompt, k: [" ud ", "upward", "U"][k % 3])
    (decision,) = scripted(env, env.task("train", 0), team, candidates=3).decisions
    assert [candidate.score == Score(-1, -1) for candidate in decision.candidates] == [False, True, True]


def test_a_game_that_raises_on_an_action_of_its_space_counts_it_as_illegal() -> None:
    env = make("pettingzoo", env=f"{THIS}:texts", style="compact", max_steps=2)
    team = walkers(lambda prompt, k: ["u", "uu"][k % 2])
    (decision, *_) = scripted(env, env.task("train", 0), team, candidates=2).decisions
    assert [candidate.score == Score(-1, -1) for candidate in decision.candidates] == [False, True]


def test_a_function_converts_other_observations_to_text() -> None:
    with pytest.raises(EnvironmentConfigError, match=r"observes a list, not a text; .*observe='module:function'"):
        make("pettingzoo", env=f"{THIS}:numbers", actions=["up", "down"])
    env = make("pettingzoo", env=f"{THIS}:numbers", actions=["up", "down"], observe=f"{THIS}:words", style="compact")
    (decision, *_) = scripted(env, env.task("train", 0), walkers(lambda prompt, k: "up")).decisions
    assert re.fullmatch(r"north: \d+ \d+", prompt_of(decision))


def test_every_instance_is_closed_and_global_generators_are_restored() -> None:
    env = make("pettingzoo", env=f"{THIS}:counted", actions=["up", "down"], style="compact")
    ours, numpys = random.getstate(), np.random.get_state()[1].tolist()
    scripted(env, env.task("train", 0), walkers(lambda prompt, k: ["up", "down", "?"][k % 3]), candidates=3)
    assert random.getstate() == ours and np.random.get_state()[1].tolist() == numpys
    assert Counted.opened > 10 and Counted.opened == Counted.closed


@pytest.mark.parametrize("kind", ["start", "reward", "observation"])
def test_an_environment_that_is_not_deterministic_is_refused(kind: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=f"env='{THIS}:unsteady' is not deterministic"):
        make("pettingzoo", env=f"{THIS}:unsteady", actions=["up", "down"], options={"kind": kind})


def test_one_that_is_found_so_in_an_episode_ends_the_run_with_one_line() -> None:
    env = make("pettingzoo", env=f"{THIS}:unsteady", actions=["up", "down"], options={"kind": "late"}, style="compact")
    with pytest.raises(EnvironmentConfigError, match="is not deterministic") as caught:
        scripted(env, env.task("train", 0), walkers(lambda prompt, k: "up"))
    assert "\n" not in str(caught.value)


def test_global_generators_are_seeded_for_an_environment_that_uses_them() -> None:
    check_environment(
        here("pettingzoo"),
        {"env": f"{THIS}:unsteady", "options": {"kind": "global"}, "actions": ["up", "down"]},
        tasks=4,
        episodes=1,
    )


def test_openings_decide_the_split_and_a_single_one_is_refused() -> None:
    env = make("pettingzoo", **WALKERS)
    train, val = ({env.fingerprint(env.task(split, index)) for index in range(60)} for split in ("train", "val"))
    assert len(train) > 20 and len(val) > 10 and not train & val
    alike = {"env": f"{THIS}:alike", "actions": ["up", "down"]}
    with pytest.raises(EnvironmentConfigError, match=r"all its seeds make the same opening.*shared_openings=true"):
        make("pettingzoo", **alike)
    env = make("pettingzoo", **alike, shared_openings=True)
    assert env.fingerprint(env.task("train", 0)) == env.fingerprint(env.task("val", 0))


def test_a_seed_that_the_environment_keeps_does_not_hide_that_openings_are_equal() -> None:
    with pytest.raises(EnvironmentConfigError, match=r"all its seeds make the same opening"):
        make("pettingzoo", env=f"{THIS}:keeping", actions=["up", "down"])


@pytest.mark.slow
def test_validation_streets_are_not_in_training() -> None:
    def wander(task: Any) -> Mapping[str, Script]:
        return walkers(lambda prompt, k: random.Random(f"{prompt} {k}").choice(("up", "down")))

    few = {"options": {"houses": 8}, "style": "compact"}  # so few that all positions occur
    check_environment(here("pettingzoo"), {**WALKERS, **few}, legal=wander, plays=150, tasks=5, episodes=0)
    by_opening = {"env": f"{THIS}:nameless", "actions": ["up", "down"], **few}
    with pytest.raises(EnvironmentContractError, match="leave out of task_key what moves change"):
        check_environment(here("pettingzoo"), by_opening, legal=wander, plays=150, tasks=5, episodes=0)


def test_a_subclass_may_say_which_tasks_are_one() -> None:
    """`task_key` is an option and, as in every environment, a method."""

    class Own(PettingZooGame):
        def task_key(self, task: int) -> str:  # type: ignore[override]
            return f"own {task}"

    assert Own(**WALKERS).task_key(5) == "own 5"
    game = PettingZooGame(**WALKERS)
    assert game.task_key(5) == copy.copy(game).task_key(5) != game.fingerprint(5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "meeting"}, None),
        ({}, "env='': 'module:function'"),
        ({"env": "meetings:env"}, "env='meetings:env': ModuleNotFoundError"),
        ({"env": "meeting:make"}, "has no 'make'"),
        ({"env": "meeting:env", "options": {"streets": 2}}, "cannot be made, TypeError.*streets"),
        ({"env": "builtins:dict"}, "returns a dict, not an AECEnv"),
        *(
            ({"env": "meeting:env", "actions": names}, r"actions=\[.*: name each differently in lower case")
            for names in (["U", "u"], ["up", " down"], ["", "down"], ["1", 1])
        ),
        ({"env": "meeting:env", "actions": ["up"]}, "actions names 1 actions.*Discrete"),
        ({"env": f"{THIS}:boxes"}, "action space of 'north' is Box.*Discrete or Text"),
        ({"env": f"{THIS}:spaced"}, "its agent 'north side' is no identifier"),
        ({"env": "meeting:env", "style": "short"}, "style='short'"),
        ({"env": "meeting:env", "team": ["west"]}, "team: 'west' is not an agent here, use some of north, south"),
        ({"env": "meeting:env", "max_steps": 0}, "max_steps=0"),
        ({"env": "meeting:env", "success_return": "all"}, "success_return='all': a number"),
        ({"env": "meeting:env", "on_illegal": "stop"}, "on_illegal='stop': one of end, again"),
        ({"env": "meeting:env", "illegal_reward": 0.1}, "illegal_reward=0.1: 'north' earned 0"),
    ],
)
def test_options_are_refused_with_one_line(options: dict[str, Any], message: str | None) -> None:
    if message is None:  # of a module its `env` is used, as in PettingZoo
        make("pettingzoo", **options)
        return
    with pytest.raises(EnvironmentConfigError, match=message) as caught:
        make("pettingzoo", **options)
    assert str(caught.value).startswith("at_grpo.environment.") and "\n" not in str(caught.value)


def test_the_example_recipe_would_start() -> None:
    pytest.importorskip("verl")
    from verl_atgrpo.recipes import compose
    from verl_atgrpo.train.config.run_check import check_run

    check_run(compose("pettingzoo_cpu", folder=EXAMPLE))


@pytest.mark.parametrize("number", range(3))
def test_the_documented_recipes_name_environments_that_can_be_made(number: int) -> None:
    documented = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    block = re.findall(r"(?ms)^```yaml\n(.*?)^```$", documented)[number]
    options = yaml.safe_load(block)["at_grpo"]["environment"]
    pytest.importorskip(options["name"])
    assert make(**options).task("val", 0) is not None


# ------------------------------------------------------------------ variants of the example


def variant(base: type = meeting.Meeting, **members: Any) -> Callable[..., meeting.Meeting]:
    return type("Variant", (base,), members)


def _uneven_step(self: Any, action: int | None) -> None:
    agent = self.agent_selection
    meeting.Meeting.step(self, action)
    self.rewards = {name: value * (name == agent) for name, value in self.rewards.items()}


def _masked(self: Any, agent: str) -> dict[str, Any]:
    return {"observation": meeting.Meeting.observe(self, agent), "action_mask": np.array([0, 1], dtype=np.int8)}


def _spelt(self: Any, action: str | None) -> None:
    if action == "uu":
        raise ValueError(action)
    meeting.Meeting.step(self, action and "ud".index(action[0]))


class Counted(meeting.Meeting):
    opened = closed = 0

    def __init__(self) -> None:
        type(self).opened += 1
        super().__init__()

    def close(self) -> None:
        type(self).closed += 1


class Unsteady(meeting.Meeting):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(None if self.kind == "start" else seed, options)

    def step(self, action: int | None) -> None:
        super().step(action)
        noise = random.random() if self.kind == "global" else random.SystemRandom().random()
        if self.kind in ("reward", "global"):
            self.rewards = dict.fromkeys(self.rewards, noise)

    def observe(self, agent: str) -> str:
        late = self.kind == "late" and self.moves >= 9
        return super().observe(agent) + (str(random.SystemRandom().random()) if late else "") + self.noise()

    def noise(self) -> str:
        return str(random.SystemRandom().random()) if self.kind == "observation" and self.moves else ""


uneven = variant(step=_uneven_step)
masked = variant(observe=_masked)
texts = variant(action_space=lambda self, agent: Text(2, charset="ud"), step=_spelt)
boxes = variant(action_space=lambda self, agent: Box(0, 1))
numbers = variant(observe=lambda self, agent: [self.places[agent], self.moves])
nameless = variant(observe=lambda self, agent: meeting.Meeting.observe(self, agent).partition(". ")[2])
alike = variant(reset=lambda self, seed=None, options=None: meeting.Meeting.reset(self, 0, options))


def _keep(self: Any, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
    self.drawn_from = np.int64(seed or 0)
    meeting.Meeting.reset(self, 0, options)


keeping = variant(reset=_keep)
counted, unsteady = Counted, Unsteady


def words(agent: str, observation: list[int]) -> str:
    return f"{agent}: {' '.join(map(str, observation))}"


def spaced() -> meeting.Meeting:
    env = meeting.Meeting()
    env.possible_agents = ["north side", "south side"]
    env.action_spaces = dict.fromkeys(env.possible_agents, env.action_spaces["north"])
    return env
