"""Outputs of commands: whole or not at all, beside nothing that was not there before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fakes.broken_files import snapshot

from verl_atgrpo.files import FileError, new_folder, replacing, temporary_folder, write_text


@pytest.mark.parametrize("there", [False, True])
def test_an_interrupted_file_leaves_what_was_there(there: bool, tmp_path: Path) -> None:
    out = tmp_path / ("page.html" if there else "a/b/page.html")
    if there:
        out.write_text("earlier")
    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt), replacing(out) as partial:
        partial.write_text("half")
        assert partial.suffix == ".html" and partial.parent == out.parent
        raise KeyboardInterrupt
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("there", [False, True])
def test_an_interrupted_folder_leaves_what_was_there(there: bool, tmp_path: Path) -> None:
    out = tmp_path / "a/b"
    if there:
        out.mkdir(parents=True)
    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt), temporary_folder(out) as partial:
        (partial / "half").write_text("half")
        assert partial.parent == (out if there else out.parent)  # on the device of a folder that is there
        raise KeyboardInterrupt
    assert snapshot(tmp_path) == before


def test_what_is_written_has_the_usual_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "a/page.html", "page")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "a/page.html").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with new_folder(tmp_path / "folder") as made:
        (made / "file").write_text("content")
    assert (tmp_path / "folder").stat().st_mode == (tmp_path / "a").stat().st_mode
    assert os.listdir(tmp_path / "a") == ["page.html"]
    assert sorted(os.listdir(tmp_path)) == ["a", "folder", "plain"]


def test_what_is_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="exists: remove it"), new_folder(tmp_path / "file"):
        pass
    with pytest.raises(FileError, match="is not a folder"), temporary_folder(tmp_path / "file"):
        pass
    with pytest.raises(FileError, match="is a folder: name a file"), replacing(tmp_path):
        pass
