"""The environment keeps what training relies on. Scripts play the agents: no model, no verl."""

from typing import Any

from my_team import Call

from verl_atgrpo import check_environment


def gold(task: Call) -> dict[str, Any]:
    """CHANGE: replies that solve a task: agent -> (prompt, candidate k) -> reply."""
    return {
        "porter": lambda prompt, k: "up" if "above" in prompt else "down",
        "driver": lambda prompt, k: next(word for word in prompt.split() if word.isdigit()),
    }


def always_up(task: Call) -> dict[str, Any]:
    """CHANGE: replies that try to earn without solving a task. They must not earn what `gold` earns."""
    return {"porter": lambda prompt, k: "up", "driver": lambda prompt, k: "0"}


def test_my_team() -> None:
    check_environment("my_team:MyTeam", gold=gold, exploits=[always_up])
