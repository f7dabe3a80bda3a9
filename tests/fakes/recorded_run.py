"""Records of a fictitious run: two agents, three steps, validation before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_atgrpo.train.trainer.record_files import METRICS, TRAIN, VAL, RecordFiles, metrics_row

ABOUT = {
    "experiment": "made up",
    "command": "python -m verl.trainer.main_ppo --config-name=made_up",
    "section": {"environment": {"name": "plan_path", "size": 4}, "candidates": 2, "estimator": "at_grpo"},
    "models": {"shared": "some/model"},
    "frozen": [],
}
HOSTILE = '</script><script>window.hit=1</script><img src=x onerror="window.hit=1"><!-- {{data}} & \u2028 \u0007'


def candidate(text: str, reward: float, advantage: float | None) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": len(text),
        "team": reward - 0.25,
        "local": 0.25,
        "reward": reward,
        "advantage": advantage,
        "truncated": False,
    }


def decision(
    step: int, split: str, task: int, number: int, *candidates: dict[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        "step": step,
        "split": split,
        "task": task,
        "episode": 0,
        "decision": number,
        "success": False,
        "episode_reward": 0.5,
        "agent": ("drafter", "planner")[number % 2],
        "turn": number // 2,
        "policy": "shared",
        "prompt": f"prompt of {split} {task} at {step}",
        "prompt_tokens": 7,
        "committed": 0,
        "candidates": list(candidates),
        **more,
    }


def step_metrics(step: int) -> dict[str, float]:
    return {
        "team/success": step / 4,
        "actor/grad_norm": float("nan") if step == 2 else 1.0 / step,
        "agent/drafter/reward": 0.5,
        "agent/planner/reward": 0.25 * step,
        "agent/planner/inflation_factor": 1.5,
        "timing_s/step": 10.0,
        "timing_s/gen": 6.0,
        "timing_s/record": 0.05,
        "rollout/tokens": 1000.0,
        "rollout/candidates": 64.0,
    }


def write_run(folder: Path, steps: int = 3, text: str = "RRDD") -> Path:
    """Writes a run's records into `folder`/record and returns `folder`."""
    files = RecordFiles(folder / "record", 64, 0, ABOUT)
    for step in range(steps + 1):
        data = step_metrics(step) if step else {}
        if step in (0, steps):
            data |= {"val-core/plan_path/acc/mean@1": step / steps}
            for task in range(2):
                lone = candidate(f"{text} of {task} at {step}", 1.0, None)
                solved = step == steps
                files.append(VAL, [decision(step, VAL, task, 0, lone, success=solved)])
        files.append(METRICS, [metrics_row(step, 1000.0 + step, data)])
        if step:
            pair = candidate(f"good {text}", 1.0, 0.7), candidate("bad", 0.0, -0.7)
            files.append(TRAIN, [decision(step, TRAIN, 40 + step, number, *pair) for number in range(3)])
    return folder
