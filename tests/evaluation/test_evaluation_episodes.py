"""Episodes and result file of an evaluation: killed runs, continued and mismatched files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted_policy import Numbered
from waiting import wait_until

from verl_atgrpo import Environment, EnvironmentConfigError, EpisodeFailed, Message, Outcome, Score, stable_hash
from verl_atgrpo.lab.evaluation.episodes import Lineup, pending, play_all, wanted
from verl_atgrpo.lab.evaluation.results import EpisodeKey, EpisodeRow, Failure, ResultFile, read
from verl_atgrpo.play.seeds import episode_seed
from verl_atgrpo.play.types import Generation, PolicyUnusable

SETTINGS = {"recipe": "sums", "sampling": {"temperature": 1.0}}


class Guess(Numbered):
    """Two agents; the first acts up to three times, until the second says yes."""

    agents = ("guesser", "judge")

    async def run(self, task: int, team: Any) -> Outcome:
        for turn in range(3):
            await team.guesser.act(f"{task}, turn {turn}?", score=lambda reply: Score())
        verdict = await team.judge.act(f"{task}!")
        return Outcome(verdict.text.endswith("1"), team_reward=0.5, metrics={"length": len(verdict.text)})


class Dice:
    """A policy whose answers depend on prompt and seed, like a seeded engine's."""

    def __init__(self, wait: float = 0.0) -> None:
        self.wait = wait
        self.now = self.most = self.calls = 0

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return [ord(char) for char in messages[0]["content"]]

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.wait)
        self.now -= 1
        text = f"{stable_hash(seed, prompt_ids) % 1000:b}"
        return Generation([ord(char) for char in text], [], text, truncated=len(text) > 9)


class Stalling(Dice):
    """Hangs after a number of answers."""

    def __init__(self, answers: int) -> None:
        super().__init__(wait=0.001)
        self.answers = answers

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        if self.calls == self.answers:
            await asyncio.Event().wait()
        return await super().generate(decision_id, prompt_ids, seed)


class Unlucky(Dice):
    """Fails the episodes of odd tasks while `broken`."""

    broken = True

    def encode(self, messages: Sequence[Message]) -> list[int]:
        if self.broken and messages[0]["content"].startswith(("1,", "3,")):
            raise EpisodeFailed("prompt_too_long", "much too long")
        return super().encode(messages)


def play(
    path: Path, policy: Any, keys: Sequence[EpisodeKey], environment: Environment | None = None, **options: Any
) -> dict[EpisodeKey, EpisodeRow]:
    with ResultFile(path, SETTINGS, {}) as results:
        lineup = Lineup({"guesser": "dice", "judge": "dice"}, {"guesser": policy, "judge": policy})
        todo = pending(keys, results.rows)
        settings = {"in_flight": 4, "max_failed": 64, **options}
        asyncio.run(play_all(environment or Guess(), lineup, todo, results, **settings))
        return results.rows


def outcomes(rows: dict[EpisodeKey, EpisodeRow]) -> dict[EpisodeKey, Any]:
    return {key: {**vars(row), "seconds": 0} for key, row in rows.items()}


def test_a_row_has_the_episodes_figures(tmp_path: Path) -> None:
    rows = play(tmp_path / "a.jsonl", Dice(), wanted(2, [7], 1))
    row = rows[EpisodeKey(1, 7, 0)]
    assert (row.turns, row.decisions) == (3, 4)
    assert [usage.decisions for usage in row.agents.values()] == [3, 1]
    assert row.agents["guesser"].prompt_tokens == 3 * len("1, turn 0?")
    assert row.agents["judge"].generated_tokens == row.metrics["length"]
    assert (row.team_reward, row.failed) == (0.5, None)
    assert read(tmp_path / "a.jsonl").rows == rows


def test_seeds_are_those_of_validation_in_training() -> None:
    # Pinned to the rollout worker's seeds: a change would change every published figure.
    assert episode_seed(3, "val", "val", 5, 2) == stable_hash(3, "val", "val", 5, 2)
    assert episode_seed(3, "train", 11, 5, 2) == stable_hash(3, "train", 11, 5, 2)
    assert len({episode_seed(3, "train", 11, 5, 2, deal) for deal in range(5)}) == 5


