"""The recipes' Hydra groups, chosen on the command line."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl_atgrpo.recipes import compose


@pytest.mark.parametrize(
    ("recipe", "overrides", "same"),
    [
        ("plan_path_qwen3_1p7b", ["model=qwen3_8b"], "plan_path_qwen3_8b"),
        (
            "plan_path_qwen3_1p7b",
            ["+roles=tool_user_planner", "+placement=colocated"],
            "plan_path_qwen3_1p7b_roles",
        ),
        ("plan_path_cpu", ["+mode=async"], "plan_path_cpu_async"),
    ],
)
def test_a_group_on_the_command_line_is_the_same_as_in_a_recipe(recipe: str, overrides: list[str], same: str) -> None:
    assert compose(recipe, [*overrides, f"trainer.experiment_name={same}"]) == compose(same)
