"""The team: which candidates are drawn, which one the episode goes on with, and how an episode fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from verl_atgrpo.environment import Environment, Message, Outcome, Score
from verl_atgrpo.rollout.rows import training_rows
from verl_atgrpo.team import (
    Agent,
    Decision,
    EpisodeFailed,
    EpisodeRecord,
    Generation,
    ScriptedTeam,
    Team,
    TeamOptions,
    play,
    select,
)

Answer = Callable[[str, int], Awaitable[str]]
"""(decision id, number of the candidate at that decision) -> text."""
Workflow = Callable[[Team], Awaitable[Outcome | None]]

T = TypeVar("T")


class Play(Environment):
    """An environment that is nothing but its workflow."""

    agents = ("left", "right")

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow

    def task(self, split: str, index: int) -> int:
        return index

    def fingerprint(self, task: int) -> str:
        return str(task)

    async def run(self, task: int, team: Team) -> Outcome:
        return await self._workflow(team) or Outcome(False)


class Recorder:
    """A policy that writes down what it was asked and lets the test answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.encoded: list[list[Message]] = []
        self.asked: list[tuple[str, list[int], int | None]] = []
        self._numbers: Counter[str] = Counter()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        self.encoded.append(list(messages))
        return [ord(char) for message in messages for char in message["content"]]

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        number = self._numbers[decision_id]
        self._numbers[decision_id] += 1
        self.asked.append((decision_id, list(prompt_ids), seed))
        text = await self.answer(decision_id, number)
        return Generation([ord(char) for char in text], [-0.5] * len(text), text)

    @property
    def seeds(self) -> list[int | None]:
        return [seed for _, _, seed in self.asked]


async def number(decision_id: str, index: int) -> str:
    return str(index)


def team_of(
    answer: Answer = number, agents: Sequence[str] = ("left", "right"), **kwargs: Any
) -> tuple[Team, Recorder]:
    """A team whose agents share one recording policy; TeamOptions and Team keywords mixed."""
    names = ("candidates", "alpha", "local_weight", "selection", "softmax_temperature")
    options = TeamOptions(**{key: kwargs.pop(key) for key in names if key in kwargs})
    policy = Recorder(answer)
    return Team(dict.fromkeys(agents, "shared"), {"shared": policy}, options, **kwargs), policy


def run(workflow: Workflow, team: Team) -> EpisodeRecord:
    return bounded(play(Play(workflow), 0, team))


