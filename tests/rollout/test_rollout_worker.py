"""The rollout worker from a task to the rows in the queue, on a simulated engine and without Ray."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes import simulated_engine
from fakes.simulated_engine import SimulatedEngine, Turns, run_virtually
from fakes.simulated_worker import SimulatedWorker, without_tensors

from verl_atgrpo import EpisodeFailed, Outcome, Score, Team
from verl_atgrpo.play.endpoints import drain_refused
from verl_atgrpo.sandbox.pool import POOL
from verl_atgrpo.train.config.schema import AtGrpoConfig, BranchSettings, PartSettings
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.rollout.worker import MOST_SCORE_ERRORS
from verl_atgrpo.train.rows.row_advantages import rows_with_signal
from verl_atgrpo.train.rows.step_rows import StepRows
from verl_atgrpo.train.serving.requests import engine_params
from verl_atgrpo.train.trainer.metrics import rollout_metrics, step_metrics

ENDING = (SystemExit, asyncio.CancelledError, GeneratorExit, type("Exit", (BaseException,), {}))
"""Kinds of exceptions that are no `Exception`."""


class Flaky(SimulatedEngine):
    """An engine that fails one task's second decision."""

    async def attempt(self, replica: int, request_id: str, *request: Any) -> Any:
        if request_id == "t1.0.planner.0":
            raise EpisodeFailed("engine", "the server failed")
        return await super().attempt(replica, request_id, *request)


class Seeds(SimulatedEngine):
    """An engine that notes with which seeds it was asked."""

    async def attempt(self, replica: int, request_id: str, *request: Any) -> Any:
        self.seeds: list[int] = [*getattr(self, "seeds", []), request[2]["seed"]]
        return await super().attempt(replica, request_id, *request)


def played(engine: SimulatedEngine, episodes: int) -> tuple[SimulatedWorker, list[list[str]], StepRows]:
    rows = StepRows()
    episode_keys: list[list[str]] = []

    def put(keys: list[str], tags: list[dict[str, Any]]) -> None:
        episode_keys.append(keys)
        rows.keys += keys
        rows.tags += tags

    worker = SimulatedWorker(engine, put, turns=2, candidates=3)
    POOL.drain_counts()  # other tests' programs and requests are no business of this worker
    drain_refused()
    run_virtually(worker.play_all(episodes))
    return worker, episode_keys, rows


def test_every_candidate_is_a_row_of_its_episode() -> None:
    engine = SimulatedEngine(replicas=1, slots=4)
    worker, episode_keys, rows = played(engine, 5)
    assert len(rows.keys) == len(engine.served) == 5 * 2 * 2 * 3
    assert sorted(keys[0] for keys in episode_keys) == [f"t{index}_0_0" for index in range(5)]
    assert all(keys == [f"{keys[0][:-1]}{number}" for number in range(12)] for keys in episode_keys)
    rows.sort()
    assert rows.keys[0] == "t0_0_3"  # the planner's first
    metrics = step_metrics(rows.tags, rows_with_signal(rows.tags, PRESETS["at_grpo"]))
    assert (metrics["team/episodes"], metrics["agent/planner/turn_1/rows"]) == (5, 15)
    # A token takes a hundredth of a second, and the prompt is the same for a decision's candidates.
    assert sum(tags["response_len"] for tags in rows.tags) == round(100 * sum(s for _, s in engine.served))
    report = worker.drain_report()
    assert report.counts == {
        "candidates": 60,
        "tokens": sum(tags["response_len"] for tags in rows.tags),
        "prompt_tokens": sum(tags["prompt_len"] for tags in rows.tags),
        "cached_prompt_tokens": 0,
    }


