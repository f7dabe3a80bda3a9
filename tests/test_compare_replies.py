"""The comparison of replies before training (examples/prompts), by hand."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "prompts"))

from compare_replies import Replies, area, compare, decided
from fakes.scripted_policy import Numbered

from verl_atgrpo import EpisodeFailed, Message, Outcome, Score, Team
from verl_atgrpo.play.types import Decision


class Doors(Numbered):
    """Task n: the guide names a door, the guard says yes; the right door is left in even tasks."""

    agents = ("guide", "guard")

    async def run(self, task: int, team: Team) -> Outcome:
        if task == 5:
            raise EpisodeFailed("unusable", "no door")
        right = ("left", "right")[task % 2]
        said = await team.guide.act(f"{task}", lambda reply: Score(team=float(reply == right)))
        assert said.text == right, "the best reply is committed"
        await team.guard.act("open?", lambda reply: Score(local=0.5))
        return Outcome(True)


def encode(messages: list[Message]) -> list[int]:
    return [ord(char) for message in messages for char in message["content"]]


def decisions() -> list[Decision]:
    samplers = {"guide": Replies(encode, ["left", "right", "up"]), "guard": Replies(encode, ["yes"])}
    return asyncio.run(decided(Doors(), samplers, 3, 6))


def test_all_replies_are_scored_at_every_decision_and_failed_tasks_are_left_out() -> None:
    made = decisions()
    assert [decision.agent for decision in made] == ["guide", "guard"] * 5
    assert {tuple(candidate.text for candidate in one.candidates) for one in made if one.agent == "guide"} == {
        ("left", "right", "up")
    }


def test_by_hand() -> None:
    """A model that knows task 0 to 3 and is wrong in task 4."""
    share = {"left": 0.4, "right": 0.1, "up": 0.1}

    def log_prob(prompt_ids: list[int], reply: str) -> float:
        task = int("".join(map(chr, prompt_ids)))
        swapped = {"left": "right", "right": "left"}.get(reply, reply)
        return math.log(share[swapped if task in (1, 3, 4) else reply])

    found = compare("guide", decisions(), log_prob)
    # left is right in 0, 2, 4 and wrong in 1, 3: its log-prob is high, high, low against low, low.
    assert found.auc == pytest.approx((2 * 2 + 1 * 2 * 0.5) / 6)
    assert found.right == pytest.approx((4 * 0.4 + 0.1) / 5 / 0.6)
    assert (found.mass, found.decisions) == (pytest.approx(0.6), 5)
    nothing = compare("guard", decisions(), log_prob)
    assert nothing.decisions == 0 and math.isnan(nothing.auc), "one reply cannot be told apart"


def test_the_area_by_hand() -> None:
    assert area([1, 2], [0, 1]) == (0.5 + 1 + 1 + 1) / 4
