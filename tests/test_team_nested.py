"""Decisions that scores make, decisions that are not trained, and numbers of candidates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fakes.judged_answers import Judged, Ranked
from fakes.scripted_policy import rewarded, run, team_of

from verl_atgrpo import Candidate, EpisodeFailed, Score, Team, check_environment
from verl_atgrpo.environments.common.workflow import once
from verl_atgrpo.play.testing import EnvironmentContractError
from verl_atgrpo.play.types import EpisodeRecord
from verl_atgrpo.train.rollout.episode_rows import training_rows


async def judged(team: Team) -> None:
    """A solver whose candidates a judge scores, twice."""

    async def by_judge(text: str) -> Score:
        verdict = await team.right.act(f"how good is {text}?", rewarded(0, 1))
        return Score(local=int(verdict.text) / 10)

    for _ in range(2):
        await team.left.act("solve", by_judge)


def names(record: EpisodeRecord) -> list[str]:
    return [decision.name for decision in record.decisions]


def test_a_score_may_decide_and_its_groups_are_named_by_the_candidate() -> None:
    record = run(judged, team_of(candidates=2)[0])
    assert names(record) == [
        *("left.0.0/right.0", "left.0.1/right.0", "left.0"),
        *("left.1.0/right.0", "left.1.1/right.0", "left.1"),
    ]
    assert [candidate.reward for candidate in record.decisions[2].candidates] == [0.1, 0.1]
    groups = {row.group for row in training_rows("u", 0, record, "tree")}
    assert groups == {f"u.0.{name}" for name in names(record)}


@pytest.mark.parametrize("settled", [False, True])
def test_a_cancelled_decision_leaves_nothing_of_its_judge(settled: bool) -> None:
    """As by a time-out around `act`, or a client that disconnects: the episode goes on without it."""

    async def workflow(team: Team) -> None:
        judged_once = asyncio.Event()

        async def by_judge(text: str) -> Score:
            await team.right.act(f"how good is {text}?", rewarded(0, 1))
            if judged_once.is_set():
                await asyncio.Event().wait()
            judged_once.set()
            return Score()

        async def decide() -> None:
            if settled:
                await team.settle(await team.left.act("solve"), by_judge)
            else:
                await team.left.act("solve", by_judge)

        begun = asyncio.create_task(decide())
        await judged_once.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        begun.cancel()
        await asyncio.wait([begun])
        await team.left.act("go on")

    record = run(workflow, team_of(candidates=2)[0])
    assert names(record) == (["left.0", "left.1"] if settled else ["left.1"])


def test_seeds_and_rows_of_scores_do_not_depend_on_which_candidate_is_faster() -> None:
    def seen(slow: int) -> tuple[list[Any], list[str]]:
        async def answer(decision_id: str, index: int) -> str:
            if decision_id.endswith(f"left.0.{slow}/right.0"):
                for _ in range(20):
                    await asyncio.sleep(0)
            return str(index)

        team, policy = team_of(answer, candidates=2)
        record = run(judged, team)
        rows = [(row.key, row.group, row.reward) for row in training_rows("u", 0, record, "tree")]
        return rows, sorted(map(str, policy.asked))

    assert seen(slow=0) == seen(slow=1)
    seeds = [entry.rpartition(", ")[2] for entry in seen(slow=0)[1]]
    assert len(set(seeds)) == len(seeds) == 12, "a seed of its own for every sample"


def test_decisions_of_one_score_are_in_the_order_in_which_they_started() -> None:
    async def answer(decision_id: str, index: int) -> str:
        for _ in range(20 * ("right.0" in decision_id)):
            await asyncio.sleep(0)
        return str(index)

    async def workflow(team: Team) -> None:
        async def by_two(text: str) -> Score:
            await asyncio.gather(team.right.act("first"), team.right.act("second"))
            return Score()

        await team.left.act("solve", by_two)

    record = run(workflow, team_of(answer, candidates=2)[0])
    of_first = ["left.0.0/right.0", "left.0.0/right.1"]
    assert names(record) == [*of_first, *(name.replace("0.0/", "0.1/") for name in of_first), "left.0"]


def test_a_score_within_a_score_has_its_own_groups() -> None:
    async def workflow(team: Team) -> None:
        async def inner(text: str) -> Score:
            await team.left.act("of the judge")
            return Score()

        async def outer(text: str) -> Score:
            await team.right.act("judge", inner)
            return Score()

        await team.left.act("solve", outer)

    record = run(workflow, team_of(candidates=2)[0])
    assert names(record)[:3] == ["left.0.0/right.0.0/left.0", "left.0.0/right.0.1/left.0", "left.0.0/right.0"]
    assert len(set(names(record))) == len(names(record)) == 7


def test_evaluation_does_not_ask_the_judge() -> None:
    team, policy = team_of(candidates=2, scheme="evaluate")
    record = run(judged, team)
    assert names(record) == ["left.0", "left.1"]
    assert len(policy.asked) == 2
    assert [decision.candidates[0].reward for decision in record.decisions] == [0, 0]


def test_evaluation_asks_no_judge_of_a_task_group_either() -> None:
    async def in_groups(team: Team) -> None:
        async def by_two(text: str) -> Score:
            async with asyncio.TaskGroup() as group:
                judges = [group.create_task(team.right.act(f"how good is {text}?")) for _ in range(2)]
            return Score(local=float(judges[0].result().text))

        await team.left.act("solve", by_two)
        await team.left.act("solve", score_all=lambda replies: asyncio.gather(*map(by_two, replies)))

    if not hasattr(asyncio, "TaskGroup"):
        pytest.skip("Python 3.11 has task groups")
    errors: list[Any] = []
    record = run(in_groups, team_of(scheme="evaluate", on_score_error=lambda *error: errors.append(error))[0])
    assert (names(record), errors) == (["left.0", "left.1"], [])
    assert len(run(in_groups, team_of(candidates=2)[0]).decisions) == 2 * (1 + 2 * 2)


def test_what_a_score_did_not_ask_in_evaluation_the_episode_may() -> None:
    async def workflow(team: Team) -> None:
        async def asked(text: str) -> str:
            return (await team.right.act(f"how good is {text}?")).text

        judge = once(asked)

        async def by_judge(text: str) -> Score:
            return Score(local=float(await judge(text)))

        reply = await team.left.act("solve", by_judge)
        await judge(reply.text)

    assert names(run(workflow, team_of(scheme="evaluate")[0])) == ["left.0", "right.0"]
    assert names(run(workflow, team_of(candidates=2)[0])) == ["left.0.0/right.0", "left.0.1/right.0", "left.0"]


def test_a_score_awaits_the_decisions_that_it_begins() -> None:
    """Or their candidates would have no rows and no record."""
    begun: list[asyncio.Task[Candidate]] = []

    async def late(team: Team) -> None:
        async def ask() -> Candidate:
            await asyncio.sleep(0.01)
            return await team.right.act("judge")

        def begins(text: str) -> Score:
            begun.append(asyncio.ensure_future(ask()))
            return Score()

        await team.left.act("solve", begins)
        await asyncio.gather(*begun)

    with pytest.raises(
        ValueError, match=r"a score ended before the decision left\.0\.0/right\.0 .*; await it in the score"
    ):
        run(late, team_of(candidates=2)[0])


def test_a_failed_decision_of_a_score_fails_the_episode() -> None:
    async def answer(decision_id: str, index: int) -> str:
        if "/" in decision_id:
            raise EpisodeFailed("engine", "the judge's server died")
        return str(index)

    with pytest.raises(EpisodeFailed, match="judge's server"):
        run(judged, team_of(answer, candidates=2, on_score_error=lambda *_: None)[0])


def test_another_team_in_a_score_is_not_nested() -> None:
    async def workflow(team: Team) -> None:
        async def by_other(text: str) -> Score:
            other = team_of(candidates=2)[0]
            await other.left.act("elsewhere")
            assert [decision.name for decision in other.decisions] == ["left.0"]
            return Score()

        await team.left.act("solve", by_other)

    assert names(run(workflow, team_of(candidates=2)[0])) == ["left.0"]


# ------------------------------------------------------------------ not trained, other K


async def drafted(team: Team) -> None:
    draft = await team.left.act("draft", rewarded(0, 2, 1), candidates=3, train=False)
    assert draft.text in "01"
    await team.right.act("user", train=False)
    await team.right.act("solve", rewarded(0, 1, 2, 3), candidates=4)


@pytest.mark.parametrize(
    ("scheme", "sampled", "rows"), [("tree", [3, 1, 4], 4), ("parallel", [3, 1, 1], 1), ("evaluate", [1, 1, 1], 1)]
)
def test_a_draft_has_candidates_but_no_rows(scheme: str, sampled: list[int], rows: int) -> None:
    record = run(drafted, team_of(candidates=2, scheme=scheme)[0])
    assert [len(decision.candidates) for decision in record.decisions] == sampled
    assert record.decisions[0].committed == (1 if sampled[0] == 3 else 0), "the best draft"
    made = list(training_rows("u", 0, record, "tree" if scheme == "tree" else "parallel", ("left",), "scores"))
    assert len(made) == rows
    assert {(row.tags["agent"], row.tags["turn"], row.tags["left"]) for row in made} == {("right", 1, 0)}
    if scheme == "parallel":
        assert made[0].reward == 0, "without the draft's score of 2"


@pytest.mark.parametrize(("candidates", "train", "least"), [(1, True, 2), (0, True, 2), (0, False, 1)])
def test_too_few_candidates_are_refused(candidates: int, train: bool, least: int) -> None:
    async def workflow(team: Team) -> None:
        await team.left.act("x", candidates=candidates, train=train)

    with pytest.raises(ValueError, match=rf"agent 'left': candidates={candidates}.* needs {least}"):
        run(workflow, team_of(candidates=2)[0])


def test_an_agent_may_have_a_k_of_its_own() -> None:
    team = team_of(candidates=4, agent_candidates={"right": 3})[0]

    async def workflow(team: Team) -> None:
        await team.left.act("x")
        await team.right.act("x")
        await team.right.act("x", candidates=2)
        await team.right.act("x", train=False)

    record = run(workflow, team)
    assert [len(decision.candidates) for decision in record.decisions] == [4, 3, 2, 1]


# ------------------------------------------------------------------ the contract


def test_the_contract_plays_environments_whose_scores_decide() -> None:
    def gold(task: object) -> dict[str, Any]:
        return {"solver": lambda prompt, k: "42", "judge": lambda prompt, k: "yes" if "is 42 good" in prompt else "no"}

    check_environment(Judged, gold=gold, tasks=3)
    with pytest.raises(EnvironmentContractError, match="side effect"):
        check_environment(Judged, {"leaks": True}, gold=gold, tasks=3)


# ------------------------------------------------------------------ later scores


def test_a_score_may_be_settled_later_for_all_candidates() -> None:
    async def workflow(team: Team) -> None:
        plan = await team.left.act("plan", rewarded(0, 1))
        done = await team.right.act(f"do {plan.text}", rewarded(3, 2))
        settled = await team.settle(plan, lambda text: Score(team=int(text) - int(done.text), local=0.5))
        assert settled.text == plan.text == "1" and settled.reward == 1.5

    record = run(workflow, team_of(candidates=2)[0])
    assert [[candidate.reward for candidate in one.candidates] for one in record.decisions] == [[0.5, 1.5], [3, 2]]
    assert [one.committed for one in record.decisions] == [1, 0], "what was committed stays so"
    in_parallel = run(workflow_of_one, team_of(candidates=2, scheme="parallel")[0])
    rows = training_rows("u", 0, in_parallel, "parallel", (), "own")
    assert [(row.tags["agent"], row.reward, row.group) for row in rows] == [("left", 7, "u"), ("right", 0.5, "u")]


async def workflow_of_one(team: Team) -> None:
    plan = await team.left.act("plan")
    await team.right.act("do", rewarded(0.5))
    await team.settle(plan, lambda text: Score(local=7))


def test_a_judge_may_settle_and_is_named_apart_from_the_first_score() -> None:
    async def workflow(team: Team) -> None:
        async def judge(text: str) -> Score:
            verdict = await team.right.act(f"judge {text}")
            return Score(local=int(verdict.text) + 1)

        plan = await team.left.act("plan", judge)
        await team.right.act("do")
        await team.settle(plan, judge)

    record = run(workflow, team_of(candidates=2)[0])
    later = ["left.0.0.later/right.0", "left.0.1.later/right.0"]
    assert names(record) == ["left.0.0/right.0", "left.0.1/right.0", "left.0", "right.0", *later]
    assert names(run(workflow, team_of(candidates=2, scheme="evaluate")[0])) == ["left.0", "right.0"]


def test_a_reward_is_settled_once_and_by_the_team_that_has_it() -> None:
    async def twice(team: Team) -> None:
        plan = await team.left.act("plan")
        await team.settle(plan, rewarded(1, 1))
        await team.settle(plan, rewarded(2, 2))

    async def again(team: Team) -> None:
        plan = await team.settle(await team.left.act("plan"), rewarded(1, 1))
        await team.settle(plan, rewarded(2, 2))

    async def others(team: Team) -> None:
        await team.settle(await team_of(candidates=2)[0].left.act("plan"), rewarded(1, 1))

    for workflow in (twice, again, others):
        with pytest.raises(ValueError, match="settle: this is no reply of a decision of the team, or it was settled"):
            run(workflow, team_of(candidates=2)[0])


def test_no_candidate_may_be_left_out() -> None:
    def of_the_best(text: str) -> Any:
        return Score(local=1) if text == "1" else None

    async def later(team: Team) -> None:
        await team.settle(await team.left.act("plan"), of_the_best)

    async def at_once(team: Team) -> None:
        await team.left.act("plan", of_the_best)

    for workflow in (later, at_once):
        with pytest.raises(TypeError, match="agent 'left', turn 0: the score of '0' is None, not a Score"):
            run(workflow, team_of(candidates=2, on_score_error=lambda *_: None)[0])


def test_what_settling_raises_fails_the_episode_even_if_it_is_caught() -> None:
    async def workflow(team: Team) -> None:
        plan = await team.left.act("plan")
        with pytest.raises(ZeroDivisionError):
            await team.settle(plan, lambda text: Score(1 / 0))

    with pytest.raises(ZeroDivisionError):
        run(workflow, team_of(candidates=2)[0])


def test_nothing_is_settled_after_the_episode() -> None:
    kept: list[Any] = []

    async def workflow(team: Team) -> None:
        kept.extend((team, await team.left.act("plan")))

    record = run(workflow, team_of(candidates=2)[0])
    with pytest.raises(asyncio.CancelledError, match="the episode has ended"):
        asyncio.run(kept[0].settle(kept[1], rewarded(1, 1)))
    assert [candidate.reward for candidate in record.decisions[0].candidates] == [0, 0]


def test_what_settles_a_judges_verdict_may_decide_too() -> None:
    async def workflow(team: Team) -> None:
        verdicts: list[Any] = []

        async def judge(text: str) -> Score:
            verdicts.append(await team.right.act(f"judge {text}"))
            return Score()

        async def second(text: str) -> Score:
            await team.right.act(f"is {text} right?")
            return Score()

        await team.left.act("plan", judge)
        await team.settle(verdicts[0], second)

    nested = "left.0.0/right.0"
    later = [f"{nested}.{number}.later/right.0" for number in range(2)]
    assert names(run(workflow, team_of(candidates=2)[0])) == [nested, "left.0.1/right.0", "left.0", *later]


def test_an_agent_cannot_be_called_settle() -> None:
    with pytest.raises(ValueError, match="agents: 'settle' is taken"):
        team_of(agents=("settle",))


# ------------------------------------------------------------------ scores of all candidates together


def ranked(replies: Sequence[str]) -> list[Score]:
    return [Score(local=-float(reply)) for reply in replies]


@pytest.mark.parametrize(("scheme", "sizes"), [("tree", [3]), ("parallel", [1]), ("evaluate", [1])])
def test_candidates_may_be_scored_together(scheme: str, sizes: list[int]) -> None:
    seen: list[list[str]] = []

    async def by_judge(replies: Sequence[str]) -> list[Score]:
        seen.append(list(replies))
        await team.right.act("rank")
        return ranked(replies)

    team, _ = team_of(candidates=3, scheme=scheme)

    async def workflow(team: Team) -> None:
        await team.left.act("x", score_all=by_judge)

    record = run(workflow, team)
    assert [len(replies) for replies in seen] == sizes
    judged = [] if scheme == "evaluate" else ["left.0.all/right.0"]
    assert names(record) == [*judged, "left.0"]
    rewards = [candidate.reward for candidate in record.decisions[-1].candidates]
    assert rewards == {"tree": [0, -1, -2], "parallel": [0], "evaluate": [0]}[scheme]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_all": lambda replies: ranked(replies)[1:]}, "'left', turn 0: score_all gave 1 scores for 2 replies"),
        (
            {"score_all": lambda replies: [Score(float("nan"))] * 2},
            "the environment gave a score of .*, not f",
        ),
        ({"score_all": lambda replies: None}, "'left', turn 0: score_all gave None, not a list of scores"),
        ({"score_all": ranked, "score": rewarded(0, 1)}, "agent 'left': both score and score_all are given; use one"),
    ],
)
def test_wrong_scores_of_all_end_the_episode(options: dict[str, Any], message: str) -> None:
    async def workflow(team: Team) -> None:
        await team.left.act("x", **options)

    with pytest.raises((ValueError, TypeError), match=message):
        run(workflow, team_of(candidates=2, on_score_error=lambda *_: None)[0])


def test_the_contract_plays_environments_that_score_all_together() -> None:
    def gold(task: object) -> dict[str, Any]:
        return {"solver": lambda prompt, k: "42", "judge": lambda prompt, k: "42"}

    check_environment(Ranked, gold=gold, tasks=3)
    with pytest.raises(EnvironmentContractError, match=r"'solver' gets \[\] for"):
        check_environment(Ranked, {"leaks": True}, gold=gold, tasks=3)
