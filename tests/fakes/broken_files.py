"""Files as no command wants them, and what every command does about them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from verl_atgrpo.cli import main

LINES = {
    "cut": b'{"step": 1, "da',
    "empty": b"",
    "notes": b"# my notes",
    "list": b"[1, 2]",
    "number": b"7",
    "text": b'"abc"',
    "null": b"null",
    "other object": b'{"a": 1}',
    "two values": b"{} {}",
    "not UTF-8": b'{"step": "\xff"}',
    "UTF-16": '{"step": 1}'.encode("utf-16-le"),
    "byte order mark": b'\xef\xbb\xbf{"step": 1}',
    "NUL": b'{"step": \0}',
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "key twice": b'{"step": 1, "step": 2, "data": {}}',
    "digits": b'{"step": ' + b"9" * 5000 + b"}",
    "html": b"<script>alert(1)</script>",
}
"""Name -> a line, or a whole file, that no command accepts."""


def snapshot(folder: Path) -> dict[str, Any]:
    """Returns the content of everything in a folder, of links where they lead."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[str(path)] = os.readlink(path)
        elif stat.S_ISREG(mode):
            found[str(path)] = path.read_bytes() if path.stat().st_size < 1 << 20 else path.stat().st_size
        else:
            found[str(path)] = stat.S_IFMT(mode)
    return found


def refused(arguments: Sequence[object], folder: Path, capsys: pytest.CaptureFixture[str], *named: object) -> str:
    """Runs a command that must fail; returns its one line.

    The line has all of `named`, and nothing in `folder` has changed: neither an output nor a part of one is there.
    """
    before = snapshot(folder)
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert caught.value.code == 1
    ours = [line for line in captured.err.splitlines() if line.startswith("verl-atgrpo")]
    assert len(ours) == 1 and captured.err.endswith(ours[0] + "\n")  # nothing follows it, and it ends
    assert ours[0].isprintable() and len(ours[0]) < 1500
    assert "Traceback" not in captured.err and captured.out == ""
    for name in named:
        assert str(name) in ours[0]
    assert snapshot(folder) == before
    return ours[0]


def with_line(path: Path, number: int, line: bytes) -> Path:
    """Replaces a line of a file, counted from 1, with one that ends in a newline."""
    known = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*known[: number - 1], line, *known[number:]]))
    return path


def changed(path: Path, number: int, *place: Any, value: Any) -> Path:
    """Sets a value in the JSON of a line; `value` may be NaN, or `...` to remove the key."""
    root = json.loads(path.read_bytes().split(b"\n")[number - 1])
    inner = root
    for part in place[:-1]:
        inner = inner[part]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return with_line(path, number, json.dumps(root).encode())


def in_place_of(path: Path, kind: str) -> Path:
    """Puts a folder, a pipe, a link to itself, nothing, a sparse file or a line of 100 MB in place of a file."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "2 GiB":
        path.touch()
        os.truncate(path, 2 << 30)
    elif kind == "100 MB line":
        path.touch()
        os.truncate(path, 100_000_000)
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        assert kind == "nothing"
    return path


def small_model(folder: Path, weights: bytes = b"0123") -> Path:
    """Writes a model of one tensor with four bytes that passes for a Hugging Face model; returns `folder`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(weights))
    return folder


def saved_step(folder: Path, *policies: str) -> Path:
    """Writes a step `folder` whose policies were saved as whole models; returns it."""
    for name in policies:
        small_model(folder / "policies" / name / "huggingface", name.encode())
    (folder / "policies.json").write_text(json.dumps({name: f"policies/{name}" for name in policies}))
    return folder


def safetensors(weights: bytes = b"0123") -> bytes:
    """Returns the content of a safetensors file with one tensor of bytes."""
    header = json.dumps(
        {"weight": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + weights