def test_seeds_and_samples_differ_and_are_reproducible(tmp_path: Path) -> None:
    keys = wanted(3, [0, 1], 2)
    assert len(keys) == len(set(keys)) == 12
    first, again = (outcomes(play(tmp_path / name, Dice(), keys)) for name in ("a.jsonl", "b.jsonl"))
    assert first == again
    lengths = {(key.seed, key.sample): row["agents"] for key, row in first.items() if key.task == 0}
    assert len({str(usage) for usage in lengths.values()}) > 1


def test_a_file_grows_with_the_request_and_no_episode_is_played_twice(tmp_path: Path) -> None:
    path, policy = tmp_path / "a.jsonl", Dice()
    play(path, policy, wanted(3, [0], 1))
    assert policy.calls == 3 * 4
    play(path, policy, wanted(3, [0], 2))
    play(path, policy, wanted(4, [0, 1], 2))
    assert policy.calls == 16 * 4
    play(path, policy, wanted(2, [1], 1))
    assert policy.calls == 16 * 4
    assert len(path.read_text().splitlines()) == 17


def test_the_number_of_concurrent_episodes_is_limited(tmp_path: Path) -> None:
    policy = Dice(wait=0.001)
    play(tmp_path / "a.jsonl", policy, wanted(20, [0], 1), in_flight=3)
    assert policy.most == 3


def test_failed_episodes_are_rows_and_are_retried(tmp_path: Path) -> None:
    path, policy = tmp_path / "a.jsonl", Unlucky()
    rows = play(path, policy, wanted(4, [0], 1))
    assert [rows[EpisodeKey(task, 0, 0)].failed for task in (0, 1)] == [
        None,
        Failure("prompt_too_long", "much too long"),
    ]
    assert not rows[EpisodeKey(1, 0, 0)].success
    assert pending(wanted(4, [0], 1), rows) == [EpisodeKey(1, 0, 0), EpisodeKey(3, 0, 0)]
    policy.broken = False
    assert outcomes(play(path, policy, wanted(4, [0], 1))) == outcomes(
        play(tmp_path / "b.jsonl", Dice(), wanted(4, [0], 1))
    )


