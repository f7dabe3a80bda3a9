"""`eval` and `compare` on files that are truncated, corrupt, foreign or huge, and `eval` when every episode fails."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_files import LINES, changed, in_place_of, refused, safetensors, small_model, with_line

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("verl")

from verl_atgrpo.cli import main
from verl_atgrpo.lab.evaluation import command
from verl_atgrpo.lab.evaluation import plan as plans
from verl_atgrpo.lab.evaluation.results import AgentUsage, EpisodeRow, Failure, ResultFile
from verl_atgrpo.recipes import compose

Capture = pytest.CaptureFixture[str]
EVAL = ["eval", "--config-name=plan_path_cpu", "--tasks=3"]


@pytest.fixture(scope="module")
def recipe() -> Iterator[None]:
    """The composed recipe, once for all tests; its class is looked up by every command."""
    composed = compose("plan_path_cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "compose", lambda *_: copy.deepcopy(composed))
        yield


@pytest.fixture(scope="module")
def planned(recipe: None) -> plans.Plan:
    return plans.make(plans.Options("plan_path_cpu", tasks=3, policies=["shared=big@http://localhost:1/v1"]))


def row(task: int, failed: Failure | None = None) -> EpisodeRow:
    usage = {"planner": AgentUsage("shared", 1, 50, 10, 0)}
    return EpisodeRow(task, f"f{task}", 0, 0, not failed, 1.0, {}, 1, 1, usage, failed, 0.1)


@pytest.fixture
def results(planned: plans.Plan, tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    with ResultFile(path, planned.header, {}) as file:
        for task in range(3):
            file.add(row(task))
    (tmp_path / "b.jsonl").write_bytes(path.read_bytes())
    return path


@pytest.fixture
def no_playing(planned: plans.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "make", lambda _: planned)
    monkeypatch.setattr(command, "play_all", lambda *_, **__: pytest.fail("it plays"))


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("number", [1, 3])
def test_a_comparison_of_a_broken_line(number: int, name: str, results: Path, tmp_path: Path, capsys: Capture) -> None:
    first = with_line(tmp_path / "b.jsonl", number, LINES[name])
    refused(["compare", first, results], tmp_path, capsys, first if number == 1 else f"{first}:{number}:")


@pytest.mark.parametrize("name", LINES)
def test_an_evaluation_does_not_continue_a_broken_file(
    name: str, results: Path, tmp_path: Path, capsys: Capture, no_playing: None
) -> None:
    with_line(results, 2, LINES[name])
    refused([*EVAL, "--out", results], tmp_path, capsys, f"{results}:2:")


@pytest.mark.parametrize(
    ("number", "place", "value"),
    [
        (1, ("settings",), []),
        (1, ("settings",), ...),
        (1, ("made_by",), "me"),
        (1, ("made_by", "data_sets"), {"walk": -1}),
        (2, ("task",), "0"),
        (2, ("task",), -1),
        (2, ("task",), 1.5),
        (2, ("success",), "true"),
        (2, ("success",), 1),
        (2, ("seed",), None),
        (2, ("sample",), True),
        (2, ("fingerprint",), 7),
        (2, ("turns",), 10**9),
        (2, ("metrics",), []),
        (2, ("metrics",), {"x": "1"}),
        (2, ("agents",), None),
        (2, ("agents", "planner"), []),
        (2, ("agents", "planner", "generated_tokens"), float("nan")),
        (2, ("agents", "planner", "generated_tokens"), 10**400),
        (2, ("agents", "planner", "prompt_tokens"), -5),
        (2, ("agents", "planner", "policy"), ...),
        (2, ("failed",), "yes"),
        (2, ("failed",), {"reason": "x"}),
        (2, ("unknown",), 1),
        (2, ("seconds",), ...),
    ],
)
def test_a_comparison_of_a_wrong_value(
    number: int, place: tuple[Any, ...], value: Any, results: Path, tmp_path: Path, capsys: Capture
) -> None:
    changed(results, number, *place, value=value)
    refused(["compare", tmp_path / "b.jsonl", results], tmp_path, capsys, f"{results}:{number}:", place[-1])


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "nothing", "2 GiB", "100 MB line"])
def test_no_result_file(kind: str, results: Path, tmp_path: Path, capsys: Capture, no_playing: None) -> None:
    in_place_of(results, kind)
    refused(["compare", tmp_path / "b.jsonl", results], tmp_path, capsys, results)
    if kind != "nothing":
        refused([*EVAL, "--out", results], tmp_path, capsys, results)


def test_a_line_of_100_mb_is_not_read(results: Path, tmp_path: Path, capsys: Capture) -> None:
    with results.open("r+b") as file:
        file.seek(results.read_bytes().index(b"\n") + 1)
        file.truncate()
        file.truncate(100_000_000)
        file.seek(0, 2)
        file.write(b"\n")
    refused(["compare", results, tmp_path / "b.jsonl"], tmp_path, capsys, f"{results}:2:", "longer than")


def test_files_without_a_common_task_and_without_episodes_are_named(
    results: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "b.jsonl"
    other.write_text(other.read_text().replace(': "f', ': "g'))
    refused(["compare", results, other], tmp_path, capsys, results, other, "no task")
    for content in (b"", results.read_bytes().split(b"\n")[0] + b"\n", b'{"form'):
        other.write_bytes(content)
        refused(["compare", results, other], tmp_path, capsys, other, "has no episodes")


# ------------------------------------------------------------ models and checkpoints


@pytest.mark.parametrize("name", ["cut", "other object", "nested"])
def test_an_evaluation_of_a_broken_model_starts_no_engine(
    name: str, recipe: None, tmp_path: Path, capsys: Capture
) -> None:
    model = small_model(tmp_path / "model")
    (model / "config.json").write_bytes(LINES[name])
    arguments = [*EVAL, f"--policy=shared={model}", "--out", tmp_path / "new/out.jsonl"]
    refused(arguments, tmp_path, capsys, model / "config.json")


def test_an_evaluation_of_a_model_that_is_nowhere_says_which(
    recipe: None, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistyped folder with one slash may be a hub's model."""
    # Read from the environment when it was imported; a machine without the hub tries for 45 s.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([*map(str, [*EVAL, "--policy=shared=exported/shard", "--out", tmp_path / "out.jsonl"])])
    error = capsys.readouterr().err.strip()
    assert re.search(
        r"exported/shard: this model cannot be loaded; it is no folder here, or not a whole one \(", error
    )


