"""The example of a router without a score: what branching makes of its words, by hand; contract; recipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted_policy import bounded, team_of

from verl_atgrpo.branching import BranchOptions, play_branched
from verl_atgrpo.team import Replayed, Team
from verl_atgrpo.testing import Script, check_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "router"
sys.path.append(str(EXAMPLE))

from desks import DESKS, NAMES, Desks, Visit


def right(task: Visit) -> Mapping[str, Script]:
    desk = next(desk for desk, things in DESKS.items() if task.thing in things)
    return {"router": lambda prompt, k: desk, "clerk": lambda prompt, k: str(task.prices[task.thing])}


def first_price(task: Any) -> Mapping[str, Script]:
    return {"router": lambda prompt, k: "red", "clerk": lambda prompt, k: re.findall("[0-9]+", prompt)[0]}


def test_the_example_keeps_the_contract() -> None:
    check_environment("desks:Desks", gold=right, exploits=[first_price], tasks=10, bounds=(0, 0), floor=0)
    assert len(set(NAMES)) == len(NAMES)


def test_a_desk_is_worth_whether_the_price_was_right() -> None:
    """The router says red, green, blue; the clerk of the green desk alone is told of the violin, and copies it."""
    task = Visit(
        "Anna", "violin", {thing: 10 + n for n, thing in enumerate(t for desk in DESKS.values() for t in desk)}
    )

    async def say(decision_id: str, index: int) -> str:
        if "clerk" not in decision_id:
            return list(DESKS)[index]
        return "13" if "router.0=1" in decision_id else "2"

    def make(path: str, replayed: Mapping[str, Replayed]) -> Team:
        options: dict[str, Any] = {"scheme": "parallel", "scored": False, "path": path, "replayed": replayed}
        return team_of(say, Desks.agents, candidates=3, **options)[0]

    record = bounded(play_branched(Desks(), task, make, BranchOptions(at={"router": 0}), 0))
    group = record.decisions[0]
    assert [(candidate.text, candidate.reward) for candidate in group.candidates] == [
        ("red", 0),
        ("green", 1),
        ("blue", 0),
    ]
    assert not record.outcome.success, "the episode is the first candidate's"


@pytest.mark.parametrize("overrides", [[], ["at_grpo.scheme=parallel", "~at_grpo.branch"]])
def test_the_recipe_would_start(overrides: list[str]) -> None:
    pytest.importorskip("verl")
    from verl_atgrpo.config.run_check import check_run
    from verl_atgrpo.recipes import compose

    check_run(compose("desks_smollm2", overrides, folder=EXAMPLE))
