"""Figures and comparisons as text."""

from __future__ import annotations

import math
from collections.abc import Iterable

from verl_atgrpo.evaluation.figures import LEVEL, Comparison, Estimate, Figures


def counted(number: int, noun: str) -> str:
    """Returns "1 turn", "2 turns", "1,000 turns" for the noun "turn"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def of_figures(figures: Figures) -> str:
    """Returns the figures, a line each."""
    fewest, most = figures.episodes
    n = str(most) if fewest == most else f"{fewest}..{most}"
    each = counted(most, "episode") if fewest == most else f"{n} episodes"
    lines = [
        ("tasks", f"{figures.tasks}, {each} each; intervals: {LEVEL:.0%}, bootstrap over tasks"),
        (f"avg@{n}", _share(figures.success)),
        *((f"  {name}", _share(estimate)) for name, estimate in figures.by_data_set.items()),
        *((f"pass@{k}", _share(estimate)) for k, estimate in figures.pass_at.items()),
        *((f"solved within {counted(turn, 'turn')}", _share(estimate)) for turn, estimate in figures.by_turn.items()),
        ("generated tokens per solved episode", _tokens(figures.tokens_per_solved)),
        ("with the prompts' tokens", _tokens(figures.all_tokens_per_solved)),
        ("answers cut off at the limit", f"{figures.truncated:.1%}"),
    ]
    if len(figures.by_seed) > 1:
        lines.append(("by seed", ", ".join(f"{seed}: {share:.1%}" for seed, share in figures.by_seed.items())))
    if figures.failed:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(figures.failed.items()))
        lines.append(
            ("failed", f"{sum(figures.failed.values())} ({reasons}): counted as not solved; run again to retry")
        )
    return _table(lines)


def of_comparison(comparison: Comparison, first: str, second: str) -> str:
    """Returns the comparison of the files called `first` and `second`, a line for each figure."""
    difference = comparison.difference
    lines = [
        ("tasks", f"{comparison.tasks} in both; interval: {LEVEL:.0%}, paired bootstrap over tasks"),
        (first, f"{comparison.first:.1%}"),
        (second, f"{comparison.second:.1%}"),
        (
            "difference",
            f"{100 * difference.value:+.1f} points  [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]",
        ),
        ("tasks better, worse, equal", f"{comparison.better}, {comparison.worse}, {comparison.equal}"),
    ]
    if any(comparison.left_out):
        lines.append(
            ("tasks left out", f"{comparison.left_out[0]} of the first, {comparison.left_out[1]} of the second")
        )
    return _table(lines)


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.1%}  [{estimate.low:.1%}, {estimate.high:.1%}]"


def _tokens(estimate: Estimate) -> str:
    if math.isinf(estimate.value):
        return "none: nothing is solved"
    high = "unbounded" if math.isinf(estimate.high) else f"{estimate.high:,.1f}"
    return f"{estimate.value:,.1f}  [{estimate.low:,.1f}, {high}]"


def _table(lines: Iterable[tuple[str, str]]) -> str:
    pairs = list(lines)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)
