"""The environment keeps what training relies on. Scripts play the agents: no model, no verl."""

import re

from my_team import Call

from verl_atgrpo import check_environment


def gold(task: Call) -> dict:
    """CHANGE: replies that solve a task: agent -> (prompt, candidate k) -> reply."""
    return {
        "porter": lambda prompt, k: "up" if "above" in prompt else "down",
        "driver": lambda prompt, k: re.search(r"\d+", prompt)[0],
    }


def always_up(task: Call) -> dict:
    """CHANGE: replies that try to earn without solving a task. They must not earn what `gold` earns."""
    return {"porter": lambda prompt, k: "up", "driver": lambda prompt, k: "0"}


def test_my_team():
    check_environment("my_team:MyTeam", gold=gold, exploits=[always_up])
