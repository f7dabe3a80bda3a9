"""The model card of an export, and its way to a hub: a server on this machine that answers as the hub does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import recorded_run
from fakes.broken_files import saved_step
from fakes.recorded_run import write_run

pytest.importorskip("verl")
huggingface_hub = pytest.importorskip("huggingface_hub")

from verl_atgrpo import cli
from verl_atgrpo.lab.evaluation.results import EpisodeRow, Failure, ResultFile
from verl_atgrpo.lab.model_card import card, measured_by
from verl_atgrpo.lab.report import records
from verl_atgrpo.lab.report.records import Run

TOKEN = "hf_only_a_test"


class Hub(BaseHTTPRequestHandler):
    """Keeps what is committed, as path -> content; refuses those without the token."""

    repositories: dict[str, dict[str, bytes]]

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("/tree/")[0]
        if name not in self.repositories:
            return self.answer(404, {"error": "Not found"})
        files = {path: len(content) for path, content in self.repositories[name].items()}
        self.answer(200, [{"type": "file", "path": path, "oid": "1", "size": size} for path, size in files.items()])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization', 'me')}/{given['name']}"
            self.repositories.setdefault(name, {})
            self.answer(200, {"url": f"http://{self.headers['Host']}/{name}"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]
            self.answer(200, {"files": files})
        else:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    del self.repositories[name][line["value"]["path"]]
                if line["key"] == "file":
                    self.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/{name}/commit/1"
            self.answer(200, {"commitUrl": url, "commitOid": "1", "success": True})

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, bytes]]]:
    found: dict[str, dict[str, bytes]] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Hub,), {"repositories": found}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def checkpoint(root: Path, *policies: str) -> Path:
    return saved_step(root / "checkpoints/global_step_3", *policies)


def test_the_card_says_what_was_trained_how_and_how_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = checkpoint(tmp_path, "shared")
    write_run(step.parent)
    played = {"environment": {"name": "plan_path"}, "players": {"shared": {"source": "runs/a/global_step_3"}}}
    with ResultFile(tmp_path / "other.jsonl", {**played, "environment": {"name": "walk"}}, {}) as results:
        results.add(EpisodeRow(0, "", 0, 0, True, 1.0, {}, 1, 1, {}, None, 0.0))
    with ResultFile(tmp_path / "after.jsonl", played, {}) as results:
        for task in range(10):
            late = None if task else Failure("timeout", "why")
            results.add(EpisodeRow(task, "", 0, 0, task > 0, 1.0, {}, 1, 1, {}, late, 0.0))
    command = ["export", str(step), str(tmp_path / "out"), f"--evaluation={tmp_path / 'after.jsonl'}"]
    assert cli.main(command) == 0
    with pytest.raises(SystemExit):
        cli.main([*command[:-1], f"--evaluation={tmp_path / 'other.jsonl'}"])
    assert "its tasks are of 'walk', the run trained on plan_path" in capsys.readouterr().err
    text = (tmp_path / "out/shared/README.md").read_text()
    _, head, body = text.split("---\n")
    assert yaml.safe_load(head)["base_model"] == "some/model"
    for line in (
        "# made up: shared",
        "| base | some/model |",
        "| task | plan_path (size: 4) |",
        "| agents | drafter, planner |",
        "| algorithm | at_grpo, scheme tree, K = 2 |",
        "| training | 3 steps, 3,000 generated tokens |",
        "| validation | step 3, plan_path: 100.0% solved (step 0: 0.0%) |",
        "python -m verl.trainer.main_ppo --config-name=made_up",
    ):
        assert line in body.splitlines(), line
    # Nine of ten, with the two tasks that an interval adds.
    assert "| evaluation | 90.0% of 10 tasks solved, 95% interval 5" in body
    assert "played by runs/a/global_step_3 |" in body
    assert "%; 1 episode failed and count as not solved; played by" in body


def test_only_a_step_with_a_number_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = checkpoint(tmp_path, "shared")
    write_run(step.parent)
    (tmp_path / "best").symlink_to(step)
    assert cli.main(["export", str(tmp_path / "best"), str(tmp_path / "out")]) == 0
    assert "| training | 3 steps" in (tmp_path / "out/shared/README.md").read_text()
    copied = tmp_path / "copied"
    step.rename(copied)
    with pytest.raises(SystemExit):
        cli.main(["export", str(copied), str(tmp_path / "other")])
    assert "copied: name it global_step_<n>" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_an_evaluation_may_be_of_what_is_in_a_mixture_or_curriculum(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "walk.jsonl", {"environment": {"name": "walk"}}, {}) as results:
        results.add(EpisodeRow(0, "", 0, 0, True, 1.0, {}, 1, 1, {}, None, 0.0))
    mixture = {"name": "mixture", "parts": {"walk": None, "hard": {"name": "walk_walls"}}}
    for environment in (mixture, {"name": "curriculum", "of": {"name": "walk"}, "levels": []}):
        run = Run(about={"section": {"environment": environment}})
        assert measured_by(tmp_path / "walk.jsonl", run).startswith("100.0% of 1 tasks solved")
    with pytest.raises(ValueError, match=r"tasks are of 'walk', the run trained on sudoku$"):
        measured_by(tmp_path / "walk.jsonl", Run(about={"section": {"environment": {"name": "sudoku"}}}))


def test_a_cell_is_one_line_and_earlier_validations_may_have_other_names() -> None:
    section = {"environment": {"name": "walk", "style": "a|b\nc"}}
    metrics = {0: {"val-core/walk/acc/mean@1": 0.5}, 3: {"val-core/walk/acc/mean@2": 1.0}}
    text = card("shared", 3, Run(about={"section": section}, metrics=metrics))
    assert "| task | walk (style: a\\|b c) |" in text.splitlines()
    assert "| validation | step 3, walk: 100.0% solved |" in text.splitlines()


def test_a_critic_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = checkpoint(tmp_path, "player", "judge")
    monkeypatch.setitem(recorded_run.ABOUT, "section", {"critic": {"policy": "judge", "kind": "value"}})
    write_run(step.parent)
    assert cli.main(["export", str(step), str(tmp_path / "out")]) == 0
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["player"]


@pytest.mark.parametrize("damage", ["a line", "too many bytes"])
def test_records_that_cannot_be_read_do_not_keep_a_model_back(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The critic is left out all the same."""
    step = checkpoint(tmp_path, "player", "judge")
    monkeypatch.setitem(
        recorded_run.ABOUT, "section", {"critic": {"policy": "judge"}, "environment": {"name": "walk"}}
    )
    write_run(step.parent)
    if damage == "a line":
        path = step.parent / "record/metrics-0001-0000.jsonl"
        path.write_text(path.read_text().replace('{"step": 1', '{"step" 1'))
    else:
        monkeypatch.setitem(records._MOST, "val", 10)
    assert cli.main(["export", str(step), str(tmp_path / "out")]) == 0
    assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["player"]
    card = (tmp_path / "out/player/README.md").read_text().splitlines()
    assert "| task | walk |" in card and "| training | 3 steps |" in card
    assert "the model card has no results of the training: " in caplog.text


