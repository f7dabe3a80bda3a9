"""A run's recorded episodes as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from verl_atgrpo.lab.report import counted
from verl_atgrpo.lab.report.records import Run, find, read
from verl_atgrpo.train.trainer.record_files import TRAIN, VAL

_MARKS = re.compile(r"<\|[^|<>]*\|>")
"""Special tokens of chat templates, such as `<|im_end|>`."""


def transcript(run: Path, steps: Sequence[int] | None, tasks: int, train: bool) -> str:
    """Returns recorded episodes in words: of each decision what its prompt ends with, and the committed answer.

    Args:
        run: the run's folder, as for a report.
        steps: which steps; the first and the last recorded one if None.
        tasks: how many tasks of each step, one episode of each.
        train: episodes of training instead of validation.

    Raises ValueError if there are no such records.
    """
    if tasks < 1:
        raise ValueError(f"--tasks {tasks}: at least 1")
    records = read(find(run))
    split = TRAIN if train else VAL
    recorded = sorted({step for kind, step, _, _ in records.episodes if kind == split})
    if not recorded:
        raise ValueError(f"{run}: no episodes of {split} are recorded; see at_grpo.record.{split}_tasks")
    chosen = sorted({recorded[0], recorded[-1]}) if steps is None else steps
    for step in chosen:
        if step not in recorded:
            raise ValueError(f"--steps {step}: recorded are {', '.join(map(str, recorded))}")
    template = _template(records)
    return "\n\n".join(
        _episode(step, task, records.episodes[split, step, task, episode], *template)
        for step in chosen
        for task, episode in _first_episodes(records, split, step)[:tasks]
    )


def _first_episodes(records: Run, split: str, step: int) -> list[tuple[int, int]]:
    """Returns the tasks of a step, each with the number of its first recorded episode."""
    first: dict[int, int] = {}
    for _, _, task, episode in sorted(key for key in records.episodes if key[:2] == (split, step)):
        first.setdefault(task, episode)
    return list(first.items())


def _template(records: Run) -> tuple[str, str]:
    """Returns the whole lines that all prompts of a run begin and end with: the system message, the answer's start."""
    prompts: list[str] = [row["prompt"] for rows in records.episodes.values() for row in rows if "prompt" in row]
    if len({*prompts}) < 2:
        return "", ""
    prefix = commonprefix(prompts)  # noqa: RUF071  (of characters)
    suffix = commonprefix([prompt[::-1] for prompt in prompts])[::-1]  # noqa: RUF071
    return prefix[: prefix.rfind("\n") + 1], suffix[suffix.find("\n") :] if "\n" in suffix else ""


def _episode(step: int, task: int, rows: Sequence[Mapping[str, Any]], prefix: str, suffix: str) -> str:
    if rows[0].get("failed"):
        return f"Step {step}, task {task}: failed"
    solved = "solved" if rows[0]["success"] else "not solved"
    rows = [row for row in rows if not row.get("scope")]  # not those of scores and of other continuations
    lines = [f"Step {step}, task {task}: {solved} after {counted(len(rows), 'decision')}"]
    for row in rows:
        prompt = " ".join(_MARKS.sub(" ", row["prompt"].removeprefix(prefix).removesuffix(suffix)).split())
        answer = " ".join(row["candidates"][row["committed"]]["text"].split())
        lines += [f"  {row['agent']} <- {prompt}", f"  {row['agent']} -> {answer}"]
    return "\n".join(lines)
