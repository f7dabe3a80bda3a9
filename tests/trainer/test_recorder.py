"""Decision records from the rows of the queue."""

from __future__ import annotations

import json
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
tq = pytest.importorskip("transfer_queue")

import torch
import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)
from fakes.local_queue import LocalQueue
from tensordict import TensorDict

from verl_atgrpo import Candidate, Outcome, Score
from verl_atgrpo.lab.report.records import read
from verl_atgrpo.play.branching import NONE_COMMITTED
from verl_atgrpo.play.types import Decision, EpisodeRecord, Generation
from verl_atgrpo.train.config.schema import RecordSettings
from verl_atgrpo.train.rollout.episode_rows import (
    Row,
    failed_validation_row,
    training_rows,
    untrained_rows,
    validation_rows,
)
from verl_atgrpo.train.rows import batch as batches
from verl_atgrpo.train.rows import queue as trainer_queue
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.trainer import checkpoints
from verl_atgrpo.train.trainer import trainer as trainer_module
from verl_atgrpo.train.trainer.record_files import FORMAT, RecordFiles
from verl_atgrpo.train.trainer.recorder import Recorder, SampledRow, decisions, selected_rows
from verl_atgrpo.train.trainer.trainer import AtGrpoTrainer


class Letters:
    """A tokenizer of upper- or lower-case letters, whose special tokens are angle brackets (60, 62)."""

    def __init__(self, upper: bool = False) -> None:
        self._upper = upper

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text = "".join(chr(token) for token in ids if not (skip_special_tokens and token in (60, 62)))
        return text.upper() if self._upper else text


VERSION = {"min_global_steps": 3, "max_global_steps": 4}
TOKENIZERS = {"one": Letters(), "two": Letters(upper=True)}


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def turn_of(agent: str, turn: int, policy: str, *texts: str, committed: int = 0) -> Decision:
    answers = [
        Candidate(
            Generation(codes(text), [0.0] * len(text), text, truncated=number == 1), Score(number, 0.5), number + 0.5
        )
        for number, text in enumerate(texts)
    ]
    return Decision(agent, turn, policy, codes(f"<{agent}{turn}>"), tuple(answers), committed)


EPISODE = EpisodeRecord(
    [
        turn_of("b", 0, "two", "x", "yy", committed=1),
        turn_of("a", 0, "one", "<zzz>", "w"),
        turn_of("b", 1, "two", "v", "u"),
    ],
    Outcome(True, 0.75),
)


def sampled(row: Row, advantage: float | None, task: int = 5) -> SampledRow:
    tags = {**row.tags, "task": task, "whole": True, **VERSION}
    return SampledRow(row.key, tags, row.prompt_ids, row.generation.token_ids, advantage)


def rows_of(task: int, uid: str, session: int = 0, scheme: str = "tree") -> list[SampledRow]:
    make = validation_rows(uid, session, EPISODE) if scheme == "val" else training_rows(uid, session, EPISODE, scheme)
    return [sampled(row, 0.1 * number, task) for number, row in enumerate(make)]


