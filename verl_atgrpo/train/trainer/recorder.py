"""Writes the report's records from a step's rows in the queue."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo.train.config.run_check import without_secrets
from verl_atgrpo.train.config.schema import COMMAND, SECTION, RecordSettings
from verl_atgrpo.train.rollout.episode_rows import WHOLE
from verl_atgrpo.train.rows.batch import VALIDATION, Batch, Tags
from verl_atgrpo.train.trainer.record_files import METRICS, TRAIN, VAL, RecordFiles, metrics_row, plain

if TYPE_CHECKING:
    from verl_atgrpo.train.trainer.policy_unit import PolicyUnit


def about_run(config: DictConfig, units: Sequence[PolicyUnit]) -> dict[str, Any]:
    """Returns the description of the run in the first line of every record file."""
    return {
        "project": config.trainer.project_name,
        "experiment": config.trainer.experiment_name,
        "command": config.get(COMMAND, ""),
        "section": without_secrets(OmegaConf.to_container(config[SECTION], resolve=True)),
        "models": {unit.name: unit.config.actor_rollout_ref.model.path for unit in units},
        "frozen": [unit.name for unit in units if not unit.trainable],
    }


@dataclass(frozen=True)
class SampledRow:
    """A row copied from the queue for the records."""

    key: str
    tags: Tags
    prompt_ids: list[int]
    response_ids: list[int]
    advantage: float | str | None
    """As used by the update; None for a row that was not trained on."""


def selected_rows(tags: Sequence[Tags], split: str, settings: RecordSettings) -> list[int]:
    """Returns the indices of the rows to record: all rows of the tasks with the lowest numbers.

    In training of those with all of their rows: of other tasks, those that are not trained on were not written.
    """
    if split == VAL:
        return [index for index, row in enumerate(tags) if row["task"] < settings.val_tasks]
    lacking = {row["task"] for row in tags if not row[WHOLE]}
    tasks = set(sorted({row["task"] for row in tags} - lacking)[: settings.train_tasks])
    return [index for index, row in enumerate(tags) if row["task"] in tasks]


def decisions(
    rows: Sequence[SampledRow], split: str, step: int, tokenizers: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the records of the rows of whole episodes, in any order: one per decision, or for a failed episode."""
    by_decision: dict[tuple[Any, ...], list[tuple[int, SampledRow]]] = defaultdict(list)
    episodes: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for row in rows:
        uid, session, index = row.key.rsplit("_", 2)
        episode = uid, int(session)
        episodes[row.tags["task"]].add(episode)
        decision = (row.tags.get("scope"), row.tags.get("agent"), row.tags.get("turn"))
        by_decision[(*episode, *decision)].append((int(index), row))
    numbers = {episode: number for of_task in episodes.values() for number, episode in enumerate(sorted(of_task))}
    records = []
    for (uid, session, *_), unordered in by_decision.items():
        first, mine = min(unordered)[0], [row for _, row in sorted(unordered, key=lambda pair: pair[0])]
        tags = mine[0].tags
        record = {
            "step": step,
            "split": split,
            "task": tags["task"],
            "episode": numbers[uid, session],
            "decision": first,
            "success": tags["episode_success"],
            "episode_reward": tags["episode_reward"],
        }
        records.append({**record, "failed": True} if tags.get("failed") else {**record, **_decision(mine, tokenizers)})
    return sorted(records, key=lambda record: (record["task"], record["episode"], record["decision"]))


def _decision(rows: Sequence[SampledRow], tokenizers: Mapping[str, Any]) -> dict[str, Any]:
    tags = rows[0].tags
    tokenizer = tokenizers[tags["policy"]]
    return {
        "agent": tags["agent"],
        "turn": tags["turn"],
        "scope": tags["scope"],
        "policy": tags["policy"],
        "prompt": tokenizer.decode(rows[0].prompt_ids, skip_special_tokens=False),
        "prompt_tokens": len(rows[0].prompt_ids),
        "committed": next(number for number, row in enumerate(rows) if row.tags["committed"]),
        "candidates": [
            {
                # As the environment sees it.
                "text": tokenizer.decode(row.response_ids, skip_special_tokens=True),
                "tokens": len(row.response_ids),
                "team": row.tags["team_reward"],
                "local": row.tags["local_reward"],
                "reward": row.tags["reward"],
                "advantage": row.advantage,
                "truncated": row.tags["truncated"],
                **({"critic": row.tags["critic_score"]} if "critic_score" in row.tags else {}),
                "version": [row.tags["min_global_steps"], row.tags["max_global_steps"]],
            }
            for row in rows
        ],
    }


class Recorder:
    """Writes a run's records; also one of verl's loggers (`log`)."""

    def __init__(
        self,
        settings: RecordSettings,
        files: RecordFiles,
        tokenizers: Mapping[str, Any],
        in_background: Callable[..., None],
    ) -> None:
        """Takes each policy's tokenizer, and what runs a function with arguments without blocking the training."""
        self._settings, self._files = settings, files
        self._tokenizers, self._in_background = tokenizers, in_background
        self._seconds = 0.0
        self.validated: list[dict[str, Any]] = []
        """The records of the last validation, complete once the background work is done."""

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Returns the seconds for which the records have blocked the training since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Writes a step's metrics (interface of verl's loggers)."""
        with self._timed():
            self._files.append(METRICS, [metrics_row(step, time.time(), data)])

    def record(self, step: int, batch: Batch) -> None:
        """Fetches selected episodes of a batch from the queue, then decodes and writes them in the background."""
        with self._timed():
            split = VAL if batch.partition_id == VALIDATION else TRAIN
            rows = _fetch(batch.take(selected_rows(batch.tags, split, self._settings)))
            if rows:
                self._in_background(self._write, split, step, rows)

    def _write(self, split: str, step: int, rows: Sequence[SampledRow]) -> None:
        made = decisions(rows, split, step, self._tokenizers)
        self._files.append(split, made)
        if split == VAL:  # which may have several batches
            self.validated = [one for one in self.validated if one["step"] == step] + made


def _fetch(batch: Batch) -> list[SampledRow]:
    if not batch:
        return []
    data = batch.fetch("prompts", "responses")
    prompts, responses = ([ids.tolist() for ids in data[field].unbind()] for field in ("prompts", "responses"))
    advantages = [plain(tags["advantage"]) if "advantage" in tags else None for tags in batch.tags]
    return list(map(SampledRow, batch.keys, batch.tags, prompts, responses, advantages))
