"""Shows how far estimated gradients are from the exact one of the expected outcome: branching, and AT-GRPO's groups.

python benchmarks/branching_error.py [--episodes 10000] [--out error.png]

Two agents speak twice each, their policies are tables, so every path can be enumerated (tests/fakes/tables.py).
AT-GRPO is given the exact value of every reply as its score, which no real score is. Errors are those of the mean over
episodes, in Euclidean norm, relative to the exact gradient; a standard error beside each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import script
from fakes.tables import Play, Tables, branched, distance, tree

from verl_atgrpo.train.config.schema import BranchSettings

Errors = dict[int, tuple[float, float]]
"""Episodes -> (error, standard error), relative to the norm of the exact gradient."""


def errors(tables: Tables, play: Play, episodes: int) -> Errors:
    """Returns the errors of an estimate after growing numbers of episodes.

    Args:
        tables: the policies.
        play: plays an episode by its number.
        episodes: number of episodes.
    """
    made, exact = tables.estimates(play, episodes), tables.gradient()
    whole = float(np.linalg.norm(exact))
    sizes = sorted({int(size) for size in np.geomspace(min(30, episodes), episodes, 12)})
    return {
        size: (error / whole, spread / whole) for size in sizes for error, spread in [distance(made[:size], exact)]
    }


def variants(tables: Tables) -> dict[str, Play]:
    """Returns how each variant plays an episode."""

    def branch(options: BranchSettings) -> Play:
        return lambda number: branched(tables, number, options, 3)

    return {
        "branch at every decision": branch(BranchSettings(at="every")),
        "branch at a random decision": branch(BranchSettings(at="random")),
        "AT-GRPO, exact values as scores, first candidate": lambda number: tree(
            tables, number, candidates=3, selection="first"
        ),
        "AT-GRPO, exact values as scores, best candidate": lambda number: tree(tables, number, candidates=3),
    }


def main() -> None:
    """Prints a table; draws it with --out."""
    parser = script.parser(__doc__, episodes=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tables = Tables()
    found = {name: errors(tables, play, options.episodes) for name, play in variants(tables).items()}
    for name, of in found.items():
        print(name)
        for size, (error, spread) in of.items():
            print(f"  {size:6d} episodes: error {error:.3f}, standard error {spread:.3f}")
    if options.out:
        draw(found, options.out)


def draw(found: dict[str, Errors], out: Path) -> None:
    """Draws errors over episodes, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, of in found.items():
        axes.plot(list(of), [error for error, _ in of.values()], marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="episodes", ylabel="error / norm of the exact gradient")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
