"""What an estimator reads of a row: its tags as numbers, and what a played episode writes into them."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from typing import Any

import pytest
import torch
from fakes.advantage_rows import tags_of

from verl_atgrpo import Environment, Outcome, Score, ScriptedTeam, Team, play
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.types import Generation, PlayMode, TeamOptions
from verl_atgrpo.train.estimators.advantages import team_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.labels import anchor_of, factorise, row_ids
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Labels
from verl_atgrpo.train.rollout.episode_rows import Row, training_rows


def test_rows_are_numbered_by_what_the_estimator_reads_of_them_and_by_nothing_else() -> None:
    rows = [tags_of(label) for label in ("u#0@a~1~ff", "v#0@b~0~ee", "u#1@a~0~ff", "u#0@b~0~ff")]

    def of(choice: Any) -> dict[str, Any]:
        return {name: value.tolist() for name, value in row_ids(rows, resolve_spec(choice)).items()}

    groups = {"groups": [0, 1, 0, 0]}
    assert of("grpo") == groups
    # Episodes with the same number in different groups differ.
    assert of("mas_grpo") == {**groups, "units": [0, 1, 2, 0]}
    assert of("rloo") == {**groups, "units": [0, 1, 2, 0]}
    assert of("dr_mas") == {**groups, "agents": [0, 1, 0, 1]}
    assert of("gigpo") == {**groups, "units": [0, 1, 2, 0], "left": [1, 0, 0, 0], "anchors": [0, 1, 0, 0]}
    for main, mains in (("b", [False, True, False, True]), ("c", [False] * 4)):
        assert of({"preset": "m_grpo", "main_agent": main, "sub_calls": 1})["mains"] == mains
    for tag, need, choice in (("left", "left", "gigpo"), ("anchor", "anchor", "gigpo"), ("agent", "agent", "dr_mas")):
        lacking = [*rows, {key: value for key, value in rows[0].items() if key != tag}]
        with pytest.raises(ValueError, match=rf"^a row has no tag '{tag}'; estimator '{choice}' needs its {need}$"):
            row_ids(lacking, resolve_spec(choice))


def test_only_leave_one_out_tells_the_candidates_of_an_episode_apart() -> None:
    class OfEpisodes(EstimatorSpec):
        """A formula of one's own that reads episodes."""

        needs = frozenset({"trajectory"})

        def formula(self, values: torch.Tensor, labels: Labels) -> torch.Tensor:
            return values

    rows = [{**tags_of("u#0@a"), "candidate": number} for number in range(3)]
    assert row_ids(rows, OfEpisodes(name="mine"))["units"].tolist() == [0, 0, 0]
    assert row_ids(rows, resolve_spec("rloo"))["units"].tolist() == [0, 1, 2]


def test_labels_are_numbered_in_order_of_appearance() -> None:
    codes, labels = factorise(["b", "a", "b", None, ("b",)])
    assert codes.tolist() == [0, 1, 0, 2, 3]
    assert labels == ["b", "a", None, ("b",)]


def test_anchors_are_the_prompts_and_the_same_everywhere() -> None:
    # Python's own hash of a text differs between processes; rows come from several.
    assert anchor_of([7, 11]) == hashlib.blake2b(struct.pack("<2q", 7, 11), digest_size=16).hexdigest()
    prompts = [[], [0], [0, 0], [1, 23], [12, 3], [123], [2**40], [23, 1]]
    assert len({anchor_of(prompt) for prompt in prompts}) == len(prompts)
    assert anchor_of((1, 23)) == anchor_of([1, 23])


def test_an_anchor_is_of_the_whole_prompt() -> None:
    prompt = list(range(100, 400))
    others = [[*prompt[:place], 7, *prompt[place + 1 :]] for place in range(len(prompt))]
    anchors = {anchor_of(other) for other in [prompt, prompt[:-1], [*prompt, 7], prompt[::-1], *others]}
    assert len(anchors) == len(others) + 4
    assert all(len(anchor) == 32 for anchor in anchors)


# --- from a played episode


class Corridor(Environment):
    """The walker goes from 0 to 2; the scout acts at 0 only, and both see the walker's position."""

    agents = ("scout", "walker")

    def task(self, split: str, index: int) -> int:
        return index

    def fingerprint(self, task: object) -> str:
        return str(task)

    async def run(self, task: object, team: Team) -> Outcome:
        position = 0
        for _ in range(4):
            if position == 0:
                await team.scout.act("where to?", score=lambda reply: Score(local=1.0))
            move = await team.walker.act(f"at {position}", score=lambda reply: Score(local=float(reply == "R")))
            position += move.text == "R"
            if position == 2:
                return Outcome(success=True, team_reward=1.0)
        return Outcome(success=False, team_reward=0.0)


def played(moves: str, needs: frozenset[str], scheme: str = "parallel", candidates: int = 1) -> list[Row]:
    """Rows of an episode (session 3 of task "t") in which the walker's answers are `moves`."""
    answers = iter(moves)
    scripts = {"scout": lambda prompt, call: "right", "walker": lambda prompt, call: next(answers)}
    team = ScriptedTeam(scripts, scheme=scheme, candidates=candidates)  # type: ignore[arg-type]
    record = asyncio.run(play(Corridor(), 0, team))
    return list(training_rows("t", 3, record, scheme, needs))  # type: ignore[arg-type]


