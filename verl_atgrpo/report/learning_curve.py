"""Validation success over a run, from the metrics of verl's `file` logger."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, TypeAdapter

from verl_atgrpo.files import FileError, Number, Whole, lines, parse, replacing

AXES = {"seconds": "minutes of training", "tokens": "tokens generated (thousands)", "steps": "training steps"}
LEARNT = 0.95
"""Success of a team that has learnt a game: a line in plots, and what the summary says when it was reached."""
_SECONDS, _TOKENS = "timing_s/step", "rollout/tokens"
_SUCCESS = re.compile(r"val-core/.*/acc/mean@.*", re.DOTALL)


def _used(data: Any) -> Any:
    """Returns only the metrics of a curve: of the others a long run has hundreds at every step."""
    if not isinstance(data, dict):
        return data
    return {
        name: value
        for name, value in data.items()
        if name in (_SECONDS, _TOKENS) or (name[:9] == "val-core/" and _SUCCESS.fullmatch(name))
    }


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

    def along(self, axis: str) -> float:
        """Returns the value on a plot's axis, in the axis' unit."""
        return {"seconds": self.seconds / 60, "tokens": self.tokens / 1000, "steps": float(self.step)}[axis]


def read(metrics: Path) -> list[Point]:
    """Returns the validations of a run, in order.

    Args:
        metrics: a JSONL file or a folder of them: a resumed run writes a new file, whose steps replace those that the
            interrupted run did after its last checkpoint. Read line by line: a million lines take a quarter of a
            minute.

    Raises:
        FileError: there are no validations, or a line is no line of metrics.
        OSError: a file cannot be read.
    """
    files = sorted(metrics.glob("*.jsonl"), key=_natural) if metrics.is_dir() else [metrics]
    steps: dict[int, dict[str, float]] = {}
    for file in files:
        for number, line in lines(file):
            row = parse(line, _LINE, "a line of verl's metrics", file, number)
            known = {name: value for name, value in row.data.items() if value is not None}
            if number == 1:
                # A resumed run may begin with a validation of the step that it resumes from.
                last = row.step - (_SECONDS in known)
                steps = {step: data for step, data in steps.items() if step <= last}
            if known:
                steps.setdefault(row.step, {}).update(known)
    points, seconds, tokens = [], 0.0, 0.0
    for step, data in sorted(steps.items()):
        seconds += data.get(_SECONDS, 0.0)
        tokens += data.get(_TOKENS, 0.0)
        successes = [value for name, value in data.items() if _SUCCESS.fullmatch(name)]
        if successes:  # mean over data sets
            points.append(Point(step, seconds, tokens, sum(successes) / len(successes)))
    if not points:
        raise FileError(f"{metrics} has no validation; set trainer.val_before_train=true and trainer.test_freq")
    return points


def _natural(file: Path) -> list[str | int]:
    """Sorts `metrics.jsonl` before `metrics-2.jsonl`, and that before `metrics-10.jsonl`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file.stem)]


def draw(runs: Sequence[tuple[str, Path]], out: Path, axis: str = "seconds") -> None:
    """Draws validation success against `axis` for (label, metrics) pairs into the PNG `out`.

    Raises:
        ValueError: metrics cannot be read, or the suffix of `out` is that of no format.
        OSError: `out` cannot be written.
    """
    curves = [(label, read(metrics)) for label, metrics in runs]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    colours: dict[str, str] = {}
    for label, curve in curves:
        new = label not in colours
        colour = colours.setdefault(label, f"C{len(colours)}")
        axes.plot(
            [point.along(axis) for point in curve],
            [100 * point.success for point in curve],
            color=colour,
            marker="o",
            markersize=3,
            label=label if new else None,
        )
    axes.axhline(100 * LEARNT, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel=AXES[axis], ylabel="validation success (%)", ylim=(0, 101))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    try:
        known = figure.canvas.get_supported_filetypes()
        if out.suffix and out.suffix[1:].lower() not in known:
            raise ValueError(f"{out}: pictures are written as {', '.join(f'.{name}' for name in sorted(known))}")
        figure.tight_layout()
        with replacing(out) as partial, partial.open("wb") as file:
            figure.savefig(file, format=out.suffix[1:].lower() or "png")
    finally:
        pyplot.close(figure)
