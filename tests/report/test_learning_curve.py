"""Reading learning curves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_atgrpo.cli import main
from verl_atgrpo.lab.report.learning_curve import read

SUCCESS = "val-core/plan_path/acc/mean@1"


def write(path: Path, *steps: tuple[int, dict[str, float]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps))
    return path


def trained(success: float | None = None) -> dict[str, float]:
    data = {"timing_s/step": 30.0, "rollout/tokens": 100.0, "training/rollout_probs_diff_max": 1e-6}
    return data if success is None else {**data, SUCCESS: success}


def test_time_and_tokens_add_up_over_steps(tmp_path: Path) -> None:
    curve = read(write(tmp_path / "m.jsonl", (0, {SUCCESS: 0.3}), (1, trained()), (2, trained(0.9))))
    assert [(point.step, point.seconds, point.tokens, point.success) for point in curve] == [
        (0, 0.0, 0.0, 0.3),
        (2, 60.0, 200.0, 0.9),
    ]


def test_steps_repeated_after_a_resume_count_once(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", (0, {SUCCESS: 0.3}), (1, trained()), (2, trained(0.5)))
    write(tmp_path / "2.jsonl", (2, trained(0.6)), (3, trained(0.8)))
    curve = read(tmp_path)
    assert [(point.step, point.seconds, point.success) for point in curve] == [
        (0, 0.0, 0.3),
        (2, 60.0, 0.6),
        (3, 90.0, 0.8),
    ]


@pytest.mark.parametrize("names", [("1", "2"), ("metrics", "metrics-2"), ("metrics-9", "metrics-10")])
@pytest.mark.parametrize("validated", [True, False])
def test_what_an_interrupted_run_did_after_its_checkpoint_is_left_out(
    tmp_path: Path, names: tuple[str, str], validated: bool
) -> None:
    """The resumed run has not come as far yet. Its first line may be the validation of the step it resumes from."""
    old, new = (tmp_path / f"{name}.jsonl" for name in names)
    write(old, (0, {SUCCESS: 0.3}), (1, trained()), (2, trained(0.5)), (3, trained(0.7)), (4, trained(0.9)))
    write(new, *([(2, {SUCCESS: 0.55})] if validated else []), (3, trained(0.6)))
    assert [(point.step, point.seconds, point.success) for point in read(tmp_path)] == [
        (0, 0.0, 0.3),
        (2, 60.0, 0.55 if validated else 0.5),
        (3, 90.0, 0.6),
    ]


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_that_only_validates_replaces_nothing(step: int, tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", (0, {SUCCESS: 0.3}), (1, trained()), (2, trained(0.5)), (3, trained(0.7)))
    before = read(tmp_path)
    write(tmp_path / "metrics-2.jsonl", (step, {SUCCESS: 0.1}))
    assert read(tmp_path) == before
    write(tmp_path / "metrics-3.jsonl", (4, trained(0.8)))
    assert [(point.step, point.tokens) for point in read(tmp_path)] == [(0, 0), (2, 200), (3, 300), (4, 400)]


def test_parts_of_a_mixture_are_read_and_shown_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def validated(walk: float, walls: float) -> dict[str, float]:
        return {"val-core/walk/acc/mean@1": walk, "val-core/hard/walls/acc/mean@1": walls}

    metrics = write(tmp_path / "m.jsonl", (0, validated(0.1, 0.3)), (1, {**trained(), **validated(0.9, 0.4)}))
    before, after = read(metrics)
    assert before.each == {"walk": 0.1, "hard/walls": 0.3}
    assert (after.each, after.success) == ({"walk": 0.9, "hard/walls": 0.4}, pytest.approx(0.65))
    assert main(["summary", str(metrics)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  walk: 90.0%", "  hard/walls: 40.0%"]


def test_no_validation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no validation"):
        read(write(tmp_path / "m.jsonl", (1, trained())))


def test_a_run_that_logged_into_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics: name `file` in trainer.logger"):
        read(tmp_path)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = write(tmp_path / "m.jsonl", (0, {SUCCESS: 0.3}), (1, trained(0.9)))
    assert main(["summary", str(metrics)]) == 0
    assert "30.0% before (step 0), 90.0% after (step 1, 0.5 min" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plot", f"team={metrics}", "--out", "curve.png"])
    assert "plot is gone: `verl-atgrpo report" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("successes", "said"),
    [
        ((0.2, 0.949, 0.9), "after (step 3, 1.5 min of training, 300 tokens generated)\n"),
        ((0.2, 0.95, 0.9), "generated); 95% reached at step 2, 1.0 min of training, 200 tokens generated\n"),
        ((0.2, 0.3, 1.0), "100.0% after (step 3, 1.5 min of training, 300 tokens generated)\n"),
    ],
    ids=["never", "before the end", "at the end"],
)
def test_the_summary_says_when_the_game_was_learnt(
    successes: tuple[float, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [(step, trained(success)) for step, success in enumerate(successes, 1)]
    assert main(["summary", str(write(tmp_path / "m.jsonl", (0, {SUCCESS: 0.1}), *steps))]) == 0
    assert capsys.readouterr().out.endswith(said)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("schema | head -c 9", 0, ""),
        ("summary ~no_such_user/run", 1, "verl-atgrpo summary: Could not determine home directory."),
    ],
)
def test_what_a_shell_makes_of_a_command_is_no_traceback(command: str, status: int, said: str) -> None:
    atgrpo = f"{sys.executable} -c 'import sys; from verl_atgrpo.cli import main; sys.exit(main())'"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", f"{atgrpo} {command}"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.strip()) == (status, said)


def test_the_summary_of_one_validation_says_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = write(
        tmp_path / "m.jsonl", (1, {k: v for k, v in trained(0.5).items() if k != SUCCESS}), (2, trained(0.25))
    )
    assert main(["summary", str(metrics)]) == 0
    said = "validation success: 25.0% (step 2, 1.0 min of training, 200 tokens generated)"
    assert capsys.readouterr().out.strip() == said


def test_progress_shows_only_the_bar_validations_and_errors() -> None:
    script = Path(__file__).parents[2] / "scripts/show_progress.py"
    log = (
        "(TaskRunnerV1 pid=7) UserWarning: megatron is not available: ModuleNotFoundError: no module\n"
        "(TaskRunnerV1 pid=7) step:10 - actor/loss:0.1 - val-core/plan_path/acc/mean@1:np.float64(0.875) - x:1\n"
        "(TaskRunnerV1 pid=7) Training Progress:  20%|##   | 12/60 [01:11<00:13, 13.40s/it]\n"
        "(TaskRunnerV1 pid=7) INFO: worker group kwargs\n"
        "RuntimeError: the rollout stopped on a defect\n"
    )
    shown = subprocess.run([sys.executable, str(script)], input=log, capture_output=True, text=True, check=True).stdout
    assert "step 10: validation success 87.5%" in shown
    assert "12/60" in shown
    assert "RuntimeError: the rollout stopped on a defect" in shown
    assert "megatron" not in shown
    assert "kwargs" not in shown
