"""`data check` on data sets and recipes that are truncated, corrupt, foreign, huge or hostile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_files import LINES, in_place_of, refused, with_line

pytest.importorskip("verl")
pytest.importorskip("math_verify")

from omegaconf import OmegaConf

from verl_atgrpo import recipes
from verl_atgrpo.environments.common import records

Capture = pytest.CaptureFixture[str]
CHECK: list[object] = ["data", "check", "--config-name=mine"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe's data set, whose third row is the one that breaks."""
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"question": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(4)))
    use(monkeypatch, train)
    return train


def use(monkeypatch: pytest.MonkeyPatch, path: Path, **environment: Any) -> None:
    section = {"name": "math", "train": {"path": str(path)}, "val": {"path": str(path)}, **environment}
    config = OmegaConf.create({"at_grpo": {"environment": section}})
    monkeypatch.setattr(recipes, "compose", lambda *_: config)


@pytest.mark.parametrize("name", [name for name in LINES if name not in ("empty", "other object")])
def test_a_broken_row(name: str, data: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(CHECK, tmp_path, capsys, f"{with_line(data, 3, LINES[name])}:3:")


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"a": 1}\n', b'{"question": NaN, "answer": []}\n', b"{}\n"])
def test_a_file_without_tasks(content: bytes, data: Path, tmp_path: Path, capsys: Capture) -> None:
    data.write_bytes(content)
    refused(CHECK, tmp_path, capsys, "at_grpo.environment.train")


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "nothing"])
def test_no_data_file(kind: str, data: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(CHECK, tmp_path, capsys, in_place_of(data, kind))


WHOLE = gzip.compress(b'{"question": "1+1", "answer": "2"}\n' * 50, mtime=0)
ARCHIVES = {
    "empty": b"",
    "without end": WHOLE[:-4],
    "other bytes inside": WHOLE[:30] + b"\0\0\0" + WHOLE[33:],
    "no gzip": b"no gzip",
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_damaged_archive(
    kind: str, data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(ARCHIVES[kind])
    use(monkeypatch, path)
    refused(CHECK, tmp_path, capsys, path)


def test_a_bomb_is_not_unpacked(data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(1 << 22)))
    use(monkeypatch, path)
    monkeypatch.setattr(records, "_LONGEST", 1 << 20)
    refused(CHECK, tmp_path, capsys, f"{path}:1: the line is longer than 1,048,576 bytes")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"no table"])
def test_a_damaged_table(
    content: bytes, data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(content)
    use(monkeypatch, path)
    refused(CHECK, tmp_path, capsys, path)


ROW = {"question": "Add.", "input_output": '{"inputs": ["1"], "outputs": ["2"]}', "solutions": "[]"}


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"input_output": tests}
            for tests in ("[" * 100_000, "7", "null", '{"fn_name": 3, "inputs": 4}', '{"inputs": [[1]]}')
        ),
        {"input_output": '{"inputs": ["1", null], "outputs": ["2", "3"]}'},
        {"question": None},
        {"question": " "},
        {"solutions": "[3]"},
    ],
)
def test_a_column_that_is_not_of_its_format(
    wrong: dict[str, str | None], data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | wrong) + "\n")
    source = {"path": str(data), "format": "apps"}
    use(monkeypatch, data, name="code", train=source, val=source)
    refused(CHECK, tmp_path, capsys, data)


# ---------------------------------------------------------------------- recipes

RECIPES = {
    "cut": (b"a: [1\nb: 2\n", ":2:"),
    "not UTF-8": (b"\xff\xfe\0", ""),
    "NUL": (b"a\0b: 1\n", ""),
    "tab": (b"at_grpo:\n\tx: 1\n", ":2:"),
    "list": (b"- 1\n- 2\n", ""),
    "absent defaults": (b"defaults: [nowhere]\n", "nowhere"),
    "key twice": (b"a: 1\na: 2\n", ":2:"),
    "key that is a list": (b"? [a, b]\n: 1\n", ":1:"),
    "tag of Python": (b'a: !!python/object/apply:os.system ["echo hi > hacked"]\n', ":1:"),
    "nested": (b"a: " + b"[" * 1000, ""),
    "open interpolation": (b'a: "${"\n', ""),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_broken_recipe(name: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    content, place = RECIPES[name]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    refused([*CHECK, f"--config-dir={tmp_path}"], tmp_path, capsys, f"{path}{place}" if ":" in place else path, place)


@pytest.mark.parametrize(
    "section",
    ["${absent}", {"environment": "${absent.key}"}, "text", [1], 7, {"environment": {"name": "${oc.env:NO}"}}],
)
def test_a_section_that_is_none(
    section: Any, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "compose", lambda *_: OmegaConf.create({"at_grpo": section}))
    refused(CHECK, tmp_path, capsys, "mine" if "${" in str(section) else "at_grpo")


@pytest.mark.parametrize("kind", ["folder", "loop", "nothing"])
def test_no_recipe(kind: str, tmp_path: Path, capsys: Capture) -> None:
    in_place_of(tmp_path / "mine.yaml", kind)
    refused([*CHECK, f"--config-dir={tmp_path}"], tmp_path, capsys, tmp_path / "mine.yaml", "Cannot find")
    refused([*CHECK, f"--config-dir={tmp_path / 'absent'}"], tmp_path, capsys, tmp_path / "absent")
