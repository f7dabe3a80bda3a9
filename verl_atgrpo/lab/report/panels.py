"""Converts metrics to the page's panels of curves and headline figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_atgrpo.lab.report import counted

Metrics = Mapping[int, Mapping[str, float | str]]
Panel = dict[str, Any]
"""`title`, `unit`, `help`, `kind` (lines or stack), `zero` (the axis starts at 0) and `series`, each with `name`,
`colour` (a number) and `points` (step, value); the value is None if it was not finite."""

MOST_POINTS = 300
"""Most points of a curve; longer ones are averaged over neighbouring steps."""
_STAGES = (
    ("rollout", ("gen",)),
    ("log-probs", ("old_log_prob", "ref")),
    ("advantages", ("adv",)),
    ("update", ("update_actor",)),
    ("weight sync", ("update_weights",)),
    ("checkpoint", ("save_checkpoint",)),
)
_VALIDATION = re.compile(r"val-core/(.+)/acc/mean@(\d+)")
_GAMES = re.compile(r"opponents/(\w+)/win")
_PROBS = "training/rollout_probs_diff_max"


def averaged(points: Sequence[tuple[int, float | None]], most: int = MOST_POINTS) -> list[tuple[float, float | None]]:
    """Returns at most `most` points, each the mean of the same number of neighbours, ignoring None."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    means: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        near = points[start : start + size]
        values = [value for _, value in near if value is not None]
        step = sum(step for step, _ in near) / len(near)
        means.append((step, sum(values) / len(values) if values else None))
    return means


def curve(metrics: Metrics, name: str, scale: float = 1.0) -> list[tuple[int, float | None]]:
    """Returns a metric's (step, value) pairs; None for values that are not finite."""
    return [
        (step, scale * value if isinstance(value, float) else None)
        for step, row in sorted(metrics.items())
        if (value := row.get(name)) is not None
    ]


def panels(metrics: Metrics, policies: Iterable[str]) -> list[Panel]:
    """Returns the panels that have metrics (of steps), in the order of the page; `policies` are the run's."""
    names = {name for row in metrics.values() for name in row}
    policies = list(policies)
    agents = sorted({found[1] for name in names if (found := re.fullmatch(r"agent/([\w.]+)/reward", name))})

    def panel(title: str, unit: str, help: str, series: Iterable[tuple[str, str, int]], zero: bool = True) -> Panel:
        scale = 100.0 if unit == "%" else 1.0
        lines = [
            {"name": name, "colour": colour, "points": averaged(points)}
            for name, metric, colour in series
            if (points := curve(metrics, metric, scale))
        ]
        return {"title": title, "unit": unit, "help": help, "kind": "lines", "zero": zero, "series": lines}

    def per_agent(metric: str, title: str, unit: str, help: str, zero: bool = True) -> Panel:
        series = [(agent, f"agent/{agent}/{metric}", number) for number, agent in enumerate(agents)]
        return panel(title, unit, help, series, zero)

    def per_policy(metric: str, title: str, unit: str, help: str) -> Panel:
        if len(policies) > 1:
            series = [(name, f"policy/{name}/{metric}", number) for number, name in enumerate(policies)]
        else:
            series = [(policies[0] if policies else "policy", f"actor/{metric}", 0)]
        return panel(title, unit, help, series)

    owners = [(name, f"policy/{name}") for name in policies] if len(policies) > 1 else [("", "actor")]
    arriving = [
        (f"{owner} {label}".strip(), f"{prefix}/{metric}", number + place * len(owners))
        for number, (owner, prefix) in enumerate(owners)
        for place, (label, metric) in enumerate((("update", "update_arrived"), ("weights", "weights_changed_share")))
    ]
    validation = _validations(names)
    opponents = sorted(name.split("/")[1] for name in names if _GAMES.fullmatch(name))
    label = "validation" if len(validation) == 1 else "validation, {}"
    success = [(label.format(of), name, number) for number, (name, of) in enumerate(validation.items())]
    easier = "counted from 0; tasks of easier levels stay in the mixture"
    rated = "above the oldest past self that is rated; half of the 95% interval is opponents/elo_margin"
    between = "largest difference of a token's probability between the two"
    inflated = "Dr. MAS: above 1, the team's baseline inflates gradients"
    highest = "share that earned the most that their agent has earned so far"
    drawn = [
        panel(
            "Success",
            "%",
            "share of episodes solved; in a tree's training the best of K candidates is committed at every decision",
            [*success, ("training", "team/success", len(success))],
        ),
        panel("Level of the curriculum", "", easier, [("level", "curriculum/level", 0)]),
        panel("Rating", "Elo points", rated, [("policy", "opponents/elo", 0)], zero=False),
        *(
            panel(
                f"Games {what}",
                "%",
                "of the side in training, by opponent",
                [(f"against {kind}", f"opponents/{kind}/{name}", number) for number, kind in enumerate(opponents)],
            )
            for what, name in (("won", "win"), ("lost", "loss"))
        ),
        per_agent(
            "reward", "Reward", "", "mean over all candidates; in a tree alpha x team + local_weight x local", False
        ),
        per_agent("team_reward", "Team part of the reward", "", "mean over all candidates, before alpha", False),
        per_agent("local_reward", "Local part of the reward", "", "mean over all candidates", False),
        per_policy("grad_norm", "Gradient norm", "", "before clipping"),
        per_agent("inflation_factor", "Inflation factor", "", inflated, False),
        per_agent("response_length", "Answer length", "tokens", "mean over all candidates"),
        per_agent("response_clipped", "Answers cut off", "%", "by their limit of tokens"),
        per_agent("highest_reward_share", "Candidates at the highest reward", "%", highest),
        per_agent("zero_variance_groups", "Groups without signal", "%", "all advantages 0"),
        per_agent("stuck_groups", "Groups that are stuck", "%", "all rewards equal, and all candidates wrong"),
        per_agent("entropy", "Entropy of the agents", "nats", "per token"),
        per_policy("entropy", "Entropy of the policies", "nats", "per token"),
        _time_split(metrics),
        panel(
            "Update that arrives at the servers",
            "%",
            "along which the weights moved in the servers' dtype; and share of the weights that changed there",
            arriving,
        ),
        panel("Server against actor", "", between, [("largest difference", _PROBS, 0)]),
    ]
    return [each for each in drawn if each["series"]]


