"""Validation success over a run, from the metrics of verl's `file` logger."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

AXES = {
    "seconds": "minutes of training",
    "tokens": "tokens generated (thousands)",
    "steps": "training steps",
}
_SCALE = {"seconds": 60.0, "tokens": 1000.0, "steps": 1.0}


@dataclass(frozen=True)
class Point:
    """One validation."""

    step: int
    seconds: float
    """Training time so far: rollout, updates and weight syncs; without start-up and validation."""
    tokens: float
    """Tokens generated in training so far, of all candidates."""
    success: float
    max_probs_diff: float
    """Largest difference of a token's probability between server and actor so far."""

    def along(self, axis: str) -> float:
        """Returns the value on a plot's axis, in the axis' unit."""
        value = {"seconds": self.seconds, "tokens": self.tokens, "steps": float(self.step)}[axis]
        return value / _SCALE[axis]


def read(metrics: Path) -> list[Point]:
    """Returns the validations of a run, in order; raises ValueError if there are none.

    `metrics` is a JSONL file or a folder of them: a resumed run writes a new file, whose steps replace those that the
    interrupted run did after its last checkpoint.
    """
    files = sorted(metrics.glob("*.jsonl")) if metrics.is_dir() else [metrics]
    steps: dict[int, dict[str, float]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            steps[int(record["step"])] = {**steps.get(int(record["step"]), {}), **record["data"]}
    points, seconds, tokens, difference = [], 0.0, 0.0, 0.0
    for step, data in sorted(steps.items()):
        seconds += data.get("timing_s/step", 0.0)
        tokens += data.get("rollout/tokens", 0.0)
        difference = max(difference, data.get("training/rollout_probs_diff_max", 0.0))
        successes = [value for name, value in data.items() if name.startswith("val-core/") and "/acc/mean@" in name]
        if successes:  # mean over data sets
            points.append(Point(step, seconds, tokens, sum(successes) / len(successes), difference))
    if not points:
        raise ValueError(f"{metrics} has no validation; set trainer.val_before_train=true and trainer.test_freq")
    return points


def draw(runs: Sequence[tuple[str, Path]], out: Path, axis: str = "seconds") -> None:
    """Draws validation success against `axis` for (label, metrics) pairs into the PNG `out`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    colours: dict[str, str] = {}
    for label, metrics in runs:
        new = label not in colours
        colour = colours.setdefault(label, f"C{len(colours)}")
        curve = read(metrics)
        axes.plot(
            [point.along(axis) for point in curve],
            [100 * point.success for point in curve],
            color=colour,
            marker="o",
            markersize=3,
            label=label if new else None,
        )
    axes.axhline(95, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel=AXES[axis], ylabel="validation success (%)", ylim=(0, 101))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)
