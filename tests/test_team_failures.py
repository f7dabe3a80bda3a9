"""Seeds and ids of samples, failures of episodes, and teams without verl."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from fakes.scripted_policy import Play, bounded, run, team_of

from verl_atgrpo import EpisodeFailed, Message, Outcome, Score, ScriptedTeam, Team, play
from verl_atgrpo.play.types import Decision, Selection
from verl_atgrpo.train.rollout.episode_rows import training_rows

# ------------------------------------------------------------------ seeds and ids


async def three_turns(team: Team) -> None:
    for _ in range(3):
        await asyncio.gather(team.left.act("same prompt"), team.right.act("same prompt"))


def test_every_candidate_has_its_own_seed_and_runs_repeat() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        team, policy = team_of(candidates=4, seed=seed)
        run(three_turns, team)
        return policy.seeds

    sampled = seeds(5)
    assert len(set(sampled)) == 2 * 3 * 4
    assert all(seed is not None and 0 <= seed < 2**31 for seed in sampled)  # what engines accept
    assert sampled == seeds(5)
    assert not set(sampled) & set(seeds(6))
    assert seeds(None) == [None] * 24


def test_seeds_do_not_depend_on_the_order_of_agents() -> None:
    def seeds(order: str) -> dict[str, list[int | None]]:
        team, policy = team_of(candidates=2)

        async def workflow(team: Team) -> None:
            for name in order.split():
                await team[name].act("x")

        run(workflow, team)
        return {
            agent: [seed for decision_id, _, seed in policy.asked if f".{agent}." in decision_id]
            for agent in ("left", "right")
        }

    assert seeds("left right left right") == seeds("right right left left")


def test_decision_ids_are_shared_by_candidates_only() -> None:
    asked: list[str] = []
    for episode in ("task.0", "task.1"):
        team, policy = team_of(candidates=4, episode_id=episode)
        run(three_turns, team)
        asked += [decision_id for decision_id, _, _ in policy.asked]
    assert sorted(Counter(asked).values()) == [4] * (2 * 2 * 3)


def test_episodes_and_tasks_never_share_a_group() -> None:
    """Trap 1: a group key that merges two problems compares answers to different prompts."""
    candidates, sessions, groups = 3, 12, {}
    # Short uids and two-digit sessions: "1" + "11" must not equal "11" + "1".
    for uid, session in itertools.product(("1", "11", "a1", "a"), range(sessions)):
        team, _ = team_of(candidates=candidates)
        for row in training_rows(uid, session, run(three_turns, team), "tree"):
            groups.setdefault(row.group, set()).add((uid, session, row.tags["agent"], row.tags["turn"]))
    assert all(len(members) == 1 for members in groups.values())
    assert len(groups) == 4 * sessions * 2 * 3


# ------------------------------------------------------------------ failures


class Stuck:
    """Answers that never arrive, and the calls that were cancelled."""

    def __init__(self, fails: Callable[[str, int], bool], error: BaseException, waiting: int) -> None:
        self._fails, self._error, self._expected = fails, error, waiting
        self.started: list[tuple[str, int]] = []
        self.cancelled: list[tuple[str, int]] = []
        self.all_wait = asyncio.Event()

    async def answer(self, decision_id: str, index: int) -> str:
        if self._fails(decision_id, index):
            await self.all_wait.wait()
            raise self._error
        self.started.append((decision_id, index))
        if len(self.started) == self._expected:
            self.all_wait.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append((decision_id, index))
            raise
        raise AssertionError("unreachable")


def test_a_failed_candidate_fails_the_episode_and_ends_its_siblings() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        stuck = Stuck(lambda decision_id, index: index == 1, EpisodeFailed("engine", "gone"), waiting=3)
        team, _ = team_of(stuck.answer, candidates=4)

        async def workflow(team: Team) -> None:
            await team.left.act("x")

        with pytest.raises(EpisodeFailed, match="gone") as caught:
            await play(Play(workflow), 0, team)
        assert caught.value.reason == "engine"
        assert sorted(index for _, index in stuck.cancelled) == [0, 2, 3]
        assert asyncio.all_tasks() == before
        assert team.decisions == []

    bounded(main())


@pytest.mark.parametrize("error", [EpisodeFailed("timeout", "late"), RuntimeError("defect")])
def test_a_failed_candidate_ends_the_other_agent_of_the_turn(error: Exception) -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        stuck = Stuck(lambda decision_id, index: ".left." in decision_id and index == 0, error, waiting=3)
        team, _ = team_of(stuck.answer, candidates=2)

        async def workflow(team: Team) -> None:
            await asyncio.gather(team.left.act("x"), team.right.act("y"))

        with pytest.raises(type(error), match=str(error)):
            await play(Play(workflow), 0, team)
        assert sorted(stuck.cancelled) == sorted(stuck.started)
        assert len(stuck.cancelled) == 3
        assert asyncio.all_tasks() == before

    bounded(main())


def test_a_branch_between_two_decisions_samples_no_more_once_the_episode_failed() -> None:
    async def main() -> None:
        failed, asked = asyncio.Event(), []

        async def answer(decision_id: str, index: int) -> str:
            asked.append(decision_id)
            if ".right." in decision_id:
                raise EpisodeFailed("engine", "gone")
            return str(index)

        async def branch(team: Team) -> None:
            await team.left.act("x")
            await failed.wait()  # such as running a program between two decisions
            await team.left.act("y")

        async def workflow(team: Team) -> None:
            await asyncio.gather(branch(team), team.right.act("z"))

        with pytest.raises(EpisodeFailed):
            await play(Play(workflow), 0, team_of(answer, candidates=1)[0])
        failed.set()
        for _ in range(20):  # runs all ready tasks
            await asyncio.sleep(0)
        assert "episode.left.1" not in asked

    bounded(main())


def test_an_episode_fails_for_its_first_failure() -> None:
    async def answer(decision_id: str, index: int) -> str:
        if ".right." in decision_id:
            raise EpisodeFailed("timeout", "the second one")
        raise EpisodeFailed("engine", "the first one")

    async def workflow(team: Team) -> None:
        for agent in (team.left, team.right):
            with contextlib.suppress(EpisodeFailed):
                await agent.act("x")

    with pytest.raises(EpisodeFailed, match="the first one") as caught:
        bounded(play(Play(workflow), 0, team_of(answer, candidates=1)[0]))
    assert caught.value.reason == "engine"


async def _in_a_task_group(team: Team) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(team.left.act("x"))
        group.create_task(team.right.act("y"))


async def _dropping_the_error(team: Team) -> None:
    with contextlib.suppress(EpisodeFailed):
        await team.left.act("x")


async def _failing_in_turn(team: Team) -> None:
    reply: Any = None
    with contextlib.suppress(EpisodeFailed):
        reply = await team.left.act("x")
    reply.text.upper()


@pytest.mark.parametrize("workflow", [_in_a_task_group, _dropping_the_error, _failing_in_turn])
def test_a_failed_candidate_fails_the_episode_whatever_the_environment_makes_of_it(
    workflow: Callable[[Team], Awaitable[None]],
) -> None:
    if workflow is _in_a_task_group and sys.version_info < (3, 11):
        pytest.skip("asyncio.TaskGroup came with Python 3.11")

    async def answer(decision_id: str, index: int) -> str:
        raise EpisodeFailed("engine", "gone")

    with pytest.raises(EpisodeFailed, match="gone"):
        bounded(play(Play(workflow), 0, team_of(answer, candidates=2)[0]))


def test_a_cancelled_episode_leaves_nothing_running() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        stuck = Stuck(lambda decision_id, index: False, RuntimeError(), waiting=4)
        team, _ = team_of(stuck.answer, candidates=2)

        async def workflow(team: Team) -> None:
            await asyncio.gather(team.left.act("x"), team.right.act("y"))

        episode = asyncio.ensure_future(play(Play(workflow), 0, team))
        await stuck.all_wait.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert len(stuck.cancelled) == 4
        assert asyncio.all_tasks() == before

    bounded(main())


def test_a_score_that_raises_ends_the_scores_of_the_siblings() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        ended, waiting = [], asyncio.Event()

        async def score(text: str) -> Score:
            if text == "1":
                await waiting.wait()
                raise RuntimeError("defect in the environment")
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(text)
            raise AssertionError("unreachable")

        async def workflow(team: Team) -> None:
            await team.left.act("x", score)

        with pytest.raises(RuntimeError, match="defect"):
            await play(Play(workflow), 0, team_of(candidates=2)[0])
        assert ended == ["0"]
        assert asyncio.all_tasks() == before

    bounded(main())


def test_an_empty_answer_fails_the_episode() -> None:
    async def answer(decision_id: str, index: int) -> str:
        return "" if index == 1 else "fine"

    async def workflow(team: Team) -> None:
        await team.left.act("x")

    with pytest.raises(EpisodeFailed, match="'left', turn 0") as caught:
        run(workflow, team_of(answer, candidates=3)[0])
    assert caught.value.reason == "empty"


def test_a_prompt_that_cannot_be_encoded_samples_nothing() -> None:
    team, policy = team_of()

    def encode(messages: Sequence[Message]) -> list[int]:
        raise EpisodeFailed("prompt_too_long", "5000 tokens")

    policy.encode = encode  # type: ignore[method-assign]

    async def workflow(team: Team) -> None:
        await team.left.act("x")

    with pytest.raises(EpisodeFailed) as caught:
        run(workflow, team)
    assert caught.value.reason == "prompt_too_long"
    assert policy.asked == []


@pytest.mark.parametrize("score", [Score(team=math.nan), Score(local=math.inf), Score(team=-math.inf)])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_score_that_is_not_finite_is_a_defect_with_agent_and_turn(score: Score, alpha: float) -> None:
    async def workflow(team: Team) -> None:
        await team.right.act("x")
        await team.right.act("x", lambda text: score)

    with pytest.raises(ValueError, match=r"'right', turn 1.*not finite"):
        run(workflow, team_of(candidates=2, alpha=alpha)[0])


def test_a_reply_whose_score_raises_is_reported_and_gets_the_lowest_reward() -> None:
    reported = []

    def score(text: str) -> Score:
        return Score(team=[1.0, -2.0][int(text)])  # IndexError for the third reply

    async def workflow(team: Team) -> None:
        await team.left.act("x", score)
        await team.left.act("y", lambda text: Score(team=math.nan if text == "1" else 1.0))

    def report(agent: str, turn: int, reply: str, error: Exception) -> None:
        reported.append((agent, turn, reply, type(error)))

    record = run(workflow, team_of(candidates=3, on_score_error=report)[0])
    rewards = [[candidate.reward for candidate in decision.candidates] for decision in record.decisions]
    assert rewards == [[1.0, -2.0, -2.0], [1.0, 0.0, 1.0]]
    assert reported == [("left", 0, "2", IndexError), ("left", 1, "1", ValueError)]
    errors = [[candidate.error is not None for candidate in decision.candidates] for decision in record.decisions]
    assert errors == [[False, False, True], [False, True, False]]


@pytest.mark.parametrize("selection", ["greedy", "first", "random"])
@pytest.mark.parametrize("together", [False, True])
def test_a_reply_whose_score_raises_is_not_committed_beside_others(selection: Selection, together: bool) -> None:
    """The environment plays it, and could not read it. Here all rewards are equal, as they often are at the start."""

    def score(text: str) -> Score:
        return Score(team=0.0 if text == "2" else math.nan)

    async def workflow(team: Team) -> None:
        for _ in range(5):
            if together:
                candidate = await team.left.act("x", score_all=lambda texts: list(map(score, texts)))
            else:
                candidate = await team.left.act("x", score)
            assert candidate.text == "2"

    reported: list[str] = []
    team = team_of(candidates=4, selection=selection, on_score_error=lambda *error: reported.append(error[2]))[0]
    decisions = run(workflow, team).decisions
    assert sorted(reported) == sorted(["0", "1", "3"] * 5)
    assert {candidate.reward for decision in decisions for candidate in decision.candidates} == {0.0}


@pytest.mark.parametrize("candidates", [1, 3])
def test_scores_that_raise_for_every_reply_are_a_defect(candidates: int) -> None:
    async def workflow(team: Team) -> None:
        await team.left.act("x", lambda text: Score(team=1 / 0))

    team = team_of(candidates=candidates, on_score_error=lambda *_: None)[0]
    if candidates == 1:  # nothing tells it from a reply's fault, so only their number ends a run
        assert run(workflow, team).decisions[0].candidates[0].reward == 0.0
        return
    with pytest.raises(ZeroDivisionError):
        run(workflow, team)


def test_an_episode_that_fails_in_a_score_fails() -> None:
    def unusable(text: str) -> Score:
        raise EpisodeFailed("gold", "no answer")

    async def workflow(team: Team) -> None:
        await team.left.act("x", unusable)

    with pytest.raises(EpisodeFailed, match="no answer"):
        run(workflow, team_of(candidates=2, on_score_error=lambda *_: None)[0])


def test_play_returns_outcome_and_decisions() -> None:
    outcome = Outcome(True, 0.75, {"turns": 2.0})

    async def workflow(team: Team) -> Outcome:
        await team.left.act("x")
        await team.right.act("y")
        return outcome

    record = run(workflow, team_of(candidates=2)[0])
    assert record.outcome is outcome
    assert [decision.agent for decision in record.decisions] == ["left", "right"]
    assert all(isinstance(decision, Decision) for decision in record.decisions)


# ------------------------------------------------------------------ without verl


def test_scripted_team_answers_each_prompt_in_turn() -> None:
    team = ScriptedTeam({"left": lambda prompt, k: f"{prompt}{k}", "right": lambda prompt, k: "r"}, candidates=3)

    async def workflow(team: Team) -> None:
        await team.left.act("a")
        await team.left.act("b")
        await team.right.act("a")

    texts = [[candidate.text for candidate in decision.candidates] for decision in run(workflow, team).decisions]
    assert texts == [["a0", "a1", "a2"], ["b0", "b1", "b2"], ["r"] * 3]
