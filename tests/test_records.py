"""Tasks from data sets: what is read, and what is refused with one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from verl_atgrpo.environment import EnvironmentConfigError
from verl_atgrpo.environments.records import read_records

COLUMNS = {"question": "question", "answer": "answer", "hint": "hint"}
ROWS = [{"problem": "1+1", "answer": "2"}, {"problem": "2+2", "answer": "4"}]


def write(folder: Path, name: str) -> str:
    path = folder / name
    text = "".join(json.dumps(row) + "\n" for row in ROWS) + "\n"
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif name.endswith(".jsonl"):
        path.write_text(text)
    else:
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(ROWS).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.jsonl.gz", "sums.parquet"])
def test_files_of_every_kind_give_the_same_rows_under_our_names(name: str, tmp_path: Path) -> None:
    source = {"path": write(tmp_path, name), "columns": {"question": "problem"}}
    assert read_records(source, "train", COLUMNS, optional=["hint"]) == (
        {"question": "1+1", "answer": "2", "hint": None},
        {"question": "2+2", "answer": "4", "hint": None},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": 3}, r"environment\.train=.*: a section with path"),
        ({"file": "x"}, r"environment\.train\.file is not a known key: use one of path"),
        ({"columns": {"questions": "problem"}}, r"environment\.train\.columns\.questions is not a column here"),
        ({"columns": {}}, r"environment\.train\.columns\.question='question': .* has no such column; it has problem"),
        ({"columns": {"question": "problem", "hint": "tip"}}, r"columns\.hint='tip': .* has no such column"),
        ({"split": "test"}, r"environment\.train\.split='test' has no effect on a file"),
        ({"path": "/nowhere/sums.jsonl"}, r"path='/nowhere/sums\.jsonl' cannot be read"),
    ],
)
def test_refused_with_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = {"path": write(tmp_path, "sums.jsonl"), "columns": {"question": "problem"}, **changes}
    with pytest.raises(EnvironmentConfigError, match=message) as refusal:
        read_records(source, "train", COLUMNS, optional=["hint"])
    assert "\n" not in str(refusal.value)


def test_a_data_set_of_the_hub_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load(path: str, subset: str | None, split: str) -> list[dict[str, str]]:
        asked.append((path, subset, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = {"path": "org/sums", "subset": "main", "split": "train", "columns": {"question": "problem"}}
    assert len(read_records(source, "train", COLUMNS, optional=["hint"])) == 2
    assert asked == [("org/sums", "main", "train")]
    with pytest.raises(EnvironmentConfigError, match=r"environment\.train\.split is missing"):
        read_records({"path": "org/sums"}, "train", COLUMNS)
