"""Rollout workers that die or hang: verl would wait for their rows, so the trainer checks them itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
ray = pytest.importorskip("ray")

from fakes.fake_trainer import FakeRollout, FakeTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_atgrpo.train.rollout import manager
from verl_atgrpo.train.rollout.manager import TeamRolloutManager
from verl_atgrpo.train.rollout.worker import WorkerReport
from verl_atgrpo.train.rows import queue
from verl_atgrpo.train.rows.queue import pace
from verl_atgrpo.train.serving.health import PolicyFailed, RolloutFailed


class Worker:
    """A worker's handle, whose report arrives immediately, late, or never because it is dead."""

    def __init__(self, tokens: int, error: str | None = None) -> None:
        self.left = WorkerReport(Counter(tokens=tokens), error)
        self.late = self.dead = False
        self.drain_report = self.pause = self.resume = SimpleNamespace(remote=lambda: [self, None])
        self.generate_sequences = SimpleNamespace(remote=lambda chunk: [self, None])


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(asked)
        late = [call for call in asked if call[0].late]
        return [call for call in asked if call not in late], late

    def get(call: Any, timeout: float | None = None) -> Any:
        if isinstance(call[0], list):
            return [get(one, timeout) for one in call]
        worker = call[0]
        if worker.dead:
            raise ray.exceptions.ActorDiedError()
        if worker.late and timeout is not None:
            raise ray.exceptions.GetTimeoutError
        if call[1] is None:
            call[1], worker.left = worker.left, WorkerReport()
        return call[1]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)


class Manager(TeamRolloutManager):
    """The manager of given workers."""

    def __init__(self, *workers: Worker) -> None:
        self.agent_loop_workers, self._late = list(workers), {}
        self._most_silent = 600.0


TASKS: Any = SimpleNamespace(chunk=lambda number: [None] * number)


def test_reports_are_added_up_and_the_first_error_is_returned() -> None:
    report = Manager(Worker(3), Worker(4, "task 1: KeyError"), Worker(5, "task 2: KeyError")).drain_report()
    assert (report.counts, report.error) == (Counter(tokens=12), "task 1: KeyError")


def test_a_busy_workers_counts_arrive_later_and_once(caplog: pytest.LogCaptureFixture) -> None:
    busy = Worker(4)
    busy.late = True
    workers = Manager(Worker(3), busy)
    assert workers.drain_report().counts == Counter(tokens=3)
    assert "rollout worker 1 has not reported" in caplog.text
    busy.late = False
    assert workers.drain_report().counts == Counter(tokens=4)
    assert workers.drain_report().counts == Counter()


def test_a_worker_that_reports_nothing_for_long_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(manager.time, "monotonic", lambda: clock[0])
    silent = Worker(4)
    workers = Manager(Worker(3), silent)
    silent.late = True
    for clock[0] in (0.0, 900.0):  # it may be reading its data sets
        assert workers.drain_report().counts["tokens"] in (0, 3)
    silent.late = False
    workers.generate_sequences(TASKS)
    for clock[0] in (900.0, 901.0, 2000.0):  # one late report is no sign if the next one is in time
        silent.late = clock[0] == 901.0
        workers.drain_report()
    silent.late = True
    for clock[0] in (2000.0, 2300.0, 2600.0):
        workers.drain_report()
    clock[0] = 2600.5
    with pytest.raises(RolloutFailed, match=r"^rollout worker 1 has not reported for 600 s.*request_timeout=600: "):
        workers.drain_report()


@pytest.mark.parametrize("what", ["generate_sequences", "pause", "resume"])
def test_a_worker_that_takes_no_call_ends_the_run(what: str) -> None:
    """Its event loop has ended, or never gets to it."""
    silent = Worker(3)
    workers = Manager(Worker(1), silent)
    arguments = [TASKS] if what == "generate_sequences" else []
    getattr(workers, what)(*arguments)
    workers.generate_sequences(TASKS)
    silent.late = True
    with pytest.raises(RolloutFailed, match=r"^a rollout worker does not answer, longer than at_grpo\.request_t"):
        getattr(workers, what)(*arguments)


@pytest.mark.parametrize("what", ["drain_report", "pause", "resume"])
def test_a_dead_worker_is_reported_in_one_line(what: str) -> None:
    dead = Worker(3)
    dead.dead = True
    with pytest.raises(RolloutFailed, match=r"^a rollout worker failed: ActorDiedError: ") as raised:
        getattr(Manager(Worker(1), dead), what)()
    assert "\n" not in str(raised.value)


def test_workers_are_checked_while_the_trainer_waits_for_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(queue.time, "monotonic", lambda: clock[0])
    polls, checks = [], []
    buffer = SimpleNamespace(_sync_metadata_from_transfer_queue=lambda: polls.append(clock[0]))
    pace(buffer, 0.5, lambda: checks.append(clock[0]))
    for clock[0] in (1000.0, 1029.0, 1031.0, 1032.0, 1060.0, 1062.0):
        buffer._sync_metadata_from_transfer_queue()
    assert len(polls) == 6
    assert checks == [1031.0, 1062.0]
    assert buffer.poll_interval == 0.5


def test_the_trainer_ends_a_wait_for_a_worker_that_died(rollout: FakeRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer(rollout)
    rollout.polls = lambda task: 10**9  # its rows never arrive

    def died() -> WorkerReport:
        raise RolloutFailed("a rollout worker failed")

    rollout.drain_report = died  # type: ignore[method-assign]
    monkeypatch.setattr(queue, "CHECK_INTERVAL", 0.0)
    pace(trainer.replay_buffer, 0.0, trainer.collect_report)
    with pytest.raises(RolloutFailed):
        trainer.play()


@pytest.mark.parametrize("failure", [PolicyFailed("policy 'coder': gone"), RolloutFailed("a rollout worker failed")])
def test_the_error_says_where_the_run_can_resume(
    failure: RuntimeError, rollout: FakeRollout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(PPOTrainer, "fit", fit)
    with pytest.raises(type(failure), match=rf"^{failure}; there is no complete checkpoint yet"):
        FakeTrainer(rollout, folder=tmp_path).fit(None)