@pytest.mark.parametrize(("recorded", "shown"), [(True, 4), (False, 0)])
def test_what_an_episode_branches_from_has_rows_only_if_its_task_is_recorded(recorded: bool, shown: int) -> None:
    written: list[dict[str, Any]] = []
    engine = SimulatedEngine(replicas=1, slots=4)
    worker = SimulatedWorker(engine, lambda keys, tags: written.extend(tags), turns=2, candidates=3)
    changes = {"scheme": "branch", "branch": BranchSettings(at="random")}
    worker._settings = worker._settings.model_copy(update=changes)
    run_virtually(worker.play_all(1, recorded=recorded))
    # Two agents, two turns each: three candidates at one decision, and the episode's own replies at all of them.
    assert [tags.get("trained", True) for tags in written] == [True] * 3 + [False] * shown
    assert {tags["num_turns"] for tags in written} == {4}
    assert {tags["whole"] for tags in written} == {recorded}


def test_a_task_that_is_dealt_twice_in_a_step_is_played_with_other_draws() -> None:
    once, twice = Seeds(), Seeds()
    run_virtually(SimulatedWorker(once, lambda keys, tags: None, turns=2, candidates=3).play_all(2))
    run_virtually(SimulatedWorker(twice, lambda keys, tags: None, turns=2, candidates=3).play_all(4, tasks=2))
    assert len(set(twice.seeds)) == len(twice.seeds) == 4 * 2 * 2 * 3
    assert set(once.seeds) < set(twice.seeds), "a task's first episode has the seeds it always had"


def test_a_failed_episode_leaves_no_row_and_the_others_all_of_theirs() -> None:
    worker, episode_keys, _ = played(Flaky(), 3)
    assert sorted(keys[0] for keys in episode_keys) == ["t0_0_0", "t2_0_0"]
    counts = worker.drain_report().counts
    assert (counts["episodes_failed"], counts["failed/engine"]) == (1, 1)


class Stuck(SimulatedEngine):
    """An engine that answers nothing of task 0 until `released`, which takes none of its slots."""

    released: asyncio.Event

    async def attempt(self, replica: int, request_id: str, *request: Any) -> Any:
        if request_id.startswith("t0."):
            await self.released.wait()
        return await super().attempt(replica, request_id, *request)


def test_an_episode_that_waits_holds_up_no_other() -> None:
    """The others play all their decisions and write their rows meanwhile; no wave of requests waits for another."""
    engine, ended = Stuck(slots=4, replicas=1), list[str]()

    def put(keys: list[str], tags: list[dict[str, Any]]) -> None:
        ended.append(keys[0].partition("_")[0])
        if len(ended) == 5:
            engine.released.set()  # nothing else does: were they held up, the loop would have nothing to run

    async def play() -> None:
        engine.released = asyncio.Event()
        await SimulatedWorker(engine, put, turns=3, candidates=2).play_all(6)

    run_virtually(play())
    assert sorted(ended[:5]) == ["t1", "t2", "t3", "t4", "t5"] and ended[5:] == ["t0"]


class Untrained(Turns):
    """In task 1 a simulated user hangs up before anyone else has said a thing."""

    async def run(self, task: int, team: Team) -> Outcome:
        if task == 1:
            await team.planner.act("hello?", train=False)
            return Outcome(False)
        return await super().run(task, team)


def test_an_episode_without_a_trained_decision_is_replaced_and_does_not_end_the_run() -> None:
    keys: list[str] = []
    worker = SimulatedWorker(SimulatedEngine(), lambda new, tags: keys.extend(new), turns=1, candidates=2)
    worker._environment = Untrained(1)
    run_virtually(worker.play_all(3))
    assert {key.partition("_")[0] for key in keys} == {"t0", "t2"}
    assert worker.drain_report().counts["failed/nothing_to_train"] == 1


def test_replies_whose_score_raises_are_counted_and_many_of_them_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    score, raised = simulated_engine._score, []

    def sometimes(reply: str) -> Score:
        if int(reply) % 7 == 0:
            raised.append(reply)
            raise IndexError("no such row")
        return score(reply)

    monkeypatch.setattr(simulated_engine, "_score", sometimes)
    worker, _, rows = played(SimulatedEngine(), 5)
    assert len(rows.keys) == 5 * 2 * 2 * 3
    assert 0 < worker.drain_report().counts["score_errors"] == len(raised) <= MOST_SCORE_ERRORS
    with pytest.raises(
        RuntimeError, match=r"train\): RuntimeError: agent '\w+', turn \d: the scores of [2-9][0-9] replies"
    ):
        played(SimulatedEngine(), 40)