def test_rows_of_an_episode_carry_what_the_estimator_needs() -> None:
    where, at = anchor_of([ord(char) for char in "where to?"]), [anchor_of([*map(ord, f"at {i}")]) for i in range(2)]
    rows = played("LRR", PRESETS["gigpo"].needs)
    assert [tuple(row.tags[key] for key in ("group", "episode", "agent", "left", "anchor")) for row in rows] == [
        ("t", "t_3", "scout", 4, where),
        ("t", "t_3", "walker", 3, at[0]),
        ("t", "t_3", "scout", 2, where),
        ("t", "t_3", "walker", 1, at[0]),
        ("t", "t_3", "walker", 0, at[1]),
    ]
    assert all(row.group == "t" and row.reward == 1 for row in rows)
    needs = resolve_spec({"preset": "m_grpo", "main_agent": "walker", "sub_calls": 2}).needs
    assert [row.tags["left"] for row in played("RR", needs)] == [2, 1, 0]
    # No prompt is hashed for an estimator that does not compare prompts.
    assert not any({"left", "anchor"} & row.tags.keys() for row in played("RR", PRESETS["mas_grpo"].needs))


class Slow(ScriptedPolicy):
    """Takes its time, in rounds of the event loop."""

    rounds = 0

    async def generate(self, *given: Any, **more: Any) -> Generation:
        for _ in range(self.rounds):
            await asyncio.sleep(0)
        return await super().generate(*given, **more)


class Pair(Corridor):
    """Both act at the same time, twice."""

    async def run(self, task: object, team: Team) -> Outcome:
        for _ in range(2):
            await asyncio.gather(team.scout.act("where to?"), team.walker.act("where from?"))
        return Outcome(success=True, team_reward=1.0)


@pytest.mark.parametrize("slow", Pair.agents)
def test_which_of_two_agents_that_act_at_once_is_faster_says_nothing(slow: str) -> None:
    policies = {agent: Slow(lambda prompt, call: "so") for agent in Pair.agents}
    policies[slow].rounds = 20
    record = asyncio.run(play(Pair(), 0, Team(policies, TeamOptions(), PlayMode("parallel"))))
    assert [decision.agent == slow for decision in record.decisions] == [False, True, False, True]
    assert [row.tags["left"] for row in training_rows("t", 0, record, "parallel", {"left"})] == [2, 2, 0, 0]


def test_a_group_of_the_tree_is_an_episode_s_agent_and_turn() -> None:
    rows = played("RLRR", PRESETS["at_grpo"].needs, "tree", candidates=2)
    assert [row.tags["group"] for row in rows][::2] == ["t.3.scout.0", "t.3.walker.0", "t.3.walker.1"]
    assert all(row.tags["group"] == row.group for row in rows)


def test_gigpo_from_played_episodes() -> None:
    """At 0, going right at once returns .5 and after a step to the left .125; never going returns 0."""
    spec = {"preset": "gigpo", "step_gamma": 0.5, "scale": "none"}
    episodes = [played(moves, resolve_spec(spec).needs) for moves in ("RR", "LRR", "LLLL")]
    rows = [row for episode in episodes for row in episode]
    tags = [{**row.tags, "episode": f"t_{number}"} for number, episode in enumerate(episodes) for row in episode]
    resolved = resolve_spec(spec)
    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    result = team_advantages(rewards, tags, resolved).tolist()
    walker = [
        (advantage, row.generation.text)
        for advantage, row in zip(result, rows, strict=True)
        if row.tags["agent"] == "walker" and row.prompt_ids == [*map(ord, "at 0")]
    ]
    # Outcomes 1, 1, 0: mean 2/3. Returns at 0: .5; .125, .5; 0 four times: mean 1.125 / 7.
    mean = torch.tensor([0.5, 0.125, 0.5, 0, 0, 0, 0]).mean().item()
    assert mean == pytest.approx(1.125 / 7)
    expected = [1 / 3 + 0.5 - mean, 1 / 3 + 0.125 - mean, 1 / 3 + 0.5 - mean, *[-2 / 3 - mean] * 4]
    assert [advantage for advantage, _ in walker] == pytest.approx(expected)
    assert [move for _, move in walker] == list("RLRLLLL")


def test_with_a_discount_what_is_decided_last_counts_most() -> None:
    """Decisions are scout, walker, walker, and scout, walker, scout, walker, walker; both end with a reward of 1."""
    spec = resolve_spec({"preset": "dr_mas", "scale": "none", "discount": 0.5})
    episodes = [played(moves, spec.needs) for moves in ("RR", "LRR")]
    tags = [{**row.tags, "episode": f"t_{number}"} for number, rows in enumerate(episodes) for row in rows]
    rewards = torch.ones(len(tags), dtype=torch.float64)
    scout, walker = (0.25 + 0.0625 + 0.25) / 3, (0.5 + 1 + 0.125 + 0.5 + 1) / 5
    expected = [0.25 - scout, 0.5 - walker, 1 - walker]
    expected += [0.0625 - scout, 0.125 - walker, 0.25 - scout, 0.5 - walker, 1 - walker]
    assert team_advantages(rewards, tags, spec).tolist() == pytest.approx(expected)
    fields = {"center": "none", "scale": "none", "discount": 0.5, "step_weight": 1}
    undiscounted = resolve_spec({"name": "both", **fields})  # its step term's own discount is 1
    rows = [row.tags for row in played("LRR", undiscounted.needs)]  # the last one's prompt occurs once
    assert team_advantages(rewards[:5], rows, undiscounted).tolist() == [1.0625, 1.125, 1.25, 1.5, 1]
