"""The example of a router without a score: what branching makes of its words, by hand; contract; recipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted_policy import bounded, team_of

from verl_atgrpo import Team, check_environment
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.testing import Script
from verl_atgrpo.play.types import PlayMode
from verl_atgrpo.train.config.schema import BranchSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "router"
sys.path.append(str(EXAMPLE))

from desks import DESKS, SHOWN, Desks, Visit


def right(task: Visit) -> Mapping[str, Script]:
    desk = next(desk for desk, things in DESKS.items() if task.thing in things)
    return {"router": lambda prompt, k: desk, "clerk": lambda prompt, k: str(task.number)}


def first_desk(task: Any) -> Mapping[str, Script]:
    return {"router": lambda prompt, k: "red", "clerk": lambda prompt, k: prompt.rpartition("\n")[2]}


def test_the_example_keeps_the_contract() -> None:
    check_environment("desks:Desks", gold=right, exploits=[first_desk], tasks=10, bounds=(0, 0), floor=0)


def test_a_desk_is_worth_whether_the_number_was_right() -> None:
    """The router says red, green, blue; only green's clerk is told the violin's number."""

    async def say(decision_id: str, index: int) -> str:
        if "clerk" not in decision_id:
            return list(DESKS)[index]
        return "13" if "router.0=1" in decision_id else "2"

    def make(mode: PlayMode) -> Team:
        return team_of(say, Desks.agents, candidates=3, mode=mode)[0]

    where = BranchSettings(at={"router": 0})
    record = bounded(play_branched(Desks(), Visit("violin", 13), make, where, 0))
    group = record.decisions[0]
    assert [(one.text, one.reward) for one in group.candidates] == [("red", 0), ("green", 1), ("blue", 0)]
    assert not record.outcome.success, "the episode is the first candidate's"


def test_nothing_tells_the_router_who_has_what() -> None:
    env = SHOWN.make_environment()
    assert isinstance(env, Desks)
    prompts = {desk: [env.router_prompt(Visit(thing, 7))[0]["content"] for thing in DESKS[desk]] for desk in DESKS}
    assert prompts["red"][0] == "desk of lamp"
    assert not any(desk in prompt for listed in prompts.values() for prompt in listed for desk in DESKS)
    assert env.clerk_prompt(Visit("lamp", 7), "red")[0]["content"] == "number of lamp\n7"
    assert env.clerk_prompt(Visit("lamp", 7), "blue")[0]["content"] == "number of lamp\nnone"


@pytest.mark.slow  # two seconds each
@pytest.mark.parametrize("overrides", [[], ["at_grpo.scheme=parallel", "~at_grpo.branch"]])
def test_the_recipe_would_start(overrides: list[str]) -> None:
    pytest.importorskip("verl")
    from verl_atgrpo.recipes import compose
    from verl_atgrpo.train.config.run_check import check_run

    check_run(compose("desks_cpu", overrides, folder=EXAMPLE))