def test_of_several_answers_to_a_task_the_card_has_their_mean_by_data_set() -> None:
    names = {"hard/set/acc/mean@2": 0.25, "hard/set/acc/best@2/mean": 0.5, "hard/set/acc/best@2/std": 0.1}
    run = Run(metrics={4: {f"val-core/{name}": value for name, value in names.items()}})
    assert "| validation | step 4, hard/set: 25.0% solved |" in card("shared", 5, run).splitlines()


def test_an_evaluation_that_was_ended_is_no_result(tmp_path: Path) -> None:
    file = tmp_path / "killed.jsonl"
    for task in (0, 3, 2, 1):
        with ResultFile(file, {"environment": {"name": "walk"}}, {}) as results:
            results.add(EpisodeRow(task, "", 0, 0, True, 1.0, {}, 1, 1, {}, None, 0.0))
        if task in (3, 2):
            with pytest.raises(
                ValueError, match=rf"killed.jsonl: {task - 1} tasks? before the last one have no episode"
            ):
                measured_by(file, Run())
    assert measured_by(file, Run()).startswith("100.0% of 4 tasks solved")


def test_nothing_is_exported_with_an_evaluation_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", str(checkpoint(tmp_path, "coder")), str(tmp_path / "out"), "--evaluation=none.jsonl"])
    assert not (tmp_path / "out").exists()


