"""Tasks from data sets: reading files, and errors in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from verl_atgrpo import EnvironmentConfigError
from verl_atgrpo.environments.common.records import read_records

COLUMNS = {"question": "question", "answer": "answer", "hint": "hint"}
ROWS = [{"problem": "1+1", "answer": "2"}, {"problem": "2+2", "answer": "4"}]
EXPECTED = [{"question": "1+1", "answer": "2", "hint": None}, {"question": "2+2", "answer": "4", "hint": None}]


def write(folder: Path, name: str) -> str:
    path = folder / name
    text = "".join(json.dumps(row) + "\n" for row in ROWS) + "\n"
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif name.endswith((".jsonl", ".json")):
        path.write_text(text)
    else:
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(ROWS).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.jsonl.gz", "sums.json", "sums.json.gz", "sums.parquet"])
def test_files_of_every_kind_give_the_same_rows_under_our_names(name: str, tmp_path: Path) -> None:
    source = {"path": write(tmp_path, name), "columns": {"question": "problem"}}
    assert list(read_records(source, "train", COLUMNS, optional=["hint"])) == EXPECTED


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.parquet"])
def test_rows_are_chosen_by_the_values_of_a_column(name: str, tmp_path: Path) -> None:
    """The column may be one that is not read."""
    source: dict[str, Any] = {"path": write(tmp_path, name), "columns": {"question": "problem"}}

    def read(**where: object) -> list[dict[str, Any]]:
        return list(read_records({**source, "where": where}, "train", {"question": "question"}))

    assert read(answer="4") == [{"question": "2+2"}]
    assert read(answer=["2", "4", "8"], problem="1+1") == [{"question": "1+1"}]
    with pytest.raises(
        EnvironmentConfigError, match=r"^at_grpo\.environment\.train\.where=\{'answer': 4\}: '.*' has no row"
    ):
        read(answer=4)
    with pytest.raises(
        EnvironmentConfigError, match=r"^at_grpo\.environment\.train\.where\.level: .* no such column; it has"
    ):
        read(level=1)
    with pytest.raises(
        EnvironmentConfigError, match=r"^at_grpo\.environment\.train\.where=\['answer'\]: a section, such"
    ):
        list(read_records({**source, "where": ["answer"]}, "train", {"question": "question"}))
    with pytest.raises(EnvironmentConfigError, match=r"^at_grpo\.environment\.train\.where=0: a section, such"):
        list(read_records({**source, "where": 0}, "train", {"question": "question"}))


@pytest.mark.parametrize("name", ["list.json", "list.json.gz", "list.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_may_be_one_list_of_rows(name: str, indent: int | None, tmp_path: Path) -> None:
    text = json.dumps(ROWS, indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    source = {"path": str(tmp_path / name), "columns": {"question": "problem"}}
    assert list(read_records(source, "train", COLUMNS, optional=["hint"])) == EXPECTED


@pytest.mark.parametrize("text", ['[{"a": 1}, 3]', "[[]]", '[{"a": 1}', '[{"a": 1}]\n{"a": 2}', "[1, 2]"])
def test_a_list_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(EnvironmentConfigError, match=r"list\.json' cannot be read") as refusal:
        list(
            read_records(
                {"path": str(tmp_path / "list.json"), "columns": {"question": "a"}}, "train", COLUMNS, ["hint"]
            )
        )
    assert "\n" not in str(refusal.value)


NESTED = [
    {"prompt": "1+1", "reward_model": {"ground_truth": "2", "style": {"kind": "rule"}}, "extra.info": "x"},
    {"prompt": "2+2", "reward_model": {"ground_truth": "4", "style": None}, "extra.info": "y"},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("reward_model.ground_truth", ["2", "4"]),
        ("reward_model.style.kind", ["rule", None]),  # later rows may lack it
        ("extra.info", ["x", "y"]),  # a column's own name comes first
        ("reward_model.truth", r"columns\.answer='reward_model\.truth': .* it has reward_model\.ground_truth, "),
        (
            "reward.ground_truth",
            r"columns\.answer='reward\.ground_truth': .* it has prompt, reward_model, extra\.info",
        ),
        ("prompt.content", r"columns\.answer='prompt\.content': .* it has prompt, reward_model"),
        ("reward_model.style.kind.deeper", r"columns\.answer='reward_model\.style\.kind\.deeper': "),
    ],
)
def test_a_column_may_be_a_key_of_mappings(kind: str, name: str, values: Any, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in NESTED))
    else:
        pytest.importorskip("pandas").DataFrame(NESTED).to_parquet(path)
    rows = read_records(
        {"path": str(path), "columns": {"question": "prompt", "answer": name}}, "train", COLUMNS, ["hint"]
    )
    if isinstance(values, str):
        with pytest.raises(EnvironmentConfigError, match=values):
            list(rows)
    else:
        assert [row["answer"] for row in rows] == values


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
        ({"path": "hf://datasets/a/b/c.jsonl", "split": "test"}, r"split='test' has no effect on a file"),
    ],
)
def test_refused_with_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = {"path": write(tmp_path, "sums.jsonl"), "columns": {"question": "problem"}, **changes}
    with pytest.raises(EnvironmentConfigError, match=message) as refusal:
        list(read_records(source, "train", COLUMNS, optional=["hint"]))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.jsonl.gz", "sums.parquet"])
def test_damaged_files_are_refused_with_one_line(name: str, tmp_path: Path) -> None:
    path = Path(write(tmp_path, name))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EnvironmentConfigError, match=r"environment\.train\.path=.* cannot be read") as refusal:
        list(read_records({"path": str(path), "columns": {"question": "problem"}}, "train", COLUMNS, ["hint"]))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["rows.csv", "ROWS.JSONL", "rows"])
def test_a_file_of_another_kind_is_not_looked_for_on_the_hub(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("question,answer\n")
    path = str(tmp_path / name)
    with pytest.raises(
        EnvironmentConfigError, match=r"^at_grpo\.environment\.train\.path=.*: a file ends in \.jsonl, "
    ):
        list(read_records({"path": path, "split": "train"}, "train", COLUMNS))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("\n")
    with pytest.raises(EnvironmentConfigError, match="it has no rows"):
        list(read_records({"path": str(path)}, "train", COLUMNS))


def test_a_data_set_of_the_hub_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load(path: str, subset: str | None, split: str) -> Any:
        asked.append((path, subset, split))
        return datasets.Dataset.from_list([{**row, "heavy": "x"} for row in ROWS])

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = {"path": "org/sums", "subset": "main", "split": "train", "columns": {"question": "problem"}}
    assert list(read_records(source, "train", COLUMNS, optional=["hint"])) == EXPECTED
    assert asked == [("org/sums", "main", "train")]
    with pytest.raises(EnvironmentConfigError, match=r"environment\.train\.split is missing"):
        list(read_records({"path": "org/sums"}, "train", COLUMNS))
    with pytest.raises(EnvironmentConfigError, match=r"no such column; it has problem, answer, heavy"):
        list(read_records({**source, "columns": {}}, "train", COLUMNS))


def test_a_data_set_that_only_a_script_can_load_is_refused_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load(*args: object, **options: object) -> None:
        raise RuntimeError("Dataset scripts are no longer supported,\nbut found apps.py")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(EnvironmentConfigError, match=r"path='org/apps' cannot be read .* but found apps\.py"):
        list(read_records({"path": "org/apps", "split": "train"}, "train", COLUMNS))


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("hf://datasets/org/sums/sums.jsonl", ("org/sums", "sums.jsonl", None)),
        ("hf://datasets/org/sums@v1.0/data/sums.jsonl", ("org/sums", "data/sums.jsonl", "v1.0")),
        ("hf://datasets/org/sums@refs%2Fpr%2F5/sums.parquet", ("org/sums", "sums.parquet", "refs/pr/5")),
    ],
)
def test_a_file_of_the_hub_is_read_like_a_local_one(
    path: str, asked: tuple[str, str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def download(repo: str, file: str, repo_type: str, revision: str | None) -> str:
        assert (repo, file, revision, repo_type) == (*asked, "dataset")
        return write(tmp_path, file.rpartition("/")[2])

    monkeypatch.setattr(hub, "hf_hub_download", download)
    source = {"path": path, "columns": {"question": "problem"}}
    assert list(read_records(source, "train", COLUMNS, optional=["hint"])) == EXPECTED
