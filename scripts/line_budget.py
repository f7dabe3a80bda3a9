"""Prints the lines of every folder beside its budget, and exits with 1 if one is over.

python scripts/line_budget.py

A budget is a decision: the commit that raises one says what the lines are for (CONTRIBUTING.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("train", "lab")
"""Folders of the package whose folders have budgets of their own."""
BUDGETS: dict[str, int] = {
    "verl_atgrpo": 1_215,
    "verl_atgrpo/train": 495,
    "verl_atgrpo/lab": 605,
    "verl_atgrpo/train/config": 3_400,
    "verl_atgrpo/cpu": 610,
    "verl_atgrpo/train/estimators": 1_200,
    "verl_atgrpo/lab/evaluation": 1_540,
    "verl_atgrpo/play": 5_010,
    "verl_atgrpo/train/engine": 1_550,
    "verl_atgrpo/lab/report": 735,
    "verl_atgrpo/lab/template": 130,
    "verl_atgrpo/train/rollout": 925,
    "verl_atgrpo/train/rows": 510,
    "verl_atgrpo/sandbox": 1_320,
    "verl_atgrpo/train/serving": 1_545,
    "verl_atgrpo/lab/tiny_models": 720,
    "verl_atgrpo/train/trainer": 2_940,
    "environments": 9_825,
    "recipes": 1_115,
    "benchmarks": 5_300,
    "examples": 1_980,
    "scripts": 1_150,
    "tests": 48_950,
    "docs": 30_245,
}
"""Folder -> most lines of its Python: of `verl_atgrpo` and of layers those of their own files, of others also those
of the folders in them. `recipes` are lines of YAML, `docs` words of README.md and the pages."""


def lines(files: Iterable[Path]) -> int:
    """Returns the number of lines of these files together."""
    return sum(len(file.read_text().splitlines()) for file in files)


def sizes(root: Path = ROOT) -> dict[str, int]:
    """Returns the size of every folder in the unit of its budget. Links are no folders."""
    package = root / "verl_atgrpo"
    folders = [path for path in sorted(package.iterdir()) if path.is_dir() and not path.is_symlink()]
    inside = [path for one in folders for path in (sorted(one.iterdir()) if one.name in LAYERS else [one])]
    of_python = {path.relative_to(root): lines(path.rglob("*.py")) for path in (*inside, root / "environments")}
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    return {
        "verl_atgrpo": lines(package.glob("*.py")),
        **{f"verl_atgrpo/{layer}": size for layer in LAYERS if (size := lines((package / layer).glob("*.py")))},
        **{str(folder): size for folder, size in of_python.items() if size},
        "recipes": lines((root / "recipes").rglob("*.yaml")),
        **{name: lines((root / name).rglob("*.py")) for name in ("benchmarks", "examples", "scripts", "tests")},
        "docs": sum(len(page.read_text().split()) for page in pages),
    }


def table(found: Mapping[str, int], budgets: Mapping[str, int]) -> str:
    """Returns a line for each folder: its size, its budget, and what is left; a folder in one of both only has a 0."""
    rows = [(name, found.get(name, 0), budgets.get(name, 0)) for name in {**found, **budgets}]
    head = f"{'':26}{'lines':>8}{'budget':>8}{'left':>8}"
    return "\n".join([head, *(f"{name:26}{size:8,}{most:8,}{most - size:8,}" for name, size, most in rows)])


def main() -> int:
    """Prints the table and what is over its budget; returns the exit status."""
    found = sizes()
    print(table(found, BUDGETS))
    over = [name for name, size in found.items() if size > BUDGETS.get(name, 0)]
    if over:
        print(f"over budget: {', '.join(over)}; remove lines, or raise BUDGETS in scripts/line_budget.py and say why")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
