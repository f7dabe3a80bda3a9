"""What a configured estimator may be, and what the messages say where it may not."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from verl_atgrpo.estimator import PRESETS, EstimatorSpec, resolve_spec


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "gae",
            r"^at_grpo\.estimator: unknown preset 'gae'; "
            r"valid presets: at_grpo, grpo, dr_grpo, rloo, mas_grpo, dr_mas, gigpo, m_grpo "
            r"\(or name: <a name of your own>, and fields\)$",
        ),
        (None, r"^at_grpo\.estimator: unknown preset None; valid presets: at_grpo, "),
        ({"scale": "std"}, r"^at_grpo\.estimator: unknown preset None; valid presets: at_grpo, "),
        (
            {"preset": "grpo", "centre": "mean"},
            r"^at_grpo\.estimator: unknown key 'centre'; "
            r"valid keys: preset, name, unit, center, scale, ddof, eps, singleton, center_scope, scale_scope, "
            r"main_agent, sub_calls, step_weight, step_gamma, step_scope, agents$",
        ),
        (
            {"preset": "grpo", "name": "mine"},
            r"^at_grpo\.estimator\.name: 'mine' has no effect beside preset: grpo; remove one of them$",
        ),
        (
            {"preset": "grpo", "unit": "token"},
            r"^at_grpo\.estimator\.unit: 'token' is not one of row, trajectory, call$",
        ),
        (
            {"preset": "grpo", "center": 0},
            r"^at_grpo\.estimator\.center: 0 is not one of mean, leave_one_out, none$",
        ),
        ({"preset": "grpo", "scale": None}, r"^at_grpo\.estimator\.scale: None is not one of std, none$"),
        (
            {"preset": "grpo", "singleton": ["zero"]},
            r"^at_grpo\.estimator\.singleton: \['zero'\] is not one of zero, raw$",
        ),
        (
            {"preset": "dr_mas", "center_scope": "team"},
            r"^at_grpo\.estimator\.center_scope: 'team' is not one of group, agent$",
        ),
        (
            {"preset": "dr_mas", "scale_scope": None},
            r"^at_grpo\.estimator\.scale_scope: None is not one of group, agent$",
        ),
        (
            {"preset": "dr_mas", "scale": "none"},
            r"^at_grpo\.estimator\.scale_scope: 'agent' has no effect with scale: none; set scale_scope: group$",
        ),
        (
            {"preset": "mas_grpo", "center_scope": "agent"},
            r"^at_grpo\.estimator\.unit: 'trajectory' counts episodes, .* an agent's rows; set unit: row$",
        ),
        ({"preset": "grpo", "ddof": 2}, r"^at_grpo\.estimator\.ddof: 2 is not one of 0, 1$"),
        ({"preset": "grpo", "ddof": True}, r"^at_grpo\.estimator\.ddof: True is not one of 0, 1$"),
        ({"preset": "grpo", "eps": -1e-6}, r"^at_grpo\.estimator\.eps: -1e-06 is not a finite number >= 0$"),
        ({"preset": "grpo", "eps": "1e-6"}, r"^at_grpo\.estimator\.eps: '1e-6' is not a finite number >= 0$"),
    ],
)
def test_invalid_config_names_key_value_and_choices(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_spec(value)


def test_valid_config() -> None:
    assert resolve_spec("rloo") == PRESETS["rloo"]
    mapping: Mapping[str, Any] = {"preset": "grpo", "singleton": "raw", "eps": 0}
    assert resolve_spec(mapping) == EstimatorSpec(name="grpo", singleton="raw", eps=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["grpo"].eps = 1.0  # type: ignore[misc]
