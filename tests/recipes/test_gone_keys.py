"""Keys that are gone are refused with what to do instead, on the command line and in a recipe."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

from verl_atgrpo.recipes.gone import KEYS
from verl_atgrpo.train.config.schema import ConfigError
from verl_atgrpo.train.config.section import parse_section


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_gone_is_refused_by_name(key: str, compose: Any) -> None:
    line = f"{key} is gone: {KEYS[key]}"
    for override in (f"{key}=1", f"+{key}=1", f"++{key}=1", f"~{key}"):
        with pytest.raises(ValueError, match="cannot be composed") as caught:
            compose("plan_path_cpu", override)
        assert str(caught.value).endswith(f": {line}")
    with pytest.raises(ConfigError) as refused:
        parse_section({"environment": {"name": "plan_path"}, key.partition(".")[2]: 1})
    assert str(refused.value) == line
