"""Recipes and keys that are gone, each with what replaces it."""

from __future__ import annotations


def _apart(first: str, second: str) -> str:
    """Returns the overrides that give each of two agents a policy on 4 of 8 GPUs."""
    policies = f"+at_grpo.policies.{first}.gpus=4 +at_grpo.policies.{second}.gpus=4"
    return f"+roles={first}_{second} +placement=split {policies}"


_DRAFTING = ("plan_path", "sokoban", "sudoku")
_TOGETHER = "+placement=colocated"
SAME = {
    "plan_path_cpu_async": "plan_path_cpu +mode=async",
    "walk_smollm2_roles": "walk_smollm2 +roles=navigator_pacer",
    "walk_walls_smollm2_roles": "walk_walls_smollm2 +roles=navigator_checker",
    "number_search_smollm2_roles": "number_search_smollm2 +roles=guesser_judge",
    "math_qwen3_8b": "math_qwen3_1p7b model=qwen3_8b",
    "math_qwen3_1p7b_roles": f"math_qwen3_1p7b +roles=tool_user_reasoner {_TOGETHER}",
    "math_qwen3_8b_roles": f"math_qwen3_1p7b model=qwen3_8b {_apart('tool_user', 'reasoner')}",
    "code_qwen3_1p7b_roles": f"code_qwen3_1p7b +roles=coder_tester {_TOGETHER}",
    "code_qwen3_8b_roles": f"code_qwen3_8b {_apart('coder', 'tester')}",
    **{f"{game}_qwen3_8b": f"{game}_qwen3_1p7b model=qwen3_8b" for game in _DRAFTING},
    **{f"{game}_qwen3_1p7b_roles": f"{game}_qwen3_1p7b +roles=tool_user_planner {_TOGETHER}" for game in _DRAFTING},
    **{
        f"{game}_qwen3_8b_roles": f"{game}_qwen3_1p7b model=qwen3_8b {_apart('tool_user', 'planner')}"
        for game in _DRAFTING
    },
}
"""Recipe -> another one with groups, which composes the same but for `trainer.experiment_name`."""

_TINY = "a tiny model for it is no longer made; without a GPU use plan_path_cpu, sudoku_cpu or walk_smollm2, with one"
_MATH = "--config-name=math_qwen3_1p7b hardware=1_gpu"
LIKE = {
    "sokoban_cpu": "--config-name=sokoban_qwen3_1p7b hardware=1_gpu",
    "code_cpu": "--config-name=code_qwen3_1p7b hardware=1_gpu",
    "search_cpu": "--config-name=search_hotpotqa_qwen3_1p7b hardware=1_gpu",
    "math_cpu": _MATH,
    **{
        f"{game}_cpu": f"{_MATH} at_grpo.environment.name={game} ~at_grpo.environment.max_turns"
        for game in ("math_drafts", "math_judged")
    },
    "math_refined_cpu": (
        f"{_MATH} at_grpo.environment.name=math_refined ~at_grpo.environment.max_turns at_grpo.scheme=branch "
        "at_grpo.branch={nested:true}"
    ),
}
"""Recipe of a tiny model -> the same environment with a larger one."""


def of_recipe(name: str) -> str | None:
    """Returns what a command that names this recipe is told, in one line; None unless the recipe is gone."""
    if name in SAME:
        return f"the recipe {name} is gone: use --config-name={SAME[name]} trainer.experiment_name={name}"
    return f"the recipe {name} is gone: {_TINY} {LIKE[name]}" if name in LIKE else None


KEYS = {
    "at_grpo.poll_interval": "the trainer polls for finished episodes every .05 seconds; remove it",
    "at_grpo.softmax_temperature": "it went with selection: softmax; use selection: greedy, first or random",
}


def of_key(key: str) -> str | None:
    """Returns what a job that sets this key is told, in one line; None unless the key is gone."""
    return f"{key} is gone: {KEYS[key]}" if key in KEYS else None
