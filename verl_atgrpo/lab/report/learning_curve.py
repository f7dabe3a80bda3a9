"""Validation success over a run, from the metrics of verl's `file` logger."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, TypeAdapter

from verl_atgrpo.files import FileError, Number, Whole, lines, parse

LEARNT = 0.95
"""Success of a team that has learnt a game: the summary says when it was reached."""
_SECONDS, _TOKENS = "timing_s/step", "rollout/tokens"
SUCCESS = re.compile(r"val-core/(.*)/acc/mean@.*", re.DOTALL)
_USED = re.compile(rf"{_SECONDS}|{_TOKENS}|{SUCCESS.pattern}", re.DOTALL)


def _used(data: Any) -> Any:
    """Returns only the metrics of a curve: of the others a long run has hundreds at every step."""
    return {name: data[name] for name in data if _USED.fullmatch(name)} if isinstance(data, dict) else data


class _Line(BaseModel):
    step: Whole
    data: Annotated[dict[str, Number | None], BeforeValidator(_used)]
    """verl writes null for a number that is not finite."""


_LINE = TypeAdapter(_Line)


@dataclass(frozen=True)
class Point:
    """One validation."""

    step: int
    seconds: float
    """Training time so far: rollout, updates and weight syncs; without start-up and validation."""
    tokens: float
    """Tokens generated in training so far, of all candidates."""
    success: float
    """Mean over the data sets, or over a mixture's parts."""
    each: dict[str, float] = field(default_factory=dict)
    """Success of each."""


def read(metrics: Path) -> list[Point]:
    """Returns the validations of a run, in order, from a JSONL file or a folder of them.

    A resumed run writes a new file, whose steps replace those that the interrupted run did after its last checkpoint;
    one that trained nothing, but validated a checkpoint, replaces none. Read line by line: a million lines take a
    quarter of a minute. Raises FileError if there are no validations, or a line is no line of metrics; OSError if a
    file cannot be read.
    """
    files = sorted(metrics.glob("*.jsonl"), key=_natural) if metrics.is_dir() else [metrics]
    steps: dict[int, dict[str, float]] = {}
    for file in files:
        made: dict[int, dict[str, float]] = {}
        for number, line in lines(file):
            row = parse(line, _LINE, "a line of verl's metrics", file, number)
            made.setdefault(row.step, {}).update(
                {name: value for name, value in row.data.items() if value is not None}
            )
        if any(_SECONDS in known for known in made.values()):
            first = next(iter(made))
            # A resumed run may begin with a validation of the step that it resumes from.
            last = first - (_SECONDS in made[first])
            steps = {step: data for step, data in steps.items() if step <= last}
            for step, known in made.items():
                steps.setdefault(step, {}).update(known)
        else:
            steps = made | steps
    points, seconds, tokens = [], 0.0, 0.0
    for step, data in sorted(steps.items()):
        seconds += data.get(_SECONDS, 0.0)
        tokens += data.get(_TOKENS, 0.0)
        each = {found[1]: value for name, value in data.items() if (found := SUCCESS.fullmatch(name))}
        if each:
            points.append(Point(step, seconds, tokens, sum(each.values()) / len(each), each))
    if not points:
        if not files:
            raise FileError(f"{metrics} has no metrics: name `file` in trainer.logger, as in [console,file]")
        raise FileError(f"{metrics} has no validation; set trainer.val_before_train=true and trainer.test_freq")
    return points


def _natural(file: Path) -> list[str | int]:
    """Sorts `metrics.jsonl` before `metrics-2.jsonl`, and that before `metrics-10.jsonl`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file.stem)]
