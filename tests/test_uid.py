"""What travels in a row's uid: the format, and what a played episode writes into it."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
from advantage_rows import estimate

from verl_atgrpo import Environment, Outcome, Score
from verl_atgrpo.estimators.spec import PRESETS, resolve_spec
from verl_atgrpo.estimators.uid import UidParts, anchor_of, encode_groups, encode_uids, join_uid, split_uid
from verl_atgrpo.rollout.rows import Row, training_rows
from verl_atgrpo.team import ScriptedTeam, Team, play


def test_uids() -> None:
    assert split_uid("a/b_1") == UidParts("a/b_1")
    assert split_uid("a#3") == UidParts("a", "3")
    assert split_uid("a#b#3") == UidParts("a#b", "3")
    assert split_uid("a#3@tool") == UidParts("a", "3", "tool")
    assert split_uid("a#3@tool~12") == UidParts("a", "3", "tool", 12)
    assert split_uid("a#3@tool~0~ff07") == UidParts("a", "3", "tool", 0, "ff07")
    # Somebody else's uid is a group, whatever it holds.
    assert split_uid("me@home~2") == UidParts("me@home~2")
    assert split_uid("me@home~2#3@tool") == UidParts("me@home~2", "3", "tool")
    assert encode_groups(["b", "a", "b", None, ("b",)]).tolist() == [0, 1, 0, 2, 3]
    # Estimators that count rows group by the first part only.
    uids = ["a#0", "b", "a#1@tool~3~ff", "b#0"]
    assert estimate(uids, [0, 0, 2, 4], {"at_grpo_estimator": "dr_grpo"}) == [-1, -2, 1, 2]


@pytest.mark.parametrize("uid", ["a", "a#3", "a#b#3", "a#3@tool", "a#3@tool~12", "a#3@tool~0~ff07"])
def test_uids_are_joined_as_they_are_split(uid: str) -> None:
    assert join_uid(split_uid(uid)) == uid


def test_uids_that_cannot_be_split() -> None:
    for uid in ("#0", "a#", "#", "a#@tool", "a#0@", "a#0@~1", "a#0@tool~", "a#0@tool~1~", "a#0@tool~~ff"):
        with pytest.raises(ValueError, match=rf"^uid '{uid}': empty part; expected 'GROUP#TRAJECTORY@AGENT~LEFT"):
            split_uid(uid)
    for left in ("x", "-1", "1.5", "²"):
        with pytest.raises(ValueError, match=rf"'{left}' is not a number of decisions"):
            split_uid(f"a#0@tool~{left}")


def test_rows_are_numbered_by_what_the_estimator_reads_of_their_uids_and_by_nothing_else() -> None:
    uids = np.array(["u#0@a~1~ff", "v#0@b~0~ee", "u#1@a~0~ff", "u#0@b~0~ff"], dtype=object)

    def of(choice: Any, some: np.ndarray = uids) -> dict[str, Any]:
        ids = encode_uids(some, resolve_spec(choice), torch.device("cpu"))
        return {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name in ("groups", "units", "agents", "left", "anchors")
            if (value := getattr(ids, name)) is not None
        }

    groups = {"groups": [0, 1, 0, 0]}
    assert of("grpo") == groups
    # Episodes of different groups are different, whatever their number.
    assert of("mas_grpo") == {**groups, "units": [0, 1, 2, 0]}
    assert of("dr_mas") == {**groups, "agents": [0, 1, 0, 1]}
    assert of("gigpo") == {**groups, "units": [0, 1, 2, 0], "left": [1, 0, 0, 0], "anchors": [0, 1, 0, 0]}
    # Without a separator they are somebody else's, and groups as they are.
    assert of("grpo", np.array(["x@a", "y", "x@a"], dtype=object)) == {"groups": [0, 1, 0]}
    assert of("grpo", np.array(["x", "x#1"], dtype=object)) == {"groups": [0, 0]}
    ids = encode_uids(uids, resolve_spec("dr_mas"), torch.device("cpu"))
    assert ids.of_agent("b").tolist() == [False, True, False, True]
    assert ids.of_agent("c").tolist() == [False] * 4
    for need, lacking in (("trajectory", "x"), ("left", "x#0@a"), ("anchor", "x#0@a~1")):
        with pytest.raises(ValueError, match=rf"^index: uid '{lacking}' names no {need}; estimator 'gigpo' needs"):
            encode_uids(np.array(["u#0@a~1~ff", lacking], dtype=object), resolve_spec("gigpo"), torch.device("cpu"))


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
    """The walker goes from 0 to 2; the scout is asked at 0 only, and both see where the walker stands."""

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
    assert [row.group for row in rows] == [
        f"t#3@scout~4~{where}",
        f"t#3@walker~3~{at[0]}",
        f"t#3@scout~2~{where}",
        f"t#3@walker~1~{at[0]}",
        f"t#3@walker~0~{at[1]}",
    ]
    assert all(row.tags["group"] == row.group and row.reward == 1 for row in rows)
    needs = resolve_spec({"preset": "m_grpo", "main_agent": "walker", "sub_calls": 2}).needs
    assert [row.group for row in played("RR", needs)] == ["t#3@scout~2", "t#3@walker~1", "t#3@walker~0"]
    assert [row.group for row in played("RR", PRESETS["mas_grpo"].needs)] == ["t#3@scout", "t#3@walker", "t#3@walker"]


def test_rows_of_the_tree_name_their_agent_where_agents_have_estimators_of_their_own() -> None:
    spec = resolve_spec({"preset": "at_grpo", "agents": {"scout": {"scale": "none"}}})
    rows = played("RLRR", spec.needs, "tree", candidates=2)
    assert [row.group for row in rows][::2] == [
        "t.3.scout.0#3@scout",
        "t.3.walker.0#3@walker",
        "t.3.walker.1#3@walker",
    ]
    plain = played("RLRR", PRESETS["at_grpo"].needs, "tree", candidates=2)
    assert [split_uid(row.group).group for row in rows] == [row.group for row in plain]


def test_gigpo_from_played_episodes() -> None:
    """At 0, going right at once returns .5 and after a step to the left .125; never going returns 0."""
    spec = {"preset": "gigpo", "step_gamma": 0.5, "scale": "none"}
    episodes = [played(moves, resolve_spec(spec).needs) for moves in ("RR", "LRR", "LLLL")]
    rows = [(f"t#{number}@", row) for number, episode in enumerate(episodes) for row in episode]
    uids = [row.group.replace("t#3@", start) for start, row in rows]
    result = estimate(uids, [row.reward for _, row in rows], {"at_grpo_estimator": spec})
    walker = [
        (advantage, row.generation.text)
        for advantage, (_, row) in zip(result, rows, strict=True)
        if row.tags["agent"] == "walker" and row.prompt_ids == [*map(ord, "at 0")]
    ]
    # Outcomes 1, 1, 0: mean 2/3. Returns at 0: .5; .125, .5; 0 four times: mean 1.125 / 7.
    mean = torch.tensor([0.5, 0.125, 0.5, 0, 0, 0, 0]).mean().item()
    assert mean == pytest.approx(1.125 / 7)
    expected = [1 / 3 + 0.5 - mean, 1 / 3 + 0.125 - mean, 1 / 3 + 0.5 - mean, *[-2 / 3 - mean] * 4]
    assert [advantage for advantage, _ in walker] == pytest.approx(expected)
    assert [move for _, move in walker] == list("RLRLLLL")