def bounded(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main`; what would wait for ever fails the test instead, and so does a task left running."""

    async def whole() -> T:
        before = asyncio.all_tasks()
        result = await main
        assert asyncio.all_tasks() == before
        return result

    async def limited() -> T:
        return await asyncio.wait_for(whole(), 10)

    return asyncio.run(limited())


def rewarded(*rewards: float) -> Callable[[str], Score]:
    """Scores answer "k" with the k-th reward."""
    return lambda text: Score(local=rewards[int(text)])


# ------------------------------------------------------------------ one decision


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


def test_softmax_of_a_team_uses_its_temperature() -> None:
    assert set(picks(0, selection="softmax", softmax_temperature=1e-3)) == {3}
    hot = picks(0, selection="softmax", softmax_temperature=1e6)
    assert set(hot) == {0, 1, 2, 3}
    assert hot == picks(0, selection="softmax", softmax_temperature=1e6)


def test_softmax_between_its_limits() -> None:
    rng = random.Random(0)

    def share_of_best(temperature: float, rewards: Sequence[float]) -> float:
        drawn = [select(rewards, "softmax", rng, temperature) for _ in range(4000)]
        return drawn.count(1) / len(drawn)

    assert share_of_best(1.0, [0.0, 1.0]) == pytest.approx(math.e / (1 + math.e), abs=0.03)
    assert share_of_best(2.0, [0.0, 2.0]) == pytest.approx(math.e / (1 + math.e), abs=0.03)
    assert share_of_best(1e9, [0.0, 1.0]) == pytest.approx(0.5, abs=0.03)
    # Neither limit may overflow or divide by zero.
    assert share_of_best(1e-9, [-1e6, 1e6]) == 1.0


@pytest.mark.parametrize("selection", ["random", "softmax"])
def test_seeded_selection_does_not_depend_on_which_agent_is_faster(selection: str) -> None:
    def committed(slow: str) -> dict[tuple[str, int], int]:
        async def answer(decision_id: str, index: int) -> str:
            for _ in range(20 if f".{slow}." in decision_id else 0):
                await asyncio.sleep(0)
            return str(index)

        async def workflow(team: Team) -> None:
            for _ in range(12):
                await asyncio.gather(team.left.act("x"), team.right.act("y"))

        record = run(workflow, team_of(answer, candidates=4, selection=selection, seed=3)[0])
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
    assert team["tool_user"] is team.tool_user


def test_an_agent_is_not_hidden_by_an_attribute_of_the_team() -> None:
    for name in ("decisions", "cancel"):
        with contextlib.suppress(ValueError):  # refusing the name would do as well
            team, _ = team_of(agents=(name,))
            assert isinstance(team[name], Agent)


# ------------------------------------------------------------------ seeds and ids


async def three_turns(team: Team) -> None:
    for _ in range(3):
        await asyncio.gather(team.left.act("same prompt"), team.right.act("same prompt"))


def test_every_candidate_has_its_own_seed_and_runs_repeat() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        team, policy = team_of(candidates=4, seed=seed)
        run(three_turns, team)
        return policy.seeds

    drawn = seeds(5)
    assert len(set(drawn)) == 2 * 3 * 4
    assert all(seed is not None and 0 <= seed < 2**31 for seed in drawn)  # what engines accept
    assert drawn == seeds(5)
    assert not set(drawn) & set(seeds(6))
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
    # Short uids and two-digit sessions: "1" + "11" must not meet "11" + "1".
    for uid, session in itertools.product(("1", "11", "a1", "a"), range(sessions)):
        team, _ = team_of(candidates=candidates)
        for row in training_rows(uid, session, run(three_turns, team), "tree"):
            groups.setdefault(row.group, set()).add((uid, session, row.tags["agent"], row.tags["turn"]))
    assert all(len(members) == 1 for members in groups.values())
    assert len(groups) == 4 * sessions * 2 * 3


# ------------------------------------------------------------------ failures


class Stuck:
    """Answers that never come, and who was told to stop waiting for them."""

    def __init__(self, fails: Callable[[str, int], bool], error: BaseException, waiting: int) -> None:
        self._fails, self._error, self._expected = fails, error, waiting
        self.started: list[tuple[str, int]] = []
        self.cancelled: list[tuple[str, int]] = []
        self._all_wait = asyncio.Event()

    async def answer(self, decision_id: str, index: int) -> str:
        if self._fails(decision_id, index):
            await self._all_wait.wait()
            raise self._error
        self.started.append((decision_id, index))
        if len(self.started) == self._expected:
            self._all_wait.set()
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


def test_a_branch_between_two_decisions_draws_no_more_once_the_episode_failed() -> None:
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
        await asyncio.sleep(0.01)
        assert "episode.left.1" not in asked

    bounded(main())


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
        await stuck._all_wait.wait()
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


def test_a_prompt_that_cannot_be_encoded_draws_nothing() -> None:
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


def test_a_team_plays_where_verl_is_not_installed(tmp_path: Path) -> None:
    code = """
import asyncio, sys
for name in ("verl", "ray", "vllm", "transfer_queue"):
    sys.modules[name] = None
from verl_atgrpo import ScriptedTeam, make
from verl_atgrpo.team import play
environment = make("plan_path", size=4, tool="moves", style="compact", max_turns=2)
team = ScriptedTeam({"tool_user": lambda prompt, k: "R", "planner": lambda prompt, k: "UD"[k]}, candidates=2)
record = asyncio.run(play(environment, environment.task("train", 0), team))
sys.stdout.write(f"{len(record.decisions)} {len(record.decisions[0].candidates)}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    decisions, candidates = map(int, done.stdout.split())
    assert decisions in (2, 4)
    assert candidates == 2
