"""Large models' processes return freed memory in CPU mode, tiny ones' keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from verl_atgrpo.train.config.machine_rules import LARGE, RETURNED, return_large_blocks
from verl_atgrpo.train.config.policies import expand_policies
from verl_atgrpo.train.config.section import read_section

PLANNERS = "at_grpo.policies.planner.model.path"


@pytest.mark.parametrize(
    ("sizes", "given", "expected"),
    [
        ((LARGE // 2 - 1, LARGE // 2 - 1), {}, {}),
        ((LARGE // 2, LARGE // 2), {}, RETURNED),  # in two files
        ((LARGE, 0), {"MALLOC_ARENA_MAX": "8"}, {**RETURNED, "MALLOC_ARENA_MAX": "8"}),
    ],
)
def test_the_largest_model_decides_and_the_jobs_own_values_win(
    compose: Any, tmp_path: Path, sizes: tuple[int, int], given: dict[str, str], expected: dict[str, str]
) -> None:
    for number, size in enumerate(sizes):
        with open(tmp_path / f"model-{number}.safetensors", "wb") as file:
            file.truncate(size)
    (tmp_path / "tiny").mkdir()
    config = compose(
        "plan_path_cpu_roles", f"{PLANNERS}={tmp_path}", f"at_grpo.policies.tool_user.model.path={tmp_path / 'tiny'}"
    )
    where = "ray_kwargs.ray_init.runtime_env.env_vars"
    before = OmegaConf.to_container(OmegaConf.select(config, where))
    for name, value in given.items():
        OmegaConf.update(config, f"{where}.{name}", value, force_add=True)
    settings = read_section(config)
    expand_policies(config, settings)
    return_large_blocks(config, settings)
    assert OmegaConf.select(config, where) == {**before, **expected}


def test_a_model_of_the_hub_is_large(compose: Any) -> None:
    config = compose("plan_path_cpu", "actor_rollout_ref.model.path=owner/name")
    return_large_blocks(config, read_section(config))
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert RETURNED.items() <= variables.items()