@pytest.mark.parametrize("file", ["policies.json", "policies/shared/huggingface/model.safetensors"])
def test_an_evaluation_of_a_broken_checkpoint(file: str, recipe: None, tmp_path: Path, capsys: Capture) -> None:
    step = tmp_path / "global_step_1"
    small_model(step / "policies/shared/huggingface")
    (step / "policies.json").write_text('{"shared": "policies/shared"}')
    (step / file).write_bytes(safetensors()[:-1])
    refused([*EVAL, "--checkpoint", step, "--out", tmp_path / "out.jsonl"], tmp_path, capsys, step / file)


# ------------------------------------------------------------ every episode failed


@pytest.mark.parametrize("failures", [3, 2])
def test_an_evaluation_whose_episodes_all_failed_is_no_success(
    failures: int, planned: plans.Plan, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Failure("endpoint", "big@http://localhost:1/v1: APIConnectionError:\nConnection error.")

    async def play_all(environment: Any, lineup: Any, keys: Any, results: ResultFile, **_: Any) -> None:
        for key in keys:
            results.add(row(key.task, dead if key.task < failures else None))

    monkeypatch.setattr(plans, "make", lambda _: planned)
    monkeypatch.setattr(command, "play_all", play_all)
    monkeypatch.setattr(command, "_served", lambda *_: _nothing())
    out = tmp_path / "a.jsonl"
    arguments = [*EVAL, "--out", str(out)]
    if failures == 2:
        assert main(arguments) == 0
        assert "2 (endpoint 2): counted as not solved" in capsys.readouterr().out
        return
    for _ in range(2):  # the episodes are retried, and fail again
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert f"{out}: all 3 episodes failed (endpoint 3)" in captured.err and "Connection error." in captured.err
    assert len(out.read_text().splitlines()) == 7  # they are kept: the file says why
    assert json.loads(out.read_text().splitlines()[-1])["failed"]["reason"] == "endpoint"


async def _nothing() -> None:
    return None


def test_a_full_disk_is_named(planned: plans.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, _: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    with ResultFile(tmp_path / "a.jsonl", planned.header, {}) as file:
        monkeypatch.setattr(file, "_file", Full())
        with pytest.raises(OSError, match=r"No space left on device: '.*a\.jsonl'"):
            file.add(row(0))
