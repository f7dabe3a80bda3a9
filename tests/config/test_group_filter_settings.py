"""The settings of the group filter: what is refused, and how many tasks they add."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.jobs import asked

from verl_atgrpo.train.config.job_rules import of_tasks
from verl_atgrpo.train.config.schema import ConfigError, GroupFilter
from verl_atgrpo.train.config.section import parse_section
from verl_atgrpo.train.rows.step_rows import tasks_to_add


@pytest.mark.parametrize(
    ("groups", "played", "added"),
    [
        (10, 32, 0),  # enough
        (12, 32, 0),
        (8, 32, 8),  # four tasks a group
        (7, 32, 14),  # 3 * 32 / 7 = 13.7
        (1, 32, 32),  # 288 at this rate: no more than were played
        (0, 32, 32),  # no rate
        (1, 80, 20),  # what is left of max_tasks
        (0, 100, 0),
    ],
)
def test_tasks_to_add(groups: int, played: int, added: int) -> None:
    assert tasks_to_add(GroupFilter(min_groups=10, max_tasks=100), groups, played) == added
    assert tasks_to_add(GroupFilter(), groups, played) == 0


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (True, "at_grpo.group_filter=True: a section, or null"),
        ({"min_group": 8}, "at_grpo.group_filter.min_group is not a known key: use one of min_groups, max_tasks"),
        ({"min_groups": 0, "max_tasks": 9}, "at_grpo.group_filter.min_groups=0: a whole number, at least 1"),
        ({"min_groups": True, "max_tasks": 9}, "at_grpo.group_filter.min_groups=True: a whole number, at least 1"),
        ({"min_groups": 8, "max_tasks": 9.5}, "at_grpo.group_filter.max_tasks=9.5: a whole number, at least 1"),
        ({"min_groups": 8}, "at_grpo.group_filter.min_groups=8: .* max_tasks"),
        ({"max_tasks": 8}, "at_grpo.group_filter.max_tasks=8 has no effect without min_groups"),
    ],
)
def test_refused_with_one_line(block: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_section({"environment": {"name": "plan_path"}, "group_filter": block})
    assert "\n" not in str(caught.value)


def test_null_is_no_filter_and_an_empty_section_drops() -> None:
    section = {"environment": {"name": "plan_path"}}
    assert parse_section(section).group_filter is None
    assert parse_section({**section, "group_filter": {}}).group_filter == GroupFilter()


@pytest.mark.parametrize(
    ("max_tasks", "message"),
    [
        (32, "max_tasks=32: the step plays data.train_batch_size=32 tasks anyway"),
        (65, "max_tasks=65: there are 64 training tasks.*raise at_grpo.train_tasks"),
        (33, None),
        (64, None),
    ],
)
def test_the_bound_fits_the_tasks(max_tasks: int, message: str | None) -> None:
    config = parse_section(
        {
            "environment": {"name": "plan_path"},
            "train_tasks": 64,
            "group_filter": {"min_groups": 8, "max_tasks": max_tasks},
        }
    )
    data = {"train_batch_size": 32}
    if message is None:
        asked(of_tasks, config, data=data)
        return
    with pytest.raises(ConfigError, match=message):
        asked(of_tasks, config, data=data)
