"""The team: which candidates are sampled, which one is committed, and how an episode fails."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from typing import Any

import pytest
from fakes.scripted_policy import Play, bounded, rewarded, run, team_of

from verl_atgrpo import Agent, Environment, Outcome, Score, Split, Team, play
from verl_atgrpo.play.types import EpisodeRecord, OutcomeError, TeamOptions


@pytest.mark.parametrize("returned", [None, True, 1.0, {"success": True}, (True, 1.0), Outcome])
def test_an_outcome_that_is_none_is_named(returned: Any) -> None:
    class Broken(Environment):
        agents = ("left",)

        def task(self, split: Split, index: int) -> int:
            return index

        def fingerprint(self, task: int) -> str:
            return str(task)

        async def run(self, task: int, team: Team) -> Outcome:
            return returned  # type: ignore[no-any-return]

    with pytest.raises(OutcomeError, match=rf"^Broken\.run returned {re.escape(repr(returned))}: it is no Outcome"):
        bounded(play(Broken(), 0, team_of()[0]))


def test_a_metric_has_no_name_of_validations() -> None:
    for name in ("acc", "failed", "reward"):
        with pytest.raises(OutcomeError, match=f"'{name}'.* validation has itself"):
            Outcome(True, 1.0, {name: 0.5})


# ------------------------------------------------------------------ one decision


@pytest.mark.parametrize(
    "arguments",
    [
        {"stop": "abc"},
        {"stop": b"abc"},
        {"stop": ["."], "tools": "search"},
        {"tools": {"type": "function", "function": {"name": "f"}}},
        {"tools": abs},
        {"stop": {"."}},
        {"stop": 5},
        {"stop": [".", 5]},
        {"stop": [".", ""]},
        {"max_tokens": 2.0},
        {"max_tokens": "9"},
        {"max_tokens": 0},
        {"candidates": 2.5},
        {"candidates": "4"},
        {"candidates": 1},
    ],
)
def test_an_argument_of_another_kind_is_refused_before_anything_is_sampled(arguments: Any) -> None:
    team, policy = team_of()
    with pytest.raises(ValueError, match=f"agent 'left': .*{max(arguments)}="):
        bounded(team.left.act("x", **arguments))
    assert policy.asked == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_turns": -3}, "max_turns=-3"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"timeout": -1.0}, "timeout=-1.0"),
        ({"timeout": math.nan}, "timeout=nan"),
        ({"agents": "left"}, "agents='left' is no list"),
    ],
)
def test_limits_of_endpoints_are_above_0(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^serve: .*{told}"):
        team_of()[0].serve(**arguments)


def test_tree_draws_k_candidates_of_one_prompt() -> None:
    team, policy = team_of(candidates=5)
    prompt = [{"role": "system", "content": "rules"}, {"role": "user", "content": "state"}]

    async def workflow(team: Team) -> None:
        await team.left.act(prompt, rewarded(0, 1, 2, 3, 4))
        await team.right.act("plain")

    first, second = run(workflow, team).decisions
    assert [len(first.candidates), len(second.candidates)] == [5, 5]
    expected = [ord(char) for char in "rulesstate"]
    assert [ids for _, ids, _ in policy.asked[:5]] == [expected] * 5
    assert first.prompt_ids == expected
    # The chat template is applied once a decision, not once a candidate.
    assert policy.encoded == [prompt, [{"role": "user", "content": "plain"}]]
    assert [candidate.text for candidate in first.candidates] == list("01234")
    assert (first.agent, first.turn, first.policy) == ("left", 0, "shared")
    assert team.generated_tokens == 10


@pytest.mark.parametrize("scheme", ["parallel", "evaluate"])
def test_other_schemes_draw_one(scheme: str) -> None:
    team, policy = team_of(candidates=5, scheme=scheme)

    async def workflow(team: Team) -> None:
        assert (await team.left.act("x", rewarded(0.25))).reward == 0.25

    record = run(workflow, team)
    assert len(policy.asked) == 1
    assert [(len(decision.candidates), decision.committed) for decision in record.decisions] == [(1, 0)]


@pytest.mark.parametrize("scheme", ["tree", "parallel"])
def test_an_opponent_answers_once_whatever_the_decision_asks_for(scheme: str) -> None:
    """Else the other side would have one sample of a move in whole episodes, and the opponent its best of eight."""

    async def workflow(team: Team) -> None:
        for agent in (team.left, team.right):
            await agent.act("x", candidates=8)
            await agent.act("x", candidates=2, train=False)  # a draft, for itself

    record = run(workflow, team_of(scheme=scheme, opponents=("right",))[0])
    drawn = {f"{one.agent}.{one.turn}": len(one.candidates) for one in record.decisions}
    assert drawn == {"left.0": 8 if scheme == "tree" else 1, "left.1": 2, "right.0": 1, "right.1": 2}


@pytest.mark.parametrize(
    ("alpha", "local_weight", "best", "rewards"),
    [
        (1, 1, 0, [1.0, 0.9]),
        (2, 1, 1, [1.0, 1.4]),
        (0, 1, 0, [1.0, 0.4]),
        (1, 0, 1, [0.0, 0.5]),
        (1, 0.5, 1, [0.5, 0.7]),
    ],
)
def test_greedy_commits_the_best_mixed_reward(
    alpha: float, local_weight: float, best: int, rewards: list[float]
) -> None:
    scores = [Score(team=0.0, local=1.0), Score(team=0.5, local=0.4)]
    team, _ = team_of(candidates=2, alpha=alpha, local_weight=local_weight)

    async def workflow(team: Team) -> None:
        committed = await team.left.act("x", lambda text: scores[int(text)])
        assert committed.text == str(best)
        assert f"{committed}" == str(best), "a prompt that quotes it tells no score"
        assert committed.score == scores[best]

    (decision,) = run(workflow, team).decisions
    assert decision.committed == best
    assert [candidate.reward for candidate in decision.candidates] == pytest.approx(rewards)


@pytest.mark.parametrize(("rewards", "best"), [((0, 2, 2, 1), 1), ((0, 0, 0), 0), ((-3, -1, -2, -1), 1)])
def test_greedy_ties_go_to_the_lowest_index(rewards: tuple[float, ...], best: int) -> None:
    async def later_first(decision_id: str, index: int) -> str:
        for _ in range(10 - index):  # the last candidate is done first: order of arrival must not matter
            await asyncio.sleep(0)
        return str(index)

    team, _ = team_of(later_first, candidates=len(rewards))

    async def workflow(team: Team) -> None:
        assert (await team.left.act("x", rewarded(*rewards))).text == str(best)

    (decision,) = run(workflow, team).decisions
    assert [candidate.text for candidate in decision.candidates] == [str(index) for index in range(len(rewards))]


def test_score_functions_may_be_sync_async_or_missing() -> None:
    async def slowly(text: str) -> Score:
        await asyncio.sleep(0)
        return Score(team=int(text), local=0.5)

    async def workflow(team: Team) -> None:
        await team.left.act("x", slowly)
        await team.left.act("x", lambda text: Score(team=int(text), local=0.5))
        await team.left.act("x")

    decisions = run(workflow, team_of(candidates=2)[0]).decisions
    rewards = [[candidate.reward for candidate in decision.candidates] for decision in decisions]
    assert rewards == [[0.5, 1.5], [0.5, 1.5], [0.0, 0.0]]
    assert [decision.committed for decision in decisions] == [1, 1, 0]


# ------------------------------------------------------------------ selection


def picks(seed: int | None, turns: int = 40, **options: Any) -> list[int]:
    team, _ = team_of(candidates=4, seed=seed, **options)

    async def workflow(team: Team) -> None:
        for _ in range(turns):
            await team.left.act("x", rewarded(0, 1, 2, 3))

    return [decision.committed for decision in run(workflow, team).decisions]


def test_first_commits_the_first_whatever_its_reward() -> None:
    assert set(picks(0, selection="first")) == {0}


def test_random_selection_follows_the_seed_and_not_the_reward() -> None:
    assert picks(7, selection="random") == picks(7, selection="random")
    assert picks(7, selection="random") != picks(8, selection="random")
    assert set(picks(7, selection="random")) == {0, 1, 2, 3}


def test_random_selections_of_agents_and_turns_are_independent() -> None:
    async def workflow(team: Team) -> None:
        for _ in range(200):
            await team.left.act("x")
            await team.right.act("x")

    decisions = run(workflow, team_of(candidates=4, selection="random", seed=5)[0]).decisions
    left, right = ([each.committed for each in decisions if each.agent == agent] for agent in ("left", "right"))
    for one, other in ((left, right), (left, left[1:]), (right, left[1:])):
        alike = sum(a == b for a, b in zip(one, other, strict=False)) / len(other)
        assert 0.1 < alike < 0.4  # a quarter by chance


def test_the_rewards_of_a_decision_are_the_paper_s_by_default() -> None:
    options = TeamOptions()
    assert (options.alpha, options.local_weight, options.selection) == (1, 1, "greedy")


def test_seeded_selection_does_not_depend_on_which_agent_is_faster() -> None:
    def committed(slow: str) -> dict[tuple[str, int], int]:
        async def answer(decision_id: str, index: int) -> str:
            for _ in range(20 if f".{slow}." in decision_id else 0):
                await asyncio.sleep(0)
            return str(index)

        async def workflow(team: Team) -> None:
            for _ in range(12):
                await asyncio.gather(team.left.act("x"), team.right.act("y"))

        record = run(workflow, team_of(answer, candidates=4, selection="random", seed=3)[0])
        return {(decision.agent, decision.turn): decision.committed for decision in record.decisions}

    assert committed("left") == committed("right")


# ------------------------------------------------------------------ workflows


def test_the_next_agent_sees_what_the_last_one_committed() -> None:
    """Trap 2: agents that all generate before any steps never see each other's moves."""

    def play_with(best: str) -> tuple[list[str], list[float], list[float]]:
        async def answer(decision_id: str, index: int) -> str:
            return "abc"[index]

        team, policy = team_of(answer, candidates=3)

        async def workflow(team: Team) -> None:
            board = ""
            for _ in range(2):
                for agent in (team.left, team.right):
                    # Worth something only as the successor of what stands on the board.
                    wanted = ord(board[-1]) + 1 if board else ord(best)
                    reply = await agent.act(
                        f"board:{board}", lambda text, wanted=wanted: Score(team=1 / (1 + abs(ord(text) - wanted)))
                    )
                    board += reply.text

        decisions = run(workflow, team).decisions
        prompts = [messages[0]["content"] for messages in policy.encoded]
        first, second = ([candidate.reward for candidate in decision.candidates] for decision in decisions[:2])
        return prompts, first, second

    prompts, first, second = play_with("b")
    assert first == [1 / 2, 1, 1 / 2]
    # The board is what was committed ("b", not the first candidate), then each next agent's own commit.
    assert prompts == ["board:", "board:b", "board:bc", "board:bcc"]
    assert second == pytest.approx([1 / 3, 1 / 2, 1])
    prompts, _, second = play_with("a")
    assert prompts[1] == "board:a"
    assert second == pytest.approx([1 / 2, 1, 1 / 2])


