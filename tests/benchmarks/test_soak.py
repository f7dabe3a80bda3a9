"""A short soak run, and the violations that its ledger detects."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
import soak
import torch
from soak_ledger import Ledger
from verl.workers.rollout.replica import TokenOutput
from waiting import HANG

# Random in a short run.
BY_CHANCE = ("memory", "sandbox processes killed", "programs run again", "restarts of the sandbox")


@pytest.mark.slow
@pytest.mark.parametrize("branches", [False, True])
def test_a_short_run_with_all_faults(branches: bool) -> None:
    lines = soak.soak(steps=20, minutes=HANG / 60, seed=1, timeout=0.5, branches=branches)
    assert [line for line in lines if not line[2] and line[0].partition(":")[0] not in BY_CHANCE] == []
    assert dict((name, figure) for name, figure, _ in lines)["steps"].startswith("20 of 20 in")


# ------------------------------------------------------------------ the ledger


def tags(reward: float, group: str = "g") -> dict[str, Any]:
    return {"policy": "p", "group": group, "reward": reward, "response_len": 1}


def played(ledger: Ledger, task: int = 1, scored: int = 2) -> int:
    """Records an episode of one decision."""
    episode = ledger.begin(task)
    for _ in range(scored):
        ledger.delivered(episode, 0, TokenOutput(token_ids=[1], stop_reason="completed"))
        ledger.scored(episode)
    ledger.end(episode)
    return episode


def put(ledger: Ledger, episode: int, rows: dict[str, dict[str, Any]]) -> None:
    prompt = torch.tensor([ord(char) for char in f"episode {episode},\n"])
    ledger.put(list(rows), {"prompts": prompt.repeat(len(rows), 1)}, list(rows.values()))


def settled(ledger: Ledger, left: int = 0) -> set[str]:
    ledger.settle({"policy/p/rows": 0}, left)
    return {name for name, number in ledger.wrong.items() if number}


ROWS = {"u_0_0": tags(0.0), "u_0_1": tags(1.0)}


def test_rows_that_are_trained_once_or_have_no_signal_are_right() -> None:
    ledger = Ledger()
    put(ledger, played(ledger), ROWS)
    put(ledger, played(ledger, 2), {"v_0_0": tags(1.0, "h"), "v_0_1": tags(1.0, "h")})
    ledger.train("p", ROWS.items())
    assert settled(ledger) == set()
    assert (ledger.count["rows trained"], ledger.count["rows dropped"], ledger.count["episodes ended"]) == (2, 2, 2)


@pytest.mark.parametrize(
    ("trained", "wrong"),
    [
        (["u_0_0"], {"rows lost: neither trained nor without signal"}),
        (["u_0_0", "u_0_1", "u_0_1"], {"rows trained twice"}),
        (["u_0_0", "u_0_1", "x_0_0"], {"rows trained that were not written"}),
    ],
)
def test_a_row_that_is_lost_or_trained_twice_is_detected(trained: list[str], wrong: set[str]) -> None:
    ledger = Ledger()
    put(ledger, played(ledger), ROWS)
    ledger.train("p", [(key, ROWS.get(key, tags(0.0))) for key in trained])
    assert settled(ledger) == wrong


def test_a_candidate_without_a_row_a_key_left_and_a_lost_score_are_detected() -> None:
    ledger = Ledger()
    put(ledger, played(ledger, scored=3), ROWS)
    ledger.train("p", ROWS.items())
    ledger.judge(False)
    assert settled(ledger, left=1) == {
        "candidates without a row",
        "tokens lost on the way into rows",
        "keys left in the queue",
        "scores lost in the sandbox",
    }


def test_a_failed_episode_leaves_no_row_and_fails_for_a_reason() -> None:
    ledger = Ledger()
    episode = ledger.begin(1)
    ledger.delivered(episode, 0, ray.exceptions.RayActorError())
    ledger.fail(episode, "engine")
    assert settled(ledger) == set()
    unexplained = ledger.begin(2)
    ledger.fail(unexplained, "engine")
    put(ledger, unexplained, ROWS)
    ledger.train("p", ROWS.items())
    assert settled(ledger) == {"failures without a fault", "rows of failed episodes"}


def test_a_task_is_played_again_for_its_branches_alone() -> None:
    for branched, wrong in (None, {"tasks played twice in a step"}), ((4, 2), set()):
        ledger = Ledger(branched)
        put(ledger, played(ledger), {})
        put(ledger, played(ledger), ROWS)
        ledger.train("p", ROWS.items())
        wrong = wrong | ({"candidates without a row", "tokens lost on the way into rows"} if wrong else set())
        assert settled(ledger) == wrong
        assert ledger.count["episodes ended"] == 1


def test_a_sample_or_a_row_too_few_in_a_tree_of_branches_is_detected() -> None:
    ledger = Ledger((3, 3))
    put(ledger, played(ledger), ROWS)
    put(ledger, played(ledger, 2, scored=3), {})  # a branch failed, so there are no rows
    ledger.train("p", ROWS.items())
    assert settled(ledger) == {"samples of branches, more or fewer", "rows of branches, more or fewer"}
    assert (ledger.count["episodes ended"], ledger.count["episodes failed"]) == (1, 1)


def test_metrics_are_compared_with_the_ledger() -> None:
    ledger = Ledger()
    put(ledger, played(ledger), ROWS)
    ledger.train("p", ROWS.items())
    ledger.settle({"policy/p/rows": 2, "team/episodes": 2, "team/tasks": 1}, 0)
    differing = {name for name, product, here in ledger.totals(2) if product != here}
    assert differing == {"episodes"}


def test_child_processes_are_found() -> None:
    with subprocess.Popen(["sleep", "infinity"]) as child:
        assert child.pid in soak.children_of(os.getpid())
        child.kill()
    assert child.pid not in soak.children_of(os.getpid())
