"""The fixture `compose` is faster than Hydra and gives the same."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")

from verl_atgrpo import recipes

CASES = [
    ("plan_path_cpu", []),
    ("plan_path_cpu", ["model=qwen3_8b", "at_grpo.candidates=2", "data.train_batch_size=3"]),
    ("plan_path_cpu", ["at_grpo.environment.size=6", "++actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1"]),
    ("plan_path_qwen3_1p7b", ["+roles=tool_user_planner", "~at_grpo.record", "at_grpo.agents={all: shared}"]),
]


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_the_same_configuration(compose: Any, recipe: str, overrides: list[str]) -> None:
    ours, hydras = compose(recipe, *overrides), recipes.compose(recipe, overrides)
    assert OmegaConf.to_container(ours, resolve=False) == OmegaConf.to_container(hydras, resolve=False)
    assert OmegaConf.is_struct(ours) and OmegaConf.is_struct(hydras)


@pytest.mark.parametrize("override", ["at_grpo.candidate=2", "+at_grpo.candidates=2", "~at_grpo.candidate"])
def test_the_same_error(compose: Any, override: str) -> None:
    with pytest.raises(ValueError, match="plan_path_cpu") as ours:
        compose("plan_path_cpu", override)
    with pytest.raises(ValueError) as hydras:
        recipes.compose("plan_path_cpu", [override])
    assert str(ours.value) == str(hydras.value)