def read_back(records: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """Writes records to a file; returns the episodes that are read from it."""
    lines = [{"format": FORMAT, "from_step": 0, "about": {}}, *records]
    (folder / "train-0001-0000.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [*read(folder).episodes.values()]


def test_decisions_in_their_order_with_their_tokenizer_and_the_committed_one(tmp_path: Path) -> None:
    rows = rows_of(5, "uid")
    found = decisions(list(reversed(rows)), "train", 3, TOKENIZERS)
    assert [(row["agent"], row["turn"], row["decision"]) for row in found] == [("b", 0, 0), ("a", 0, 2), ("b", 1, 4)]
    assert [row["prompt"] for row in found] == ["<B0>", "<a0>", "<B1>"]
    assert [[one["text"] for one in row["candidates"]] for row in found] == [["X", "YY"], ["zzz", "w"], ["V", "U"]]
    assert [row["committed"] for row in found] == [1, 0, 0]
    assert found[0]["candidates"][1] == {
        "text": "YY", "tokens": 2, "team": 1, "local": 0.5, "reward": 1.5, "advantage": 0.1, "truncated": True,
        "version": [3, 4],
    }  # fmt: skip
    rows[0].tags["critic_score"] = -0.25
    (shown,) = read_back(decisions(rows, "train", 3, TOKENIZERS), tmp_path)
    assert [one.get("critic") for row in shown for one in row["candidates"]] == [-0.25, *[None] * 5]
    for row in found:
        assert (row["step"], row["split"], row["task"], row["episode"]) == (3, "train", 5, 0)
        assert (row["success"], row["episode_reward"], row["prompt_tokens"]) == (True, 0.75, 4)


def test_decisions_of_scores_and_of_continuations_are_decisions_of_their_own() -> None:
    turns = [turn_of("b", 0, "two", "x", "y"), turn_of("b", 0, "two", "v", "w")]
    nested = [replace(turn, scope=f"a.0.{number}/") for number, turn in enumerate(turns)]
    episode = EpisodeRecord([*nested, turn_of("a", 0, "one", "z", "u")], Outcome(True, 1.0))
    rows = [sampled(row, 0.0) for row in training_rows("uid", 0, episode, "tree")]
    found = decisions(rows, "train", 1, TOKENIZERS)
    assert [(row["scope"], row["agent"], len(row["candidates"])) for row in found] == [
        ("a.0.0/", "b", 2),
        ("a.0.1/", "b", 2),
        ("", "a", 2),
    ]


def test_drafts_and_what_a_random_branch_started_from_are_beside_the_candidates(tmp_path: Path) -> None:
    own = replace(turn_of("a", 0, "one", "own"), trained=False)
    draft = replace(turn_of("b", 0, "two", "x", "y", "z", committed=1), trained=False)
    episode = EpisodeRecord(
        [draft, turn_of("a", 0, "one", "u", "v", committed=NONE_COMMITTED), own], Outcome(True, 0.75)
    )
    made = [*training_rows("uid", 0, episode, "branch"), *untrained_rows("uid", 0, episode, "branch")]
    rows = [sampled(row, 0.1 if row.tags.get("trained", True) else None) for row in made]
    found = decisions(rows, "train", 3, TOKENIZERS)
    assert read_back(found, tmp_path) == [found]
    shown = [
        (row["agent"], row["committed"], [(one["text"], one["reward"], one["advantage"]) for one in row["candidates"]])
        for row in found
    ]
    assert shown == [
        ("b", 1, [("X", 0.75, None), ("Y", 0.75, None), ("Z", 0.75, None)]),
        ("a", 2, [("u", 0.5, 0.1), ("v", 1.5, 0.1), ("own", 0.75, None)]),
    ]


def test_what_is_recorded_is_read_back_whole(tmp_path: Path) -> None:
    made = decisions(rows_of(5, "uid"), "train", 3, TOKENIZERS)
    assert read_back(made, tmp_path) == [made]


def test_episodes_of_a_task_are_numbered() -> None:
    rows = rows_of(5, "uid", 1, "parallel") + rows_of(5, "uid", 0, "parallel") + rows_of(6, "other", 0, "parallel")
    found = decisions(rows, "train", 1, TOKENIZERS)
    assert [(row["task"], row["episode"]) for row in found] == [(5, 0)] * 3 + [(5, 1)] * 3 + [(6, 0)] * 3
    # In the parallel scheme the reward of every row is the outcome.
    assert {one["reward"] for row in found for one in row["candidates"]} == {0.75}


def test_a_task_submitted_twice_in_a_step_is_two_episodes() -> None:
    found = decisions(rows_of(5, "first") + rows_of(5, "second"), "train", 1, TOKENIZERS)
    assert [row["episode"] for row in found] == [0] * 3 + [1] * 3
    assert {len(row["candidates"]) for row in found} == {2}


def test_validation_rows_have_scores_and_one_candidate() -> None:
    first, *_ = decisions(rows_of(2, "uid", scheme="val"), "val", 0, TOKENIZERS)
    assert first["committed"] == 0
    assert [(one["text"], one["reward"]) for one in first["candidates"]] == [("YY", 1.5)]
    assert (first["success"], first["episode_reward"]) == (True, 0.75)


def test_a_failed_validation_episode_is_recorded() -> None:
    row = failed_validation_row("uid", 0, "one", 9)
    failed = SampledRow(row.key, {**row.tags, "task": 3}, row.prompt_ids, [9], None)
    (found,) = decisions([failed], "val", 4, TOKENIZERS)
    assert found["failed"] is True
    assert (found["success"], found["episode_reward"], found["task"]) == (False, 0.0, 3)
    assert "candidates" not in found


def test_which_tasks_are_recorded() -> None:
    tags: list[dict[str, Any]] = [{"task": task, "whole": True} for task in (9, 30, 2, 9, 17, 2, 0)]
    settings = RecordSettings(train_tasks=3, val_tasks=3)
    assert selected_rows(tags, "train", settings) == [0, 2, 3, 5, 6]
    # Task 2 failed, say, and task 1 took its place: of a task that was not to be recorded some rows are missing.
    unmarked = {"task": 1, "whole": False}
    assert selected_rows([*tags[:2], unmarked, *tags[3:]], "train", settings) == [0, 3, 5, 6]
    # Validation has several batches, and records the same tasks every time.
    assert selected_rows(tags, "val", settings) == [2, 5, 6]
    assert selected_rows(tags[:2], "val", settings) == []
    assert selected_rows(tags, "train", RecordSettings(train_tasks=0)) == []


def test_advantages_are_read_for_trained_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(1, "seen") + rows_of(2, "unseen")
    trained = {row.key for row in rows if row.tags["policy"] == "two"}
    queue = LocalQueue()
    for row in rows:
        fields = {"prompts": torch.tensor(row.prompt_ids), "responses": torch.tensor(row.response_ids)}
        if row.key in trained:
            row.tags["advantage"] = row.advantage
        queue.kv_put(row.key, "train", TensorDict(fields).unsqueeze(0), row.tags)
    monkeypatch.setattr(batches, "tq", queue)
    files = RecordFiles(tmp_path, 1, 0, {})
    recording = Recorder(RecordSettings(train_tasks=1), files, TOKENIZERS, lambda work, *given: work(*given))
    recording.record(7, Batch([row.key for row in rows], [row.tags for row in rows]))
    (found,) = read(tmp_path).episodes.values()
    advantages = {row["agent"] + str(row["turn"]): [one["advantage"] for one in row["candidates"]] for row in found}
    assert advantages == {"b0": pytest.approx([0.0, 0.1]), "a0": [None, None], "b1": pytest.approx([0.4, 0.5])}
    assert recording.take_seconds() > 0
    assert recording.take_seconds() == 0


def test_the_trainer_adds_the_records_to_verls_logger_and_raises_errors_of_background_work() -> None:
    trainer: Any = AtGrpoTrainer.__new__(AtGrpoTrainer)
    trainer.recorder = object()
    trainer.logger = SimpleNamespace(logger={"console": 1})
    assert trainer.logger.logger == {"console": 1, "record": trainer.recorder}
    trainer.recorder = None
    trainer.logger = SimpleNamespace(logger={"console": 1})
    assert trainer.logger.logger == {"console": 1}

    broken: Future[None] = Future()
    broken.set_exception(RuntimeError("a defect of ours"))
    trainer._dump_futures = [broken]
    with ThreadPoolExecutor() as trainer._dump_executor:
        with pytest.raises(RuntimeError, match="a defect of ours"):
            trainer.in_background(print)
        trainer._dump_futures = []
        trainer.in_background(dict)
    assert [future.result() for future in trainer._dump_futures] == [{}]


def test_a_step_is_recorded_before_its_checkpoint_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM after the save would leave a step to resume from that no record knows."""
    happened: list[Any] = []
    trainer: Any = AtGrpoTrainer.__new__(AtGrpoTrainer)
    trainer.recorder = SimpleNamespace(log=lambda data, step: happened.append((data, step)))
    executor, told = ThreadPoolExecutor(1), threading.Event()
    row = executor.submit(lambda: told.wait() and happened.append("row"))
    trainer._dump_futures, trainer._tags, trainer._sampled = [row], [], {"team/rows": 4.0}
    trainer.global_steps, trainer._unfinished, trainer.units = 3, deque(), []
    trainer._spec, trainer._baselines = None, SimpleNamespace(state=dict)
    trainer.config = SimpleNamespace(trainer=None, data=SimpleNamespace(shuffle=True))
    trainer.train_dataloader, trainer.train_dataset = SimpleNamespace(state_dict=dict), []
    trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **_: happened.append("callback"))
    monkeypatch.setattr(trainer_queue, "unfinished_tasks", list)
    monkeypatch.setattr(trainer_module, "step_metrics", lambda tags, signal: {"team/success": 0.5})
    monkeypatch.setattr(trainer_module, "rows_with_signal", lambda *_: [])
    monkeypatch.setattr(checkpoints, "save", lambda *_: happened.append("saved") or "folder")
    threading.Timer(0, told.set).start()
    trainer._save_checkpoint()
    executor.shutdown()
    assert happened == ["row", ({"team/rows": 4.0, "team/success": 0.5}, 3), "saved", "callback"]
    trainer.recorder = None
    trainer._save_checkpoint()
    assert happened[4:] == ["saved", "callback"]
