"""The budget of lines: what is counted, and what a folder over its budget does to `make lint`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import line_budget

FILES = {
    "verl_atgrpo/cli.py": "a\n\nb\n",
    "verl_atgrpo/notes.md": "not counted\n",
    "verl_atgrpo/play/team.py": "a\n",
    "verl_atgrpo/play/deep/er.py": "a\nb",  # without a newline at its end
    "verl_atgrpo/train/chat.py": "a\nb\n",
    "verl_atgrpo/train/rows/queue.py": "a\n",
    "environments/walk/__init__.py": "a\n",
    "recipes/walk.yaml": "a: 1\n",
    "recipes/model/tiny.yaml": "a: 1\nb: 2\n",
    "recipes/gone.py": "not counted\n",
    "benchmarks/speed.py": "a\nb\n",
    "examples/study/study.py": "a\n",
    "scripts/table.py": "a\nb\nc\n",
    "tests/test_walk.py": "a\n",
    "README.md": "three words here\n",
    "docs/page.md": "two words\n",
    "docs/images/page.svg": "not counted\n",
}
SIZES = {
    "verl_atgrpo": 3,
    "verl_atgrpo/train": 2,
    "verl_atgrpo/train/rows": 1,
    "verl_atgrpo/play": 3,
    "environments": 1,
    "recipes": 3,
    "benchmarks": 2,
    "examples": 1,
    "scripts": 3,
    "tests": 1,
    "docs": 5,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "verl_atgrpo" / "environments").symlink_to("../environments")
    return tmp_path


def test_every_folder_is_counted_once(tree: Path) -> None:
    assert line_budget.sizes(tree) == SIZES


@pytest.mark.parametrize(
    ("budgets", "over"),
    [
        (SIZES, ""),
        ({**SIZES, "gone": 5}, ""),
        ({**SIZES, "docs": 4}, "over budget: docs; remove lines"),
        ({name: most for name, most in SIZES.items() if name != "verl_atgrpo/play"}, "over budget: verl_atgrpo/play;"),
    ],
)
def test_a_folder_over_its_budget_or_without_one_fails(
    budgets: dict[str, int],
    over: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(line_budget, "BUDGETS", budgets)
    monkeypatch.setattr(line_budget, "sizes", lambda: SIZES)
    assert line_budget.main() == bool(over)
    said = capsys.readouterr().out
    assert over in said and ("over budget" in said) == bool(over)
    assert ["docs", "5", str(budgets["docs"]), str(budgets["docs"] - 5)] in [
        line.split() for line in said.splitlines()
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_lint_prints_the_budget() -> None:
    made = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "python scripts/line_budget.py" in made.stdout