@pytest.mark.parametrize("kind", ENDING)
def test_a_score_that_would_end_the_process_is_one_that_raises(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library's argparse, say: the worker's loop would end, and the run wait for its rows for ever."""
    score, raised = simulated_engine._score, []

    def sometimes(reply: str) -> Score:
        if int(reply) % 7 == 0:
            raised.append(reply)
            raise kind("2")
        return score(reply)

    monkeypatch.setattr(simulated_engine, "_score", sometimes)
    worker, _, rows = played(SimulatedEngine(), 5)
    assert len(rows.keys) == 5 * 2 * 2 * 3
    assert worker.drain_report().counts["score_errors"] == len(raised) > 0
    assert re.search(r"agent '\w+', turn \d: scoring", caplog.text)
    assert f"the score raised {kind.__name__}: 2" in caplog.text


@pytest.mark.parametrize("kind", ENDING)
@pytest.mark.parametrize("where", ["task", "run"])
def test_an_environment_that_would_end_the_process_is_a_defect(where: str, kind: type[BaseException]) -> None:
    class Ending(Turns):
        def task(self, split: str, index: int) -> int:
            return self._end(index) if where == "task" and index == 1 else super().task(split, index)

        async def run(self, task: int, team: Team) -> Outcome:
            await team.planner.act("x")
            return self._end(task) if where == "run" and task == 1 else await super().run(task, team)

        def _end(self, index: int) -> Any:
            raise kind("2")

    worker = SimulatedWorker(SimulatedEngine(), lambda keys, tags: None, turns=1, candidates=2)
    worker._environment = Ending(1)
    why = rf"task 1 \(train\): Ended: Ending\.{where} raised {kind.__name__}: 2"
    with pytest.raises(RuntimeError, match=why):
        run_virtually(worker.play_all(2))


def test_a_reply_that_every_continuation_of_a_branch_scores_again_counts_once() -> None:
    worker = SimulatedWorker(SimulatedEngine(), lambda keys, tags: None, turns=1, candidates=2)
    for turn in [0] * MOST_SCORE_ERRORS + [1]:
        worker._count_score_error("task 0 (train), a.0", "planner", turn, "junk", KeyError("junk"))
    assert worker.drain_report().counts["score_errors"] == 2


def test_rows_that_the_queue_refuses_are_a_defect_and_the_task_ends() -> None:
    """Without a last status the trainer would wait for the task for ever."""
    statuses: list[Any] = []

    def put(keys: list[str], tags: list[dict[str, Any]]) -> None:
        if keys[0].startswith("t1"):
            raise RuntimeError("Storage capacity exceeded")

    async def put_status(*, key: str, tag: dict[str, str], **_: Any) -> None:
        statuses.append((key, tag["status"]))

    worker = SimulatedWorker(SimulatedEngine(), put, turns=2, candidates=3, put_status=put_status)
    with pytest.raises(RuntimeError, match=r"task 1 \(train\): RuntimeError: Storage capacity exceeded"):
        run_virtually(worker.play_all(2))
    assert sorted(statuses) == [("t0", "finished"), ("t0", "running"), ("t1", "failure"), ("t1", "running")]


def test_rows_are_the_same_without_their_tensors() -> None:
    _, _, rows = played(SimulatedEngine(), 2)
    with without_tensors():
        _, _, bare = played(SimulatedEngine(), 2)
    assert (rows.keys, rows.tags) == (bare.keys, bare.tags)


def test_what_the_sandbox_went_through_is_reported_once() -> None:
    worker, _, _ = played(SimulatedEngine(), 1)
    POOL.counts.update(restarts=1, reruns=3)
    metrics = rollout_metrics(worker.drain_report().counts)
    assert (metrics["rollout/sandbox_restarts"], metrics["rollout/sandbox_reruns"]) == (1, 3)
    metrics = rollout_metrics(worker.drain_report().counts)
    assert (metrics["rollout/sandbox_restarts"], metrics["rollout/sandbox_reruns"]) == (0, 0)


def test_answers_come_as_a_whole_where_none_is_interrupted() -> None:
    kinds = pytest.importorskip("vllm.sampling_params").RequestOutputKind
    always = {"detokenize": False, "flat_logprobs": True}
    assert engine_params("sync") == {**always, "output_kind": kinds.FINAL_ONLY}
    assert engine_params("colocate_async") == always


class Sides(Turns):
    """The tool user plays against the planner in every other task."""

    def opponents(self, task: int) -> tuple[str, ...]:
        return ("tool_user",) if task % 2 else ()


class Numbers(SimulatedEngine):
    """An engine that notes which adapter which agent's request names."""

    async def attempt(self, replica: int, request_id: str, *request: Any) -> Any:
        self.asked: set[tuple[str, int | None]] = getattr(self, "asked", set())
        self.asked.add((request_id.rpartition(".")[0], request[2].pop("adapter", None)))
        return await super().attempt(replica, request_id, *request)


@pytest.mark.parametrize(
    ("drawn", "numbers"),
    [("/0/0", (1, 1)), ("shared/2/40", (1, 3)), ("judge/0/0", (1, 7))],
)
def test_opponents_are_answered_by_whom_the_trainer_drew_and_not_trained(
    drawn: str, numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, written = Numbers(replicas=1, slots=4), list[dict[str, Any]]()
    worker = SimulatedWorker(engine, lambda keys, tags: written.extend(tags), turns=1, candidates=2)
    worker._environment = Sides(1)
    kind = type(worker._settings)
    monkeypatch.setattr(kind, "adapter_number", lambda self, policy: {"shared": 1, "judge": 7}[policy])
    monkeypatch.setattr(kind, "past_number", lambda self, slot: 1 + slot)
    worker._chats["judge"] = worker._chats["shared"]
    for clients in (worker._training_clients, worker.llm_client.clients):
        clients["judge"] = clients["shared"]
    run_virtually(worker.play_all(2, opponent=drawn))
    assert engine.asked == {
        ("t0.0.planner", 1),
        ("t0.0.tool_user", 1),
        ("t1.0.planner", numbers[0]),
        ("t1.0.tool_user", numbers[1]),
    }
    of_game = [tags for tags in written if tags["task"] == 1]
    assert {(tags["agent"], tags.get("trained", True)) for tags in of_game} == {
        ("planner", True),
        ("tool_user", False),
    }
    assert sum(tags["agent"] == "tool_user" for tags in of_game) == 1, "it selects nothing"
    assert {tags.get("opponent") for tags in of_game} == {drawn}
    assert {tags.get("opponent") for tags in written if tags["task"] == 0} == {None}


def test_a_part_of_a_mixture_is_played_by_its_own_scheme() -> None:
    """Parts take turns: `walk` in a tree of two, `duel` in four whole episodes of a task."""
    written: list[dict[str, Any]] = []
    worker = SimulatedWorker(SimulatedEngine(replicas=1, slots=4), lambda keys, tags: written.extend(tags))
    turns = "fakes.simulated_engine:Turns"
    worker._settings = AtGrpoConfig(
        environment={
            "name": "mixture",
            "parts": {"walk": {"name": turns, "turns": 1}, "duel": {"name": turns, "turns": 2}},
        },
        candidates=2,
        parts={"duel": PartSettings(scheme="parallel", candidates=4, estimator="rae")},
    )
    worker._environment = worker._settings.make_environment()
    worker._policy_of = worker._settings.policies_of(worker._environment)
    run_virtually(worker.play_all(2))
    walk, duel = ([tags for tags in written if tags["agent"].startswith(part)] for part in ("walk", "duel"))
    assert Counter(tags["group"] for tags in walk) == {"t0.0.walk.planner.0": 2, "t0.0.walk.tool_user.0": 2}
    # Two agents, two turns, one candidate each, in each of four episodes.
    assert Counter(tags["group"] for tags in duel) == {"t1": 16}
    assert len({tags["episode"] for tags in duel}) == 4
    assert {tags["reward"] for tags in duel} == {tags["episode_reward"] for tags in duel}
