"""Episodes printed in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.recorded_run import ABOUT, candidate, decision, write_run

from verl_atgrpo.cli import main
from verl_atgrpo.train.trainer.record_files import VAL, RecordFiles, metrics_row

SYSTEM = "<|im_start|>system\nYou are a helpful team.<|im_end|>\n<|im_start|>user\n"
END = "<|im_end|>\n<|im_start|>assistant\n"


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["episodes", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_an_episode_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = RecordFiles(tmp_path / "record", 64, 0, ABOUT)
    asked = [f"{SYSTEM}{question}{END}" for question in ("Which way?\nUp or down?", "How many steps?")]
    pair = candidate("2", 1.0, 0.7), candidate(" 3\nsteps", 0.0, -0.7)
    answers = [(candidate("Up.\x1b[2J", 1.0, None),), pair]
    files.append(
        VAL, [decision(0, VAL, 3, n, *answers[n], prompt=asked[n], committed=n, success=True) for n in range(2)]
    )
    files.append(VAL, [{**decision(0, VAL, 4, 0), "failed": True}])
    assert printed(capsys, tmp_path).splitlines() == [
        "Step 0, task 3: solved after 2 decisions",
        "  drafter <- Which way? Up or down?",
        "  drafter -> Up.\\x1b[2J",
        "  planner <- How many steps?",
        "  planner -> 3 steps",
        "",
        "Step 0, task 4: failed",
    ]


def test_steps_and_tasks_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)

    def heads(*arguments: object) -> list[str]:
        return [line for line in printed(capsys, tmp_path, *arguments).splitlines() if line.startswith("Step")]

    assert heads() == [
        f"Step {step}, task {task}: {solved} after 1 decision"
        for step, solved in ((0, "not solved"), (3, "solved"))
        for task in (0, 1)
    ]
    assert heads("--tasks", 1, "--steps", 3) == ["Step 3, task 0: solved after 1 decision"]
    assert heads("--train", "--tasks", 1) == [
        f"Step {step}, task {40 + step}: not solved after 3 decisions" for step in (1, 3)
    ]


def test_a_task_is_printed_once_and_without_decisions_of_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = RecordFiles(tmp_path / "record", 64, 0, ABOUT)
    lone, judged = candidate("x", 1.0, None), {"scope": "planner.0.0/", "agent": "judge"}
    asked = {"prompt": f"{SYSTEM}How many?{END}"}
    for task in range(3):
        for episode in range(4):
            rows = [decision(0, VAL, task, 0, lone, **asked), decision(0, VAL, task, 1, lone, **asked, **judged)]
            files.append(VAL, [{**row, "episode": episode} for row in rows])
    heads = [line for line in printed(capsys, tmp_path, "--tasks", 2).splitlines() if line.startswith("Step")]
    assert heads == [f"Step 0, task {task}: not solved after 1 decision" for task in (0, 1)]
    shown = printed(capsys, tmp_path)
    assert "judge" not in shown and "How many?" in shown, "a prompt that all rows have is no template"


def test_what_was_not_recorded_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    for arguments, message in (
        (["--steps", "1"], "--steps 1: recorded are 0, 3"),
        (["--tasks", "0"], "--tasks 0: at least 1"),
    ):
        with pytest.raises(SystemExit):
            main(["episodes", str(tmp_path), *arguments])
        assert message in capsys.readouterr().err
    RecordFiles(tmp_path / "other/record", 64, 0, ABOUT).append("metrics", [metrics_row(0, 0.0, {})])
    with pytest.raises(SystemExit):
        main(["episodes", str(tmp_path / "other")])
    assert "no episodes of val are recorded; see at_grpo.record.val_tasks" in capsys.readouterr().err