def test_a_run_with_too_many_failures_stops(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(RuntimeError, match=r"2 episodes .*prompt_too_long.*max_failed_episodes=1"):
        play(path, Unlucky(), wanted(50, [0], 1), max_failed=1)
    assert 2 < len(path.read_text().splitlines()) < 20


class Defective(Guess):
    async def run(self, task: int, team: Any) -> Outcome:
        if task == 2:
            raise KeyError("board")
        return await super().run(task, team)


class Down(Dice):
    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        raise PolicyUnusable("the engine has ended")


def test_a_defect_stops_the_run_and_names_the_episode(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(RuntimeError, match=r"task 2, seed 0, sample 0: KeyError\('board'\)"):
        play(path, Dice(), wanted(9, [0], 1), Defective(), in_flight=1)
    assert [key.task for key in read(path).rows] == [0, 1]


class Untold(Guess):
    """Of a data set with a bad row."""

    def __init__(self, where: str) -> None:
        self.where = where

    def task(self, split: Any, index: int) -> int:
        return index if self.where != "task" or index != 2 else {}["answer"]

    def fingerprint(self, task: int) -> str:
        return str(task) if self.where != "fingerprint" or task != 2 else None  # type: ignore[return-value]


@pytest.mark.parametrize("where", ["task", "fingerprint"])
def test_a_task_that_cannot_be_made_is_named(where: str, tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentConfigError, match=r"^at_grpo\.environment\.name='Untold': task\('val', 2\).* raised"
    ):
        play(tmp_path / "a.jsonl", Dice(), wanted(9, [0], 1), Untold(where), in_flight=1)
    assert [key.task for key in read(tmp_path / "a.jsonl").rows] == [0, 1]


class Unscored(Guess):
    async def run(self, task: int, team: Any) -> Outcome:
        if task == 1:
            await team.guesser.act("?", score=lambda reply: Score(team=float({}[reply])))
        return await super().run(task, team)


def test_a_score_that_raises_fails_its_episode(tmp_path: Path) -> None:
    rows = play(tmp_path / "a.jsonl", Dice(), wanted(3, [0], 1), Unscored())
    failed = {key.task: row.failed for key, row in rows.items() if row.failed}
    assert list(failed) == [1] and failed[1].reason == "score"
    assert "agent 'guesser', turn 0: scoring" in failed[1].message and "KeyError" in failed[1].message


def test_an_unusable_policy_stops_the_run_instead_of_failing_every_episode(tmp_path: Path) -> None:
    with pytest.raises(PolicyUnusable, match="has ended"):
        play(tmp_path / "a.jsonl", Down(), wanted(9, [0], 1))
    assert read(tmp_path / "a.jsonl").rows == {}


# ------------------------------------------------------------ the file


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    play(path, Dice(), wanted(2, [0], 1))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"other settings.*sampling\.temperature was 1\.0, is 0\.0; top was None"):
        ResultFile(path, {"recipe": "sums", "sampling": {"temperature": 0.0}, "top": 1}, {})
    assert path.read_bytes() == before


def test_a_file_without_episodes_takes_other_settings(tmp_path: Path) -> None:
    """The first try named a model that its server does not have."""
    path = tmp_path / "a.jsonl"
    with pytest.raises(PolicyUnusable):
        play(path, Down(), wanted(2, [0], 1))
    with ResultFile(path, {"recipe": "other"}, {"data_sets": {"walk": 2}}) as results:
        results.add(EpisodeRow(0, "", 0, 0, True, 1.0, {}, 1, 1, {}, None, 0.0))
    again = read(path)
    assert (again.settings, len(again.rows), again.data_sets) == ({"recipe": "other"}, 1, {"walk": 2})


@pytest.mark.parametrize("content", ["my notes", '{"format": "something else"}\n', "\n"])
def test_other_files_are_not_changed(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not a result file"):
        ResultFile(path, SETTINGS, {})
    assert path.read_text() == content


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with (
        ResultFile(tmp_path / "a.jsonl", SETTINGS, {}),
        pytest.raises(BlockingIOError, match="another evaluation writes"),
    ):
        ResultFile(tmp_path / "a.jsonl", SETTINGS, {})


def test_a_file_truncated_anywhere_is_continued(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    rows = outcomes(play(whole, Dice(), wanted(3, [0], 1)))
    content = whole.read_bytes()
    ends = [at for at, byte in enumerate(content) if byte == ord("\n")]
    for length in {*range(0, len(content), 61), *ends, *(end - 1 for end in ends), *(end + 1 for end in ends)}:
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(content[:length])
        # A last line counts without its newline, too: `length` is then one less than where a line ends.
        complete = content[: length + 1].count(b"\n")
        assert len(read(cut).rows) == max(0, complete - 1)
        assert outcomes(play(cut, Dice(), wanted(3, [0], 1))) == rows
        assert len(cut.read_text().splitlines()) == 4


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    play(path, Dice(), wanted(3, [0], 1))
    lines = path.read_text().splitlines()
    for broken in ('{"task": 1', "[]", json.dumps({**json.loads(lines[2]), "agents": None}), "{}"):
        path.write_text("\n".join([*lines[:2], broken, lines[3], ""]))
        with pytest.raises(ValueError, match=r"a\.jsonl:3: not (JSON|an episode)"):
            read(path)


SCRIPT = """
import sys
from pathlib import Path
from test_evaluation_episodes import Stalling, play, wanted
play(Path(sys.argv[1]), Stalling(int(sys.argv[2])), wanted(40, [0, 1], 2))
"""


def test_a_killed_run_continues_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for lines in (20, 60):
        # Of 52 episodes with four decisions each, the four in flight at the end may be incomplete.
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path), str(48 * 4 + 16)], env=environment)
        wait_until(
            lambda n=lines: path.exists() and path.read_bytes().count(b"\n") > n, lambda p=process: not p.poll()
        )
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    written = read(path).rows
    assert 60 <= len(written) < 160
    continued = play(path, Dice(), wanted(40, [0, 1], 2))
    assert {key: continued[key] for key in written} == written
    assert outcomes(continued) == outcomes(play(tmp_path / "whole.jsonl", Dice(), wanted(40, [0, 1], 2)))
    assert len(path.read_text().splitlines()) == 161