def test_without_records_the_card_says_what_is_known(tmp_path: Path) -> None:
    step = checkpoint(tmp_path, "coder")
    assert cli.main(["export", str(step), str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/coder/README.md").read_text()
    assert "base_model" not in text and "## Command" not in text
    assert "| training | 3 steps |" in text.splitlines()


def test_policies_go_to_the_hub_each_under_its_name(
    tmp_path: Path, hub: dict[str, dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    step = checkpoint(tmp_path, "coder", "planner")
    assert cli.main(["export", str(step), str(tmp_path / "out"), "--push=team/mine"]) == 0
    assert sorted(hub) == ["team/mine-coder", "team/mine-planner"]
    for policy in ("coder", "planner"):
        sent, folder = hub[f"team/mine-{policy}"], tmp_path / "out" / policy
        assert {"README.md", "config.json", "model.safetensors"} <= sent.keys()
        assert all((folder / name).read_bytes() == content for name, content in sent.items())
    assert capsys.readouterr().out.splitlines()[-1].endswith("/team/mine-planner")
    assert cli.main(["export", str(checkpoint(tmp_path / "b", "shared")), str(tmp_path / "one"), "--push=me/it"]) == 0
    hub["me/it"] |= {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"", "notes.md": b""}
    assert cli.main(["export", str(checkpoint(tmp_path / "c", "shared")), str(tmp_path / "two"), "--push=me/it"]) == 0
    assert {name for name in hub["me/it"] if "safetensors" in name} == {"model.safetensors"}
    assert "notes.md" in hub["me/it"]


def test_a_hub_that_fails_in_the_middle_is_told_with_all_that_is_left(
    tmp_path: Path,
    hub: dict[str, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api = huggingface_hub.HfApi
    upload = api.upload_folder

    def upload_folder(self: Any, *, repo_id: str, **given: Any) -> Any:
        if repo_id.endswith("-b"):
            raise OSError("502")
        return upload(self, repo_id=repo_id, **given)

    monkeypatch.setattr(api, "upload_folder", upload_folder)
    with pytest.raises(SystemExit):
        cli.main(["export", str(checkpoint(tmp_path, "a", "b", "c")), str(tmp_path / "out"), "--push=me/it"])
    left = " and ".join(f"`hf upload me/it-{name} {tmp_path / 'out' / name}`" for name in "bc")
    assert capsys.readouterr().err.endswith(f"then {left}\n")
    assert hub["me/it-a"]


@pytest.mark.parametrize("problem", ["token", "network", "name"])
def test_a_hub_that_refuses_is_one_line(
    problem: str,
    tmp_path: Path,
    hub: dict[str, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a/b/c" if problem == "name" else "me/it"
    if problem == "token":
        monkeypatch.setenv("HF_TOKEN", "hf_another")
    if problem == "network":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(checkpoint(tmp_path, "shared")), str(tmp_path / "out"), f"--push={name}"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1
    assert said.startswith(f"verl-atgrpo export: --push {name}: http://127.0.0.1:") and "hf auth login" in said
    assert said.endswith(f"then `hf upload {name} {tmp_path / 'out/shared'}`\n")
    assert (tmp_path / "out/shared/model.safetensors").is_file() and not hub
