"""Prints the README's tables from what `make results` left: results_tables.py FOLDER SEED..."""

from __future__ import annotations

import sys
from pathlib import Path

from verl_atgrpo.learning_curve import Point, read

SHARED, SINGLE, ROLES, SWAPPED = (f"plan_path_cpu{kind}" for kind in ("", "_single", "_roles", "_swapped"))


def percent(success: float) -> str:
    return f"{100 * success:.1f}%"


def against_a_single_agent(results: Path, seeds: list[str]) -> list[str]:
    """Returns the rows of the comparison at equal tokens."""
    rows = []
    for seed in seeds:
        team, single = (read(results / f"{name}_{seed}/metrics.jsonl") for name in (SHARED, SINGLE))
        spent = team[-1].tokens
        equal = next((point for point in single if point.tokens >= spent), single[-1])
        rows.append(
            f"| {seed} | {percent(team[0].success)} | {', '.join(percent(point.success) for point in team[1:])} "
            f"| {team[-1].seconds / 60:.1f} | {spent:,.0f} | {percent(equal.success)} ({equal.tokens:,.0f}) |"
        )
    return rows


def per_role(results: Path, seeds: list[str]) -> list[str]:
    """Returns the rows of the comparison of one policy, one for each role, and swapped ones."""
    rows = []
    for seed in seeds:
        shared, roles, swapped = (read(results / f"{name}_{seed}/metrics.jsonl") for name in (SHARED, ROLES, SWAPPED))
        rows.append(
            f"| {seed} | {percent(shared[0].success)} | {percent(shared[-1].success)} | {percent(roles[0].success)} "
            f"| {', '.join(percent(point.success) for point in roles[1:])} | {percent(swapped[-1].success)} "
            f"| {roles[-1].seconds / 60:.1f} | {roles[-1].tokens:,.0f} |"
        )
    return rows


def main() -> None:
    """Prints both tables, and the largest memory and difference of probabilities of any run."""
    results, seeds = Path(sys.argv[1]), sys.argv[2:]
    print("| seed | start | team after 10, 20, 30 steps | minutes | tokens | single agent at as many tokens |")
    print("|---|---|---|---|---|---|")
    print("\n".join(against_a_single_agent(results, seeds)))
    print()
    print("| seed | shared: start | end | per role: start | after 10, 20, 30 steps | swapped | minutes | tokens |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(per_role(results, seeds)))
    for name in (SHARED, SINGLE, ROLES):
        curves: list[list[Point]] = [read(results / f"{name}_{seed}/metrics.jsonl") for seed in seeds]
        memory = [results / f"{name}_{seed}/memory" for seed in seeds]
        known = [int(file.read_text()) / 2**20 for file in memory if file.is_file()]
        print(
            f"\n{name}: largest rollout_probs_diff_max {max(curve[-1].max_probs_diff for curve in curves):.0e}"
            + (f", at most {max(known):.1f} GiB" if known else "")
        )


if __name__ == "__main__":
    main()