def _time_split(metrics: Metrics) -> Panel:
    """Returns the panel of a step's time by stage; stages without time are left out."""
    steps = {step: row for step, row in sorted(metrics.items()) if isinstance(row.get("timing_s/step"), float)}

    def seconds(row: Mapping[str, float | str], stages: Iterable[str]) -> float:
        return sum(value for stage in stages if isinstance(value := row.get(f"timing_s/{stage}"), float))

    def rest(row: Mapping[str, float | str]) -> float:
        return max(0.0, seconds(row, ["step"]) - seconds(row, [stage for _, stages in _STAGES for stage in stages]))

    columns = [(name, [seconds(row, stages) for row in steps.values()]) for name, stages in _STAGES]
    columns.append(("other", [rest(row) for row in steps.values()]))
    series = [
        {"name": name, "colour": colour, "points": averaged(list(zip(steps, values, strict=True)))}
        for colour, (name, values) in enumerate(columns)
        if any(values)
    ]
    help = "seconds of a step by stage, without validation"
    return {"title": "Step time", "unit": "s", "help": help, "kind": "stack", "zero": True, "series": series}


def _validations(names: Iterable[str]) -> dict[str, str]:
    """Returns the metrics of validation success in order, each with its data set."""
    return {name: found[1] for name in sorted(names) if (found := _VALIDATION.fullmatch(name))}


def figures(metrics: Metrics) -> list[dict[str, str]]:
    """Returns the headline figures that the metrics allow, each with `label`, `value` and `note`."""

    def total(name: str) -> float:
        return sum(value for _, value in curve(metrics, name) if value is not None)

    found = []
    for name, of in _validations({name for row in metrics.values() for name in row}).items():
        points = [(step, value) for step, value in curve(metrics, name, 100.0) if value is not None]
        if points:
            (first, before), (last, after) = points[0], points[-1]
            value = f"{after:.1f}%" if first == last else f"{before:.1f}% → {after:.1f}%"
            note = f"at step {first}" if first == last else f"steps {first} to {last}"
            found.append({"label": f"validation success, {of}", "value": value, "note": note})
    trained = curve(metrics, "timing_s/step")
    if trained:
        minutes = total("timing_s/step") / 60
        found.append({"label": "training", "value": counted(len(trained), "step"), "note": f"{minutes:.1f} minutes"})
    if tokens := total("rollout/tokens"):
        note = counted(round(total("rollout/candidates")), "candidate")
        found.append({"label": "tokens generated", "value": f"{tokens:,.0f}", "note": note})
    differences = [value for _, value in curve(metrics, _PROBS) if value is not None]
    if differences:
        note = "largest difference of a token's probability"
        found.append({"label": "server against actor", "value": f"{max(differences):.1e}", "note": note})
    if trained and (waited := total("timing_s/record")):
        share = 100 * waited / total("timing_s/step")
        found.append({"label": "waiting for records", "value": f"{share:.2f}%", "note": "of the steps' time"})
    return found