def test_candidates_and_independent_agents_really_overlap() -> None:
    waiting: set[str] = set()

    async def main() -> EpisodeRecord:
        everyone = asyncio.Event()

        async def answer(decision_id: str, index: int) -> str:
            # Nobody is answered before everybody has asked: drawing one after the other would hang here.
            waiting.add(f"{decision_id}.{index}")
            if len(waiting) == 6:
                everyone.set()
            await everyone.wait()
            return str(index)

        async def workflow(team: Team) -> None:
            left, right = await asyncio.gather(
                team.left.act("x", rewarded(0, 1, 0)), team.right.act("y", rewarded(0, 0, 1))
            )
            assert (left.text, right.text) == ("1", "2")

        return await play(Play(workflow), 0, team_of(answer, candidates=3)[0])

    record = bounded(main())
    assert {decision.agent: decision.committed for decision in record.decisions} == {"left": 1, "right": 2}


def test_async_scores_of_candidates_overlap() -> None:
    async def main() -> None:
        both = asyncio.Event()
        scoring: list[str] = []

        async def score(text: str) -> Score:
            scoring.append(text)
            if len(scoring) == 2:
                both.set()
            await both.wait()
            return Score()

        await team_of(candidates=2)[0].left.act("x", score)

    bounded(main())


def test_one_agent_acting_twice_at_once_gets_two_turns() -> None:
    team, policy = team_of(candidates=2)

    async def workflow(team: Team) -> None:
        await asyncio.gather(team.left.act("first"), team.left.act("second"))
        await team.left.act("third")

    decisions = sorted(run(workflow, team).decisions, key=lambda decision: decision.turn)
    assert ["".join(map(chr, decision.prompt_ids)) for decision in decisions] == ["first", "second", "third"]
    assert [decision.turn for decision in decisions] == [0, 1, 2]
    assert len({decision_id for decision_id, _, _ in policy.asked}) == 3


def test_unknown_agents_are_named_with_those_there_are() -> None:
    team, _ = team_of(agents=("planner", "tool_user"))
    for access in (lambda: team.judge, lambda: team["judge"]):
        with pytest.raises(AttributeError, match=r"'judge'.*planner, tool_user"):
            access()
    assert not hasattr(team, "judge")
    assert isinstance(team.planner, Agent)
    assert team["tool_user"] == team.tool_user


def test_an_agent_is_not_hidden_by_an_attribute_of_the_team() -> None:
    for name in ("decisions", "cancel"):
        with contextlib.suppress(ValueError):  # refusing the name would do as well
            team, _ = team_of(agents=(name,))
            assert isinstance(team[name], Agent)
