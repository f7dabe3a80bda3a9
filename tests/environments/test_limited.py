"""Foreign code in a process under limits: what exceeds one has no result, and the next request is answered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from verl_atgrpo.environments.common import limited
from verl_atgrpo.environments.common.limited import LimitedProcess


@pytest.fixture(scope="module")
def shared() -> Iterator[LimitedProcess]:
    process = LimitedProcess("fakes.obeying")
    yield process
    end(process)


def end(process: LimitedProcess) -> None:
    if process.process is not None:
        process.process.kill()
        process.process.communicate()


def pid(process: LimitedProcess) -> int:
    return process.ask({"do": "pid"})  # type: ignore[no-any-return]


@pytest.mark.parametrize("said", ["x", "", "a\nb\r\n\x00", "\ud800", "9" * 10**6, [1, None], {"a": "\u2028"}])
def test_requests_are_answered_by_one_process(shared: LimitedProcess, said: object) -> None:
    before = pid(shared)
    assert shared.ask({"do": "echo", "say": said}) == said
    assert pid(shared) == before


@pytest.mark.parametrize("do", ["count", "power", "text", "list", "grow", "match", "exit"])
def test_what_exceeds_a_limit_costs_the_process_and_has_no_result(shared: LimitedProcess, do: str) -> None:
    before = pid(shared)
    assert shared.ask({"do": do}) is None
    assert pid(shared) != before


def test_one_that_exceeds_is_not_tried_again(shared: LimitedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    pid(shared)
    started: list[LimitedProcess] = []
    monkeypatch.setattr(LimitedProcess, "_start", lambda self: started.append(self))
    assert shared.ask({"do": "count"}) is None
    assert not started


def test_deep_values_and_prints_do_no_harm(shared: LimitedProcess) -> None:
    before = pid(shared)
    assert shared.ask({"do": "deep"}) == "too deep"
    assert shared.ask({"do": "print"}) == "quiet"
    assert shared.ask({"do": "echo", "say": 3}) == 3 and pid(shared) == before


def test_an_exception_is_passed_on(shared: LimitedProcess) -> None:
    before = pid(shared)
    with pytest.raises(RuntimeError, match=r"fakes\.obeying: OSError: no such thing"):
        shared.ask({"do": "raise"})
    assert pid(shared) == before


def test_one_that_waits_is_given_up(shared: LimitedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pid(shared)
    with monkeypatch.context() as patched:
        patched.setattr(limited, "WALL_SECONDS", 0.05)
        assert shared.ask({"do": "wait"}) is None
    assert pid(shared) != before


def test_a_request_whose_process_is_killed_is_tried_again(shared: LimitedProcess, tmp_path: Path) -> None:
    assert shared.ask({"do": "die", "file": str(tmp_path / "died")}) == "again"
    assert shared.ask({"do": "crash"}) is None, "twice is enough"
    assert shared.ask({"do": "echo", "say": 1}) == 1


def test_one_that_ended_between_requests_is_replaced(shared: LimitedProcess) -> None:
    before = pid(shared)
    assert shared.process is not None
    shared.process.kill()
    shared.process.wait()
    assert pid(shared) != before


def test_after_an_interrupt_no_answer_is_another_requests(
    shared: LimitedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(limited.select, "poll", interrupted)
        shared.ask({"do": "echo", "say": "first"})
    assert shared.ask({"do": "echo", "say": "second"}) == "second"


def test_threads_take_turns(shared: LimitedProcess) -> None:
    with ThreadPoolExecutor(8) as executor:
        asked: list[Any] = [{"do": "echo", "say": number} for number in range(100)]
        assert list(executor.map(shared.ask, asked)) == list(range(100))


def test_a_fork_starts_its_own_process(shared: LimitedProcess) -> None:
    before = pid(shared)
    child = os.fork()
    if child == 0:
        other = False
        try:
            other = pid(shared) != before
            end(shared)
        finally:
            os._exit(0 if other else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pid(shared) == before


def test_a_module_that_does_not_work_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"verl_atgrpo\.no_such_module does not work; to see why: .* -m"):
        LimitedProcess("verl_atgrpo.no_such_module").ask({})
